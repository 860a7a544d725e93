"""The HTTP interface: every endpoint, every form of request, every status code, over a real socket."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from servers import SlowSlots, nothing_left, png, running, until
from typer.testing import CliRunner

import odevit_serve
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving.engine import Engine, Limits
from odevit_serve.serving.http.middleware import Options
from odevit_serve.serving.logs import JsonLines


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> BundleModel:
    loaded = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(loaded, BundleModel)
    return loaded


@pytest.fixture(scope="module")
def plain(model: BundleModel) -> Iterator[tuple[Engine, httpx.Client]]:
    """A server with nothing set, shared by the tests that leave it as it was."""
    engine = Engine(model, slots=4)
    with running(engine) as address, httpx.Client(base_url=address, timeout=20) as client:
        yield engine, client
        nothing_left(engine)


@pytest.fixture
def client(plain: tuple[Engine, httpx.Client]) -> httpx.Client:
    return plain[1]


@pytest.fixture
def start(model: BundleModel) -> Iterator[Callable[..., tuple[Engine, httpx.Client]]]:
    """A server of its own with slow slots."""
    with contextlib.ExitStack() as stack:

        def make(
            options: Options | None = None, slots: int = 1, pause: float = 0.002, ready: bool = True, **engine: Any
        ) -> tuple[Engine, httpx.Client]:
            own = Engine(model, core=SlowSlots(model.graphs, slots, pause=pause), **engine)
            address = stack.enter_context(running(own, options, ready))
            stack.callback(own.core.gate.set)  # type: ignore[union-attr]
            return own, stack.enter_context(httpx.Client(base_url=address, timeout=20))

        yield make


def text(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


# -- predict -----------------------------------------------------------------------------------------------------------


def test_a_raw_body(client: httpx.Client, model: BundleModel) -> None:
    answer = client.post("/v1/predict", content=png(3))
    assert answer.status_code == 200
    (entry,) = answer.json()["predictions"]
    alone = model.predict(png(3))
    assert (entry["label"], entry["steps"], entry["exit"]) == (alone.label, alone.steps, alone.exit.short)
    assert entry["full_steps"] == 8
    assert entry["depth_lowered_to"] is None
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("form", ["raw as curl names it", "octet", "multipart", "json"])
def test_every_form_gives_the_same_answer(client: httpx.Client, model: BundleModel, form: str) -> None:
    picture, query = png(5), {"max_steps": 3}
    if form == "multipart":
        answer = client.post("/v1/predict", files={"file": ("a.png", picture, "image/png")}, data={"max_steps": "3"})
    elif form == "json":
        answer = client.post("/v1/predict", json={"image": text(picture), "max_steps": 3})
    else:
        kind = "application/octet-stream" if form == "octet" else "application/x-www-form-urlencoded"
        answer = client.post("/v1/predict", content=picture, headers={"Content-Type": kind}, params=query)
    (entry,) = answer.json()["predictions"]
    alone = model.predict(picture, max_steps=3)
    assert (entry["label"], entry["steps"]) == (alone.label, alone.steps)
    assert entry["probability"] == pytest.approx(alone.probability, abs=1e-5)


def test_many_pictures_in_one_request(client: httpx.Client, model: BundleModel) -> None:
    several = [png(i) for i in range(6)]
    expected = [(p.label, p.steps) for p in model.predict(several)]
    as_json = client.post("/v1/predict", json={"images": [text(p) for p in several]}).json()["predictions"]
    as_form = client.post("/v1/predict", files=[("file", (f"{i}.png", p)) for i, p in enumerate(several)])
    assert [(e["label"], e["steps"]) for e in as_json] == expected
    assert [(e["label"], e["steps"]) for e in as_form.json()["predictions"]] == expected
    assert [e["source"] for e in as_form.json()["predictions"]] == [f"{i}.png" for i in range(6)]


def test_a_bad_picture_among_good_ones_has_its_error_in_its_place(client: httpx.Client) -> None:
    answer = client.post("/v1/predict", json={"images": [text(png()), text(b"none")]})
    assert answer.status_code == 200
    good, bad = answer.json()["predictions"]
    assert good["label"]
    assert bad == {"source": "picture 2", "error": "picture 2 is not a picture in a known format", "status": 415}


def test_settings_from_the_query_and_the_body(client: httpx.Client) -> None:
    asked = {"image": text(png()), "adaptive": False, "top": 2, "trace": True}
    (entry,) = client.post("/v1/predict", params={"top": 1, "max_steps": 4}, json=asked).json()["predictions"]
    assert entry["steps"] == 4
    assert len(entry["top"]) == 2  # the body comes first
    assert [step["step"] for step in entry["trace"]] == [1, 2, 3, 4]
    assert entry["exit"] == "depth budget"


# -- status codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"hello", png()[:60], b"\x00" * 1000, b"file:///etc/passwd"])
def test_415_not_a_picture(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/predict", content=body, headers={"Content-Type": "image/png"})
    assert answer.status_code == 415
    assert answer.json()["error"].startswith("picture 1 ")


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": "many"}, "max_steps"),
        ({"threshold": "nan"}, "threshold"),
        ({"rule": "guess"}, "unknown rule 'guess'"),
        ({"rule": "confidence"}, "needs a threshold"),
        ({"priority": "urgent"}, "priority"),
        ({"deadline_ms": -5}, "deadline_ms"),
        ({"colour": "red"}, "colour"),
        ({"adaptive": False, "threshold": 1}, "need adaptive depth"),
        ({"top": 0}, "top"),
    ],
)
def test_422_bad_parameters(client: httpx.Client, query: dict[str, Any], part: str) -> None:
    answer = client.post("/v1/predict", params=query, content=png())
    assert answer.status_code == 422
    assert part in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"image": 5}',
        b'{"image": "photo.jpg"}',
        b'{"image": "http://127.0.0.1/photo.jpg"}',
        b'{"images": []}',
        b'{"image": "", "images": []}',
        b'{"images": [null]}',
        b'{"image": "AAAA", "max_steps": 1e999}',
        b'{"image": "AAAA", "threshold": NaN}',
        b"\xff\xfe",
        b'{"image": "AAAA", "path": "/etc/passwd"}',
    ],
)
def test_422_bad_json(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/predict", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]


BOMBS = {  # bodies of 2 MB that would give one error, or one value, for each few bytes
    "images": (b'{"images": [' + b"1," * 1_000_000 + b"1]}", 413),
    "nested": (b'{"images": [' + b"[]," * 700_000 + b"[]]}", 413),
    "keys": (b"{" + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}", 413),
    "some images": (b'{"images": [' + b"1," * 900 + b"1]}", 422),
    "some keys": (b"{" + b",".join(b'"k%d":1' % i for i in range(900)) + b"}", 422),
    "a long key": (b'{"' + b"k" * 2_000_000 + b'": 1}', 422),
    "a long number": (b'{"image": "AAAA", "max_steps": ' + b"9" * 5000 + b"}", 422),
    "no object": (b"[" + b"1," * 500 + b"1]", 422),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("path", ["/v1/predict", "/v1/attention"])
def test_an_error_is_of_bounded_size(client: httpx.Client, path: str, name: str) -> None:
    body, status = BOMBS[name]
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert 0 < len(answer.json()["error"]) < 500


def test_keys_are_counted_before_they_are_checked(client: httpx.Client) -> None:
    body = {f"k{i}": 1 for i in range(33)}
    assert client.post("/v1/predict", json=body).json()["error"] == "the JSON object has 33 keys, 32 are allowed"


def test_a_hostile_list_costs_no_memory_and_no_time(client: httpx.Client) -> None:
    """It took 1.1 GB and 3 s, in which nobody else was answered."""
    body = b'{"images": [' + b"1," * 1_000_000 + b"1]}"
    tracemalloc.start()
    try:
        client.post("/v1/predict", content=body, headers={"Content-Type": "application/json"})
        assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    finally:
        tracemalloc.stop()


def test_414_a_long_query(client: httpx.Client) -> None:
    answer = client.post("/v1/predict?" + "&".join(f"k{i}=1" for i in range(2000)), content=png())
    assert answer.status_code == 414
    few = client.post("/v1/predict?" + "&".join(f"k{i}=1" for i in range(300)), content=png())
    assert (few.status_code, len(few.json()["error"]) < 500) == (422, True)


def test_422_a_form_without_a_picture_or_damaged(client: httpx.Client) -> None:
    assert client.post("/v1/predict", files={"x": (None, "text")}).status_code == 422
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert client.post("/v1/predict", content=b"--y\r\n\r\n", headers=kind).status_code == 422
    assert client.post("/v1/predict", content=b"x", headers={"Content-Type": "multipart/form-data"}).status_code == 422


def test_404_and_405(client: httpx.Client) -> None:
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/predict").status_code == 405
    assert set(client.get("/nothing").json()) == {"error", "request_id"}


def test_413_by_its_declared_length_and_while_it_streams(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start(Options(max_body=10_000))
    declared = client.post("/v1/predict", content=b"x" * 10_001)
    assert declared.status_code == 413
    assert "10,000 are allowed" in declared.json()["error"]
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield start_of_body
        while sent < 20_000_000_000:
            sent += 5000
            yield b"y" * 5000

    tracemalloc.start()
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    bodies = {"image/png": b"y", "application/json": b"y", "multipart/form-data; boundary=b": part}
    for kind, start_of_body in bodies.items():  # noqa: B007 (read by endless)
        sent = 0
        with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):  # it may hang up on us
            assert client.post("/v1/predict", content=endless(), headers={"Content-Type": kind}).status_code == 413
        assert sent < 20_000_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000  # read on for a moment, but thrown away
    assert client.post("/v1/predict", content=png()).status_code == 200
    nothing_left(engine)


def test_413_too_many_pictures(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    _, client = start(Options(max_images=2))
    assert client.post("/v1/predict", json={"images": [text(png())] * 3}).status_code == 413
    form = [("file", ("a.png", png()))] * 3
    assert client.post("/v1/predict", files=form).status_code == 413


def test_408_a_body_that_does_not_come(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start(Options(body_timeout=0.3))
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nab")
        raw.settimeout(5)
        assert raw.recv(1000).startswith(b"HTTP/1.1 408")
    nothing_left(engine)


def test_429_with_retry_after(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start(queue=2)
    engine.core.gate.clear()  # type: ignore[union-attr]
    futures = [engine.submit(png())]
    until(lambda: engine.active)
    futures += engine.submit_many([png(), png()])
    answer = client.post("/v1/predict", content=png())
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "2 of 2 places taken" in answer.json()["error"]
    engine.core.gate.set()  # type: ignore[union-attr]
    assert all(future.result(10) for future in futures)
    assert client.post("/v1/predict", content=png()).status_code == 200
    nothing_left(engine)


def test_503_until_warm_and_when_shutting_down(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start(ready=False, slots=8, pause=0.5)
    assert client.get("/v2/health/live").status_code == 200
    assert client.get("/v2/health/ready").status_code == 503
    assert client.get("/v2/models/random/ready").status_code == 503
    early = client.post("/v1/predict", content=png())
    assert early.status_code == 503
    assert early.json()["error"] == "the server is warming up"
    until(lambda: engine.ready)
    assert client.get("/v2/health/ready").status_code == 200
    engine.stop_accepting()
    late = client.post("/v1/predict", content=png())
    assert late.status_code == 503
    assert late.json()["error"] == "the server is shutting down"
    assert client.get("/v2/health/ready").status_code == 503


def test_504_and_the_best_answer_so_far(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start(pause=0.02)
    long = engine.submit_many([png()] * 4, adaptive=False)
    answer = client.post("/v1/predict", params={"deadline_ms": 40}, content=png())
    assert answer.status_code == 504
    assert "40 ms" in answer.json()["error"]
    assert all(future.result(10) for future in long)
    answer = client.post("/v1/predict", params={"deadline_ms": 70, "adaptive": False}, content=png())
    (entry,) = answer.json()["predictions"]
    assert entry["exit"] == "deadline"
    assert 1 <= entry["steps"] < 8
    nothing_left(engine)


def test_500_with_a_reason_and_then_on(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start()
    engine.core.broken = True  # type: ignore[union-attr]
    answer = client.post("/v1/predict", content=png())
    assert answer.status_code == 500
    assert answer.json()["error"] == "a step failed (RuntimeError: the graph exploded)"
    engine.core.broken = False  # type: ignore[union-attr]
    assert client.post("/v1/predict", content=png()).status_code == 200
    nothing_left(engine)


def test_500_for_what_nobody_thought_of(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from odevit_serve.serving.http import app as server

    def explode(*_: object) -> None:
        raise KeyError("a secret path")

    monkeypatch.setattr(server, "describe", explode)
    answer = client.get("/v1/model", headers={"X-Request-ID": "odd-1"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "the server failed", "request_id": "odd-1"}
    assert answer.headers["x-request-id"] == "odd-1"


def test_the_operators_limits(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    _, client = start(limits=Limits(rules=("travel",), min_threshold=0.1, max_threshold=2.0, max_steps=5))
    for query in ({"rule": "margin", "threshold": 1}, {"threshold": 0.05}, {"threshold": 3}, {"max_steps": 6}):
        assert client.post("/v1/predict", params=query, content=png()).status_code == 422
    answer = client.post("/v1/predict", params={"threshold": 2, "adaptive": True}, content=png())
    assert answer.json()["predictions"][0]["steps"] <= 5
    assert client.get("/v1/model").json()["limits"]["max_threshold"] == 2.0


def test_overload_by_depth_is_reported(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start(queue=8, overload="depth")
    engine.core.gate.clear()  # type: ignore[union-attr]
    threading.Timer(0.3, engine.core.gate.set).start()  # type: ignore[union-attr]
    answer = client.post("/v1/predict", json={"images": [text(png(i)) for i in range(8)], "adaptive": False})
    lowered = [entry["depth_lowered_to"] for entry in answer.json()["predictions"]]
    assert any(lowered)
    assert lowered[-1] is None
    assert client.get("/v1/model").json()["limits"]["overload"] == "depth"
    total = f'odevit_images_lowered_total{{model="random"}} {sum(1 for v in lowered if v)}.0'
    assert total in client.get("/metrics").text


# -- disconnects, keys, ids, logs --------------------------------------------------------------------------------------


def test_a_client_that_goes_away_frees_its_slot(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start(pause=0.05)
    body = png()
    head = f"POST /v1/predict?adaptive=false HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as raw:
        raw.sendall(head + body)
        until(lambda: engine.active)
    until(lambda: engine.stats.cancelled == 1, 2)
    until(lambda: not engine.active, 0.3)  # eight steps would take longer
    nothing_left(engine)


@pytest.mark.parametrize("path", ["/v1/model", "/v1/predict", "/metrics", "/openapi.json", "/v2/models/random"])
def test_a_key_is_asked_of_all_but_probes(start: Callable[..., tuple[Engine, httpx.Client]], path: str) -> None:
    _, client = start(Options(api_key="sesam"))
    method = "POST" if path == "/v1/predict" else "GET"
    content = png() if method == "POST" else None
    for headers in ({}, {"Authorization": "Bearer sesamo"}, {"X-API-Key": ""}, {"Authorization": "Basic sesam"}):
        refused = client.request(method, path, headers=headers, content=content)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    for headers in ({"Authorization": "Bearer sesam"}, {"X-API-Key": "sesam"}):
        assert client.request(method, path, headers=headers, content=content).status_code == 200
    assert client.get("/v2/health/live").status_code == 200


def test_a_key_may_have_any_letters(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    _, client = start(Options(api_key="schlüssel"))
    assert client.get("/v1/model", headers={"X-API-Key": "schlüssel".encode()}).status_code == 200
    assert client.get("/v1/model", headers={"X-API-Key": b"schl\xfcssel"}).status_code == 401


def test_the_key_is_compared_in_constant_time(
    start: Callable[..., tuple[Engine, httpx.Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from odevit_serve.serving.http import middleware as gateway

    seen = []
    real = gateway.hmac.compare_digest
    monkeypatch.setattr(gateway.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or real(a, b))
    _, client = start(Options(api_key="sesam"))
    client.get("/v1/model", headers={"X-API-Key": "s"})
    assert seen == [(b"s", b"sesam")]


def test_cors_is_off_unless_asked_for(client: httpx.Client, start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    origin = {"Origin": "https://page.example"}
    assert "access-control-allow-origin" not in client.get("/v1/model", headers=origin).headers
    _, own = start(Options(cors=("https://page.example",)))
    assert own.get("/v1/model", headers=origin).headers["access-control-allow-origin"] == "https://page.example"
    other = own.get("/v1/model", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_request_ids(client: httpx.Client) -> None:
    assert client.get("/v1/model", headers={"X-Request-ID": "trace-17"}).headers["x-request-id"] == "trace-17"
    made = [
        client.get("/v1/model", headers={"X-Request-ID": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 200)
    ]
    assert all(len(value) == 32 for value in made)
    assert len(set(made)) == 3


def test_one_structured_line_a_request(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("odevit_serve").propagate = True
    with caplog.at_level(logging.INFO, "odevit_serve.http"):
        client.post("/v1/predict", content=png(), headers={"X-Request-ID": "line-1"})
        until(lambda: any(getattr(r, "fields", {}).get("request_id") == "line-1" for r in caplog.records), 5)
    (record,) = [r for r in caplog.records if getattr(r, "fields", {}).get("request_id") == "line-1"]
    line = json.loads(JsonLines().format(record))
    assert (line["event"], line["status"], line["images"], line["path"]) == ("request", 200, 1, "/v1/predict")
    assert line["milliseconds"] > 0
    assert len(line["steps"]) == 1


# -- attention, model, metrics, docs -----------------------------------------------------------------------------------


def test_attention_is_a_picture(client: httpx.Client) -> None:
    answer = client.post("/v1/attention", content=png(1, 64))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).size == (384, 384)
    assert int(answer.headers["x-steps"]) >= 1
    heads = [client.post("/v1/attention", params={"head": h, "step": 3}, content=png(1, 64)).content for h in (1, 2, 3)]
    assert len(set(heads)) == 3


def test_a_huge_picture_gives_a_map_of_bounded_size(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4000, 3000), "green").save(buffer, "PNG")
    picture = Image.open(io.BytesIO(client.post("/v1/attention", content=buffer.getvalue()).content))
    assert max(picture.size) <= 1024


@pytest.mark.parametrize("query", [{"head": 4}, {"head": "no"}, {"step": 9}, {"step": -1}])
def test_attention_refuses_what_is_not_there(client: httpx.Client, query: dict[str, Any]) -> None:
    assert client.post("/v1/attention", params=query, content=png()).status_code == 422


def test_attention_takes_one_picture(client: httpx.Client) -> None:
    assert client.post("/v1/attention", json={"images": [text(png())] * 2}).status_code == 422
    assert client.post("/v1/attention", json={"image": text(png())}).status_code == 200


def test_the_model_is_described(client: httpx.Client) -> None:
    facts = client.get("/v1/model").json()
    assert facts["labels"] == ["ant", "bee", "cat", "dog", "eel"]
    assert facts["steps"] == 8
    assert facts["exit"]["rule"] == "travel"
    assert facts["exit"]["guarantee"] is None


def test_metrics_add_up(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    _, client = start(slots=4)
    steps = 0
    for i in range(5):
        steps += client.post("/v1/predict", content=png(i)).json()["predictions"][0]["steps"]
    client.post("/v1/predict", content=b"no")
    values = {
        (s.name, *sorted(v for k, v in s.labels.items() if k != "model")): s.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for s in family.samples
    }
    assert values[("odevit_http_requests_total", "/v1/predict", "200")] == 5
    assert values[("odevit_http_requests_total", "/v1/predict", "415")] == 1
    assert values[("odevit_http_request_seconds_count", "/v1/predict")] == 6
    assert values[("odevit_images_answered_total",)] == 5
    assert values[("odevit_images_failed_total", "not a picture")] == 1
    assert values[("odevit_depth_steps_count",)] == 5
    assert values[("odevit_depth_steps_sum",)] == values[("odevit_steps_total",)] == steps
    assert values[("odevit_steps_saved_total",)] == 40 - steps
    assert values[("odevit_batch_size_sum",)] == steps
    assert sum(v for k, v in values.items() if k[0] == "odevit_exits_total") == 5
    assert values[("odevit_queue_seconds_count",)] == 5
    assert values[("odevit_slots_active",)] == values[("odevit_queue_waiting",)] == 0
    assert values[("odevit_slots_capacity",)] == 4


def test_documentation_is_served(client: httpx.Client) -> None:
    for path in ("/docs", "/redoc"):  # pages that would take their scripts from other hosts
        assert client.get(path).status_code == 404
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/predict", "/v1/attention", "/v1/model", "/v2/models/{name}/infer", "/metrics"} <= set(paths)


def test_a_deadline_includes_the_upload(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    engine, client = start()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as raw:
        raw.sendall(b"POST /v1/predict?deadline_ms=200 HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nab")
        raw.settimeout(10)
        assert raw.recv(1000).startswith(b"HTTP/1.1 504")
    nothing_left(engine)


def test_maps_are_drawn_where_pictures_are_decoded(
    client: httpx.Client, plain: tuple[Engine, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    from odevit_serve.data import images

    threads: list[str] = []
    real = images.open_picture

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*arguments, **options)

    monkeypatch.setattr(images, "open_picture", noted)
    assert client.post("/v1/attention", content=png()).status_code == 200
    assert len(threads) == 2
    assert all(name.startswith("odevit-decode") for name in threads)


def test_a_map_that_a_replaced_engine_did_not_begin_is_drawn_by_the_next(
    start: Callable[..., tuple[Engine, httpx.Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered by a bare 500 when the model was loaded anew at that moment."""
    engine, client = start()
    futures: list[Future[Any]] = []
    decode = engine.decode

    def replaced(*arguments: Any) -> Future[Any]:
        futures.append(decode(*arguments) if futures else Future())
        if len(futures) == 1:
            futures[0].cancel()  # as when its lane is closed
        return futures[-1]

    monkeypatch.setattr(engine, "decode", replaced)
    answer = client.post("/v1/attention", content=png())
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
    assert len(futures) == 2
    nothing_left(engine)


