"""gRPC, by Triton's client: the same answers as over HTTP, deadlines and cancellation that reach the engine."""

from __future__ import annotations

import base64
import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ports import own_port
from servers import SlowSlots, nothing_left, png, running, until

import odevit_serve
from odevit_serve import bundle
from odevit_serve.config import Confidence, Unsure
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.http.middleware import Options
from odevit_serve.serving.repository import Repository

triton = pytest.importorskip("tritonclient.grpc", reason="needs the extra `triton`")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException
PICTURES = [png(i) for i in range(6)]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> BundleModel:
    loaded = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(loaded, BundleModel)
    return loaded


@contextlib.contextmanager
def serving(engine: Any, **options: Any) -> Iterator[Any]:
    address = f"127.0.0.1:{own_port()}"
    with running(engine, Options(grpc=address, **options)):
        yield triton.InferenceServerClient(address)


@pytest.fixture(scope="module")
def plain(model: BundleModel) -> Iterator[tuple[Engine, Any]]:
    engine = Engine(model, slots=4)
    with serving(engine) as client:
        yield engine, client
        nothing_left(engine)


def encoded(pictures: list[bytes]) -> Any:
    given = triton.InferInput("image", [len(pictures)], "BYTES")
    given.set_data_from_numpy(np.array(pictures, object))
    return given


def test_health_and_metadata(plain: tuple[Engine, Any]) -> None:
    _, client = plain
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("random")
    assert client.get_server_metadata().name == "odevit-serve"
    found = client.get_model_metadata("random")
    assert [(t.name, t.datatype, list(t.shape)) for t in found.inputs] == [
        ("pixel_values", "FP32", [-1, 3, 16, 16]),
        ("image", "BYTES", [-1]),
    ]
    for call in (lambda: client.get_model_metadata("other"), lambda: client.is_model_ready("random", "2")):
        with pytest.raises(InferenceServerException) as told:
            call()
        assert told.value.status() == "StatusCode.NOT_FOUND"


def test_inference(plain: tuple[Engine, Any], model: BundleModel) -> None:
    _, client = plain
    expected = model.predict(PICTURES)
    answer = client.infer("random", [encoded(PICTURES)], request_id="mine")
    assert answer.get_response().id == "mine"
    assert answer.as_numpy("label").tolist() == [p.label.encode() for p in expected]
    assert answer.as_numpy("steps").tolist() == [p.steps for p in expected]
    np.testing.assert_allclose(answer.as_numpy("probabilities"), [p.probabilities for p in expected], atol=1e-4)
    pixels = triton.InferInput("pixel_values", [6, 3, 16, 16], "FP32")
    pixels.set_data_from_numpy(np.stack([model.prepare(p) for p in PICTURES]))
    some = [triton.InferRequestedOutput("label")]
    prepared = client.infer("random", [pixels], outputs=some, parameters={"max_steps": 2})
    assert [output.name for output in prepared.get_response().outputs] == ["label"]
    assert "unsure" not in [output.name for output in answer.get_response().outputs]  # nothing was proven here
    assert prepared.as_numpy("label").tolist() == [p.label.encode() for p in model.predict(PICTURES, max_steps=2)]


def test_marks_are_tensors_here_and_over_http(tiny_bundle: Path, tmp_path: Path) -> None:
    """`guaranteed` of every model, `unsure` of one that has the mark."""
    folder = shutil.copytree(tiny_bundle, tmp_path / "random")
    chances = [p.probability for p in odevit_serve.load(folder, threads=1).predict(PICTURES)]
    mark = Unsure(float(np.median(chances)), 0.1, 0.05, 100)
    config = bundle.read_config(folder)
    bundle.write_config(folder, config.replace(confidence=Confidence(1.0, 100, unsure=mark)))
    loaded = odevit_serve.load(folder, threads=1)
    expected = [[p.guaranteed, p.unsure] for p in loaded.predict(PICTURES)]
    assert {unsure for _, unsure in expected} == {True, False}
    address = f"127.0.0.1:{own_port()}"
    with running(Engine(loaded, slots=4), Options(grpc=address)) as http:
        found = triton.InferenceServerClient(address).infer("random", [encoded(PICTURES)])
        assert np.stack([found.as_numpy(name) for name in ("guaranteed", "unsure")], 1).tolist() == expected
        data = [base64.b64encode(picture).decode() for picture in PICTURES]
        asked = {"inputs": [{"name": "image", "shape": [len(data)], "datatype": "BYTES", "data": data}]}
        answer = httpx.post(f"{http}/v2/models/random/infer", json=asked, timeout=30).json()
        outputs = {output["name"]: output for output in answer["outputs"]}
        assert [list(pair) for pair in zip(outputs["guaranteed"]["data"], outputs["unsure"]["data"])] == expected
        assert outputs["unsure"]["datatype"] == "BOOL"


