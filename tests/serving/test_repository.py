"""Several models in one server: their paths and metrics; replaced, unloaded and put to sleep under load."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Process, png, running, until

import odevit_serve
from odevit_serve.errors import UsageError, UserError
from odevit_serve.serving.decoders import Decoders
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.http.app import create_app
from odevit_serve.serving.http.middleware import Options
from odevit_serve.serving.repository import Repository, parse
from odevit_serve.serving.turns import Turns

PICTURES = [png(i) for i in range(6)]
KEY = {"X-API-Key": "sesam"}


@pytest.fixture
def load() -> Callable[[str], Engine]:
    turns, decoders = Turns(), Decoders()

    def make(source: str) -> Engine:
        model = odevit_serve.load(source, threads=1)
        model.open_all()
        return Engine(model, slots=4, turns=turns, decoders=decoders)

    return make


@pytest.fixture
def folder(tiny_bundle: Path, tiny_bundles: Callable[..., Path], tmp_path: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "first")
    shutil.copytree(tiny_bundles(seed=1), tmp_path / "second")
    return tmp_path


@pytest.fixture
def server(folder: Path, load: Any) -> Iterator[tuple[Repository, httpx.Client]]:
    """`first` is served; `second` lies beside it."""
    models = Repository(load, folder).open([f"first={folder / 'first'}"])
    with (
        running(models, Options(api_key="sesam")) as address,
        httpx.Client(base_url=address, headers=KEY, timeout=20) as client,
    ):
        yield models, client


def answers(source: Path) -> list[tuple[str, int, float]]:
    found = odevit_serve.load(source, threads=1).predict(PICTURES)
    return [(p.label, p.steps, round(p.probability, 4)) for p in found]


def ask(client: httpx.Client, path: str = "/v1/predict") -> list[tuple[str, int, float]]:
    texts = [base64.b64encode(p).decode() for p in PICTURES]
    answer = client.post(path, json={"images": texts})
    assert answer.status_code == 200, answer.text
    return [(e["label"], e["steps"], round(e["probability"], 4)) for e in answer.json()["predictions"]]


def test_each_model_has_its_paths_and_its_counts(folder: Path, load: Any, tiny_files: dict[str, Path]) -> None:
    sources = [f"a={folder / 'first'}", f"b={folder / 'second'}", f"file={tiny_files['onnx']}"]
    models = Repository(load).open(sources)
    with running(models) as address, httpx.Client(base_url=address, timeout=20) as client:
        assert ask(client) == ask(client, "/v1/models/a/predict") == answers(folder / "first")
        assert ask(client, "/v1/models/b/predict") == answers(folder / "second") != answers(folder / "first")
        assert client.get("/v1/models/b").json()["name"] == "b"
        assert [m["name"] for m in client.get("/v1/models").json()["models"]] == ["a", "b", "file"]
        assert client.post("/v1/models/b/attention", content=PICTURES[0]).headers["content-type"] == "image/png"
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(PICTURES[0]).decode()]}
        answer = client.post("/v2/models/b/infer", json={"inputs": [tensor]}).json()
        assert answer["model_name"] == "b"
        assert answer["outputs"][1]["data"] == [answers(folder / "second")[0][0]]
        assert client.get("/v2/models/b/ready").json() == {"name": "b", "ready": True}
        missing = client.post("/v1/models/c/predict", content=PICTURES[0])
        assert (missing.status_code, missing.json()["error"]) == (404, "no model 'c': this server has 'a', 'b', 'file'")
        assert client.get("/v1/models/c").status_code == client.get("/v2/models/c").status_code == 404
        assert client.post("/v2/repository/index").status_code == 404  # not allowed here
        text = client.get("/metrics").text
        assert 'odevit_images_answered_total{model="a"} 12.0' in text
        assert 'odevit_images_answered_total{model="b"} 8.0' in text
        assert 'odevit_images_answered_total{model="file"} 0.0' in text
        assert text.count("# TYPE odevit_images_answered_total") == 1


def test_two_of_one_name_are_refused(folder: Path, load: Any) -> None:
    with pytest.raises(UsageError, match="two models are called 'random'"):
        Repository(load).open([str(folder / "first"), str(folder / "second")])
    assert parse("mine=runs/a=b") == ("mine", "runs/a=b")
    assert parse("runs/a=b") == (None, "runs/a=b")
    with pytest.raises(UsageError, match="names no model"):
        parse("mine=")


def test_loading_needs_a_key(folder: Path, load: Any) -> None:
    with pytest.raises(UsageError, match="needs a key"):
        create_app(Repository(load, folder).open([str(folder / "first")]))


def test_load_and_unload_over_http(server: tuple[Repository, httpx.Client], folder: Path) -> None:
    _, client = server
    assert "model_repository" in client.get("/v2").json()["extensions"]
    assert client.post("/v2/repository/index", headers={"X-API-Key": "no"}).status_code == 401
    states = {row["name"]: row["state"] for row in client.post("/v2/repository/index").json()}
    assert states == {"first": "READY", "second": "UNAVAILABLE"}
    assert client.post("/v2/repository/models/second/load").status_code == 200
    assert ask(client, "/v1/models/second/predict") == answers(folder / "second")
    assert len(client.post("/v2/repository/index", json={"ready": True}).json()) == 2
    assert client.post("/v2/repository/models/second/unload").status_code == 200
    assert client.post("/v1/models/second/predict", content=PICTURES[0]).status_code == 404
    assert client.get("/v2/models/second/ready").status_code == 503
    assert client.get("/v2/health/ready").status_code == 200
    for name in ("third", "..", "%2e%2e%2ffirst", "a%2fb"):
        assert client.post(f"/v2/repository/models/{name}/load").status_code in (404, 405)
    assert client.post("/v2/repository/models/first/load", json={"parameters": {"config": "{}"}}).status_code == 422
    assert client.post("/v2/repository/models/second/load").status_code == 200  # and once more
    assert 'odevit_images_answered_total{model="second"} 6.0' in client.get("/metrics").text


def test_the_client_of_triton_loads_and_unloads(server: tuple[Repository, httpx.Client]) -> None:
    from tritonclient import http as triton

    _, client = server
    other = triton.InferenceServerClient(str(client.base_url).removeprefix("http://").rstrip("/"))
    other.load_model("second", headers=KEY)
    assert {m["name"] for m in other.get_model_repository_index(headers=KEY)} == {"first", "second"}
    assert other.is_model_ready("second", headers=KEY)
    other.unload_model("second", headers=KEY)
    assert not other.is_model_ready("second", headers=KEY)


@pytest.mark.parametrize("what", ["config.json", "step.onnx", "weights"])
def test_a_broken_bundle_leaves_the_old_one(
    server: tuple[Repository, httpx.Client], folder: Path, tiny_bundles: Callable[..., Path], what: str
) -> None:
    models, client = server
    before = ask(client)
    if what == "weights":  # of another model
        shutil.copy(tiny_bundles(seed=1) / "model.safetensors", folder / "first" / "model.safetensors")
    else:
        content = (folder / "first" / what).read_bytes()
        (folder / "first" / what).write_bytes(content[: len(content) // 2])
    answer = client.post("/v2/repository/models/first/load")
    assert answer.status_code == 409
    assert (what if what != "weights" else "other weights") in answer.json()["error"]
    (row,) = [row for row in client.post("/v2/repository/index").json() if row["name"] == "first"]
    assert (row["state"], row["reason"]) == ("READY", answer.json()["error"])
    assert ask(client) == before
    assert client.get("/v2/health/ready").status_code == 200
    with pytest.raises(UserError):
        models.load("first")


def test_fifty_replacements_under_load(folder: Path) -> None:
    """Requests of several pictures go on all the time: each is answered, by one model or the other, by no mixture."""
    loaded = functools.cache(lambda source: odevit_serve.load(source, threads=1))  # reading files is tested elsewhere
    turns, decoders = Turns(), Decoders()
    models = Repository(lambda source: Engine(loaded(source), slots=4, turns=turns, decoders=decoders))
    models.open([f"it={folder / 'first'}"])
    right = {tuple(answers(folder / name)): name for name in ("first", "second")}
    assert len(right) == 2
    texts = {"images": [base64.b64encode(p).decode() for p in PICTURES]}
    stop, seen = threading.Event(), []

    async def clients(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:

            async def one() -> None:
                while not stop.is_set():
                    answer = await client.post("/v1/predict", json=texts)
                    seen.append((answer.status_code, answer.json()))

            await asyncio.gather(*(one() for _ in range(4)))

    with running(models) as address:
        load_thread = threading.Thread(target=lambda: asyncio.run(clients(address)))
        load_thread.start()
        until(lambda: seen)
        for turn in range(50):
            models.first.replace(str(folder / ("first" if turn % 2 else "second")))
        stop.set()
        load_thread.join(30)
        until(lambda: models.pending == 0)
        assert models.first.replaced == 50
        assert [status for status, _ in seen if status != 200] == []
        by = [
            right[tuple((e["label"], e["steps"], round(e["probability"], 4)) for e in body["predictions"])]
            for _, body in seen
        ]
        assert {"first", "second"} == set(by)
        until(lambda: not models.first._finishing)
        stats = models.first.stats()
        assert stats.answered == stats.accepted == 6 * len(seen)  # counts outlive the engines that counted


def test_files_that_change_are_taken_up_and_broken_ones_are_not(folder: Path, load: Any) -> None:
    models = Repository(load).open([f"it={folder / 'first'}"])
    with running(models) as address, httpx.Client(base_url=address, timeout=20) as client:
        models.look_after(watch=True, idle=None, every=0.02)
        assert ask(client) == answers(folder / "first")
        old = models.first.engine
        (folder / "first" / "config.json").write_text("{")
        until(lambda: models.first.reason)
        assert "config.json" in models.first.reason
        assert models.first.engine is old
        for path in (folder / "second").iterdir():
            shutil.copy(path, folder / "first" / path.name)
        until(lambda: models.first.engine is not old)
        assert models.first.reason == ""
        assert ask(client) == answers(folder / "second")


def test_an_unused_model_gives_its_memory_back_and_wakes(folder: Path, load: Any) -> None:
    models = Repository(load).open([f"a={folder / 'first'}", f"b={folder / 'second'}"])
    with running(models) as address, httpx.Client(base_url=address, timeout=20) as client:
        assert ask(client, "/v1/models/b/predict")
        served = models.find("b")
        assert served.engine is not None
        assert not served.sleep_if_unused(3600)
        held = [weakref.ref(served.engine), weakref.ref(served.engine.model), weakref.ref(served.engine.core)]
        until(lambda: served.sleep_if_unused(0.0))
        assert [ref() for ref in held] == [None] * 3
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v1/models/b").json()["steps"] == 8
        assert client.get("/v2/models/b").json()["name"] == "b"
        text = client.get("/metrics").text
        assert 'odevit_loaded{model="b"} 0.0' in text
        assert 'odevit_images_answered_total{model="b"} 6.0' in text
        assert ask(client, "/v1/models/b/predict") == answers(folder / "second")
        assert 'odevit_images_answered_total{model="b"} 12.0' in client.get("/metrics").text
        until(lambda: served.sleep_if_unused(0.0))
        (folder / "second" / "config.json").unlink()
        answer = client.post("/v1/models/b/predict", content=PICTURES[0])
        assert answer.status_code == 503
        assert "could not be loaded again" in answer.json()["error"]


@pytest.mark.slow
def test_the_command(folder: Path) -> None:
    options = [f"b={folder / 'second'}", "--watch", "--idle", "1", "--repository", str(folder)]
    with (
        Process(Path(f"a={folder / 'first'}"), *options, environment={"ODEVIT_API_KEY": "sesam"}) as process,
        httpx.Client(base_url=process.address, headers=KEY, timeout=20) as client,
    ):
        process.wait_ready(client)
        assert ask(client) == answers(folder / "first")
        assert ask(client, "/v1/models/b/predict") == answers(folder / "second")
        before = process.memory()
        until(lambda: not any(m["loaded"] for m in client.get("/v1/models").json()["models"]))
        assert process.memory() <= before
        assert ask(client) == answers(folder / "first")
        assert client.post("/v2/repository/models/second/load").status_code == 200
        os.utime(folder / "first" / "config.json", ns=(time.time_ns(), time.time_ns()))
        until(lambda: any(e["event"] == "loaded" and e["model"] == "a" for e in process.logged()[-50:]))
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20) == 0