def test_pictures_beyond_the_operators_limit_are_refused(start: Callable[..., tuple[Engine, httpx.Client]]) -> None:
    _, client = start(limits=Limits(max_pixels=1000))
    for path in ("/v1/predict", "/v1/attention"):
        assert client.post(path, content=png(side=31)).status_code == 200
        answer = client.post(path, content=png(side=32))
        assert answer.status_code == 415
        assert "32 x 32, more than the 1,000 pixels allowed" in answer.json()["error"]
    assert client.get("/v1/model").json()["limits"]["max_pixels"] == 1000


def test_decoding_leaves_the_event_loop_free(
    client: httpx.Client, model: BundleModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a picture is held up in the decoder, the server answers others."""
    decoding, release, prepare = threading.Event(), threading.Event(), model.prepare

    def held_up(*arguments: Any) -> Any:
        decoding.set()
        assert release.wait(60)
        return prepare(*arguments)

    monkeypatch.setattr(model, "prepare", held_up)
    answers: list[httpx.Response] = []

    def upload() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            answers.append(own.post("/v1/predict", content=png()))

    thread = threading.Thread(target=upload)
    thread.start()
    assert decoding.wait(60)
    for _ in range(5):
        assert client.get("/v2/health/live").status_code == 200
    assert not answers
    release.set()
    thread.join(60)
    assert answers[0].status_code == 200


# -- Open Inference Protocol -------------------------------------------------------------------------------------------


def test_oip_in_json(client: httpx.Client, model: BundleModel) -> None:
    pixels = model.prepare(png(2))
    alone = model.predict(png(2))
    for tensor in (
        {"name": "pixel_values", "shape": [1, 3, 16, 16], "datatype": "FP32", "data": pixels.reshape(-1).tolist()},
        {"name": "pixel_values", "shape": [1, 3, 16, 16], "datatype": "FP32", "data": [pixels.tolist()]},
        {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text(png(2))]},
    ):
        answer = client.post("/v2/models/random/infer", json={"id": "7", "inputs": [tensor]})
        assert answer.status_code == 200
        body = answer.json()
        outputs = {output["name"]: output["data"] for output in body["outputs"]}
        assert (body["id"], body["model_name"]) == ("7", "random")
        assert (outputs["label"], outputs["steps"]) == ([alone.label], [alone.steps])
        np.testing.assert_allclose(outputs["probabilities"], alone.probabilities, atol=1e-5)


def _tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text(png())], **changes}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"inputs": []}, 422),
        ({"inputs": [_tensor(name="x")]}, 422),
        ({"inputs": [_tensor(datatype="FP32")]}, 422),
        ({"inputs": [_tensor(shape=[2])]}, 422),
        ({"inputs": [_tensor(shape=[-1])]}, 422),
        ({"inputs": [_tensor(shape=[0], data=[])]}, 422),
        ({"inputs": [_tensor(data=["/etc/passwd"])]}, 422),
        ({"inputs": [_tensor(data=[text(b"nothing")])]}, 415),
        ({"inputs": [_tensor(name="pixel_values", datatype="FP32", shape=[1, 1], data=[0.5])]}, 422),
        ({"inputs": [_tensor(name="pixel_values", datatype="FP32", shape=[1], data=["a"])]}, 422),
        ({"inputs": [_tensor(data=None)]}, 422),
        ({"inputs": [_tensor(data=None, parameters={"binary_data_size": 5})]}, 422),
        ({"inputs": [_tensor()], "outputs": [{"name": "nothing"}]}, 422),
        ({"inputs": [_tensor()], "outputs": [{"name": "label", "parameters": {"classification": 2}}]}, 422),
        ({"inputs": [_tensor()], "parameters": {"max_steps": 0}}, 422),
        ({"inputs": [_tensor()], "parameters": {"colour": 1}}, 422),
        ({"inputs": [_tensor(shape=[65], data=[text(png())] * 65)]}, 413),
    ],
)
def test_oip_errors(client: httpx.Client, body: dict[str, Any], status: int) -> None:
    answer = client.post("/v2/models/random/infer", json=body)
    assert (answer.status_code, bool(answer.json()["error"])) == (status, True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "data": ["AAAA"], "shape": [' + b"9" * 5000 + b"]}]}",
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "data": ["AAAA"], "shape": [' + b"9" * 4000 + b"]}]}",
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "data": ["AAAA"], "shape": []}]}',
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": '
        + b"9" * 4000
        + b"}}]}",
        b'{"inputs": [' + b"1," * 30_000 + b"1]}",
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "data": ["AAAA"], "shape": [1]}], "outputs": ['
        + b"1," * 30_000
        + b"1]}",
        b'{"inputs": [{"name": "image", "datatype": "BYTES", "data": ["AAAA"], "shape": [1]}], "parameters": {'
        + b",".join(b'"k%d": 1' % i for i in range(30_000))
        + b"}}",
        b'{"inputs": [{"name": "' + b"n" * 1_000_000 + b'", "datatype": "BYTES", "data": ["AAAA"], "shape": [1]}]}',
    ],
)
def test_oip_errors_are_of_bounded_size(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v2/models/random/infer", content=body)
    assert answer.status_code == 422
    assert len(answer.json()["error"]) < 500


@pytest.mark.parametrize("length", ["-1", "x", "99999", "0", "5", "9" * 5000])
def test_oip_binary_header_is_checked(client: httpx.Client, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    answer = client.post("/v2/models/random/infer", content=json.dumps({"inputs": [_tensor()]}), headers=headers)
    assert answer.status_code == 422


def test_oip_unknown_model(client: httpx.Client) -> None:
    assert client.get("/v2/models/other").status_code == 404
    assert client.get("/v2/models/random/versions/2").status_code == 404
    assert client.post("/v2/models/other/infer", json={"inputs": [_tensor()]}).status_code == 404
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]


@pytest.mark.parametrize("binary", [True, False])
def test_oip_with_tritons_own_client(client: httpx.Client, model: BundleModel, binary: bool) -> None:
    from tritonclient import http as triton

    pixels = np.stack([model.prepare(png(i)) for i in range(5)])
    alone = model.predict([png(i) for i in range(5)])
    with triton.InferenceServerClient(f"{client.base_url.host}:{client.base_url.port}") as own:
        assert own.is_server_live()
        assert own.is_server_ready()
        assert own.is_model_ready("random")
        assert own.get_model_metadata("random")["inputs"][0]["shape"] == [-1, 3, 16, 16]
        tensor = triton.InferInput("pixel_values", [5, 3, 16, 16], "FP32")
        tensor.set_data_from_numpy(pixels, binary_data=binary)
        wanted = [triton.InferRequestedOutput(n, binary_data=binary) for n in ("probabilities", "steps", "label")]
        result = own.infer("random", [tensor], outputs=wanted, request_id="5", parameters={"max_steps": 7})
        assert result.get_response()["id"] == "5"
        limited = model.predict([png(i) for i in range(5)], max_steps=7)
        assert result.as_numpy("steps").tolist() == [p.steps for p in limited]
        np.testing.assert_allclose(
            result.as_numpy("probabilities").reshape(5, -1), [p.probabilities for p in limited], atol=1e-5
        )
        names = [v.decode() if isinstance(v, bytes) else v for v in result.as_numpy("label")]
        assert names == [p.label for p in limited]
        if binary:
            encoded = triton.InferInput("image", [5], "BYTES")
            encoded.set_data_from_numpy(np.array([png(i) for i in range(5)], object))
            everything = own.infer("random", [encoded])
            assert everything.as_numpy("steps").tolist() == [p.steps for p in alone]
            assert [v.decode() for v in everything.as_numpy("exit")] == [p.exit.short for p in alone]
        with pytest.raises(
            triton.InferenceServerException if hasattr(triton, "InferenceServerException") else Exception
        ):
            own.infer("other", [tensor])


# -- a single file, and the command ------------------------------------------------------------------------------------


def test_a_single_exported_file_is_served_too(tiny_bundle: Path, tmp_path: Path) -> None:
    from odevit_serve.export.job import Settings, export

    path = tmp_path / "model.onnx"
    export(str(tiny_bundle), Settings(format="onnx", output=str(path)))
    engine = Engine(odevit_serve.load(path, threads=1), slots=4)
    with running(engine) as address, httpx.Client(base_url=address, timeout=20) as client:
        (entry,) = client.post("/v1/predict", content=png()).json()["predictions"]
        assert entry["steps"] == 8
        alone = odevit_serve.load(tiny_bundle).predict(png(), adaptive=False)
        assert entry["label"] == alone.label
        refused = client.post("/v1/predict?max_steps=3", content=png())
        assert refused.status_code == 422
        assert "so max_steps cannot be 3" in refused.json()["error"]
        nothing_left(engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no model 'nowhere'"),
        (["--overload", "panic"], "unknown overload 'panic'"),
        (["--rules", "guess"], "unknown rule 'guess'"),
        (["--log", "xml"], "unknown log format 'xml'"),
        (["--api-key", " "], "the API key is empty"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
    ],
)
def test_the_command_says_what_is_wrong(tiny_bundle: Path, arguments: list[str], message: str) -> None:
    from odevit_serve.cli import app
    from odevit_serve.errors import UserError

    own = arguments if arguments == ["nowhere"] else [str(tiny_bundle), *arguments]
    result = CliRunner().invoke(app, ["serve", *own])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_it_listens_on_loopback_by_default() -> None:
    from typer.main import get_command

    from odevit_serve.cli import app

    (host,) = [o for o in get_command(app).commands["serve"].params if o.name == "host"]  # type: ignore[attr-defined]
    assert host.default == "127.0.0.1"


def test_the_command_line_stays_light_and_the_server_needs_no_torch() -> None:
    import subprocess
    import sys

    light = (
        "import sys, odevit_serve.cli; print([m for m in ('numpy', 'fastapi', 'uvicorn', 'ray') if m in sys.modules])"
    )
    lean = (
        "import sys, odevit_serve.serving.http.app, odevit_serve.serving.http.uvicorn_server; "
        "print('torch' in sys.modules or 'ray' in sys.modules)"
    )
    for code, expected in ((light, "[]"), (lean, "False")):
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == expected