@pytest.mark.parametrize(
    ("pictures", "parameters", "code", "part"),
    [
        ([b"no"], {}, "INVALID_ARGUMENT", "not a picture"),
        ([PICTURES[0]], {"max_steps": 0}, "INVALID_ARGUMENT", "max_steps"),
        ([PICTURES[0]], {"colour": "red"}, "INVALID_ARGUMENT", "colour"),
        ([PICTURES[0]] * 65, {}, "RESOURCE_EXHAUSTED", "64 are allowed"),
    ],
)
def test_errors_have_a_code_and_a_sentence(
    plain: tuple[Engine, Any], pictures: list[bytes], parameters: dict[str, Any], code: str, part: str
) -> None:
    with pytest.raises(InferenceServerException, match=part) as told:
        plain[1].infer("random", [encoded(pictures)], parameters=parameters)
    assert told.value.status() == f"StatusCode.{code}"


def test_the_deadline_of_a_call_is_that_of_its_images(model: BundleModel) -> None:
    core = SlowSlots(model.graphs, 2, pause=0.0)
    engine = Engine(model, core=core)
    with serving(engine) as client:
        core.gate.clear()
        done: list[Any] = []
        picture = [encoded(PICTURES[:1])]
        client.async_infer("random", picture, lambda result, error: done.append((result, error)), client_timeout=100)
        until(lambda: engine.active == 1)
        (request,) = engine._pending.held
        # Before that of the call, to leave time for the answer; gRPC rounds 100 s up by as much as one.
        assert 0 < request.deadline - core.clock() < 92
        core.gate.set()
        until(lambda: done)
        result, error = done[0]
        assert error is None
        assert result.as_numpy("label").tolist() == [model.predict(PICTURES[0]).label.encode()]
        core.gate.clear()  # no step is taken until the deadline has passed
        with pytest.raises(InferenceServerException) as told:
            client.infer("random", picture, client_timeout=0.05)
        assert told.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        core.gate.set()
        nothing_left(engine)


def test_a_cancelled_call_frees_its_slot(model: BundleModel) -> None:
    core = SlowSlots(model.graphs, 2, pause=0.0)
    engine = Engine(model, core=core)
    with serving(engine) as client:
        core.gate.clear()
        ended = threading.Event()
        call = client.async_infer("random", [encoded(PICTURES[:1])], callback=lambda result, error: ended.set())
        until(lambda: engine.active == 1)
        call.cancel()
        assert ended.wait(10)
        until(lambda: engine.stats.cancelled == 1)
        core.gate.set()
        nothing_left(engine)


def test_the_key_and_the_repository(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "second")
    models = Repository(lambda source: Engine(odevit_serve.load(source, threads=1), slots=4), tmp_path)
    models.open([f"first={tiny_bundle}"])
    key = {"authorization": "Bearer sesam"}
    with serving(models, api_key="sesam") as client:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException) as told:
            client.infer("first", [encoded(PICTURES)])
        assert told.value.status() == "StatusCode.UNAUTHENTICATED"
        client.load_model("second", headers=key)
        assert {m.name for m in client.get_model_repository_index(headers=key).models} == {"first", "second"}
        assert client.infer("second", [encoded(PICTURES)], headers=key).as_numpy("steps").shape == (6,)
        client.unload_model("second", headers=key)
        assert not client.is_model_ready("second", headers=key)
