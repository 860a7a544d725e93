"""Connections that end, however their clients behave; and a server that ends when what it accepted is answered."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import SlowSlots, png, running, until

import odevit_serve
from odevit_serve.errors import UserError
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.http.app import create_app
from odevit_serve.serving.http.middleware import Options
from odevit_serve.serving.http.uvicorn_server import MAX_HEAD, Server, listen, run

PATIENCE = 0.4


@pytest.fixture(scope="module")
def address(tiny_bundle: Path) -> Iterator[tuple[str, int]]:
    engine = Engine(odevit_serve.load(tiny_bundle, threads=1), slots=4)
    with running(engine, Options(header_timeout=PATIENCE, body_timeout=PATIENCE)) as own:
        host, port = own.removeprefix("http://").split(":")
        yield host, int(port)


def connect(address: tuple[str, int]) -> socket.socket:
    raw = socket.create_connection(address, 10)
    raw.settimeout(10)
    return raw


def rest(raw: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    while True:
        try:
            part = raw.recv(65536)
        except ConnectionResetError:
            return found
        if not part:
            return found
        found += part


def drip(raw: socket.socket, data: bytes) -> bool:
    """Send byte by byte; whether the server hung up before the last."""
    for byte in data:
        try:
            raw.sendall(bytes([byte]))
        except (BrokenPipeError, ConnectionResetError):
            return True
        time.sleep(0.02)
    return False


def test_a_silent_connection_ends(address: tuple[str, int]) -> None:
    with connect(address) as raw:
        assert rest(raw) == b""


@pytest.mark.parametrize(
    "sent", [b"P", b"POST /v1/predict HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nA: " + b"b" * 500]
)
def test_a_head_that_does_not_end(address: tuple[str, int], sent: bytes) -> None:
    with connect(address) as raw:
        raw.sendall(sent)
        began = time.monotonic()
        assert rest(raw).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 20 * PATIENCE


def test_a_head_that_comes_byte_by_byte(address: tuple[str, int]) -> None:
    with connect(address) as raw:
        assert drip(raw, b"GET / HTTP/1.1\r\nA: " + b"b" * 1000)


def test_a_head_without_end_is_not_kept(address: tuple[str, int]) -> None:
    with connect(address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nA: ")
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 1000 * MAX_HEAD:
                sent += raw.send(b"b" * 4096)
        assert sent < 1000 * MAX_HEAD  # it hung up, after a few buffers of the system


def test_a_pause_after_an_answer_ends_and_so_does_a_second_head(address: tuple[str, int]) -> None:
    for more in (b"", b"GET"):
        with connect(address) as raw:
            raw.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda raw=raw: raw.recv(65536).endswith(b"}"))  # type: ignore[misc]
            raw.sendall(more)
            assert rest(raw).startswith(b"HTTP/1.1 408" if more else b"")


def test_a_body_that_is_dripped_after_its_answer_ends(address: tuple[str, int]) -> None:
    """The answer, 404, is given before the body; uvicorn's own timer is reset by every byte of it."""
    with connect(address) as raw:
        raw.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert drip(raw, b"x" * 1000)


def test_quick_clients_keep_their_connection(address: tuple[str, int]) -> None:
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=20) as client:
        for _ in range(8):
            assert client.post("/v1/predict", content=png()).status_code == 200
            time.sleep(PATIENCE / 4)


def test_the_pause_between_requests_is_as_long_as_was_asked_for(tiny_bundle: Path) -> None:
    """uvicorn ends it after 5 seconds of its own unless it is told otherwise."""
    engine = Engine(odevit_serve.load(tiny_bundle, threads=1))
    app = create_app(engine, Options(header_timeout=30.5))
    assert Server(app, 5.0, 10).config.timeout_keep_alive > 30.5


def test_a_client_that_does_not_read_is_hung_up_on(address: tuple[str, int]) -> None:
    """It goes on asking; the answers fill all buffers on the way."""
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(0.05)
        raw.connect(address)
        ask, limit = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 100, time.monotonic() + 60

        def hung_up() -> bool:
            try:
                raw.sendall(ask)
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        while not hung_up():
            assert time.monotonic() < limit


def test_a_port_that_is_taken_is_told_in_a_sentence() -> None:
    with listen("127.0.0.1", 0) as own:
        port = own.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(.*in use.*another --port"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", port) as again:  # and is free at once when it is given back
        assert again.getsockname()[1] == port


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_clients_wait_on_the_socket_until_they_are_served(host: str, family: int) -> None:
    try:
        own = listen(host, 0)
    except UserError:
        pytest.skip(f"this machine has no {host}")
    with own:
        assert own.family == family
        with socket.create_connection(own.getsockname()[:2], 5):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_is_told_as_clients_write_it(tiny_bundle: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` up to where it would serve."""
    given: list[socket.socket] = []

    def stop(server: Server, sockets: list[socket.socket]) -> None:
        given.extend(sockets)

    monkeypatch.setattr(Server, "run", stop)
    said: list[str] = []
    interval = sys.getswitchinterval()
    try:
        run(Engine(odevit_serve.load(tiny_bundle, threads=1)), Options(), host, 0, 1.0, 10, said.append)
    except UserError:
        pytest.skip(f"this machine has no {host}")
    finally:
        sys.setswitchinterval(interval)
    port = given[0].getsockname()[1]
    address = f"http://{'[::1]' if host == '::1' else host}:{port}"
    assert said[0].startswith(f"serving random on {address} ")
    assert f"curl --data-binary @photo.jpg {address}/v1/predict" in said[1]
    given[0].close()


def test_a_second_interrupt_does_not_wait(tiny_bundle: Path) -> None:
    app = create_app(Engine(odevit_serve.load(tiny_bundle, threads=1)), Options())
    for second, forced in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        server = Server(app, 5.0, 10)
        server.handle_exit(signal.SIGINT, None)
        assert (server.should_exit, server.force_exit) == (True, False)
        server.handle_exit(second, None)
        assert server.force_exit is forced


def test_what_was_accepted_is_answered_before_the_end_and_nothing_is_accepted_after(tiny_bundle: Path) -> None:
    model = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(model, BundleModel)
    core = SlowSlots(model.graphs, 1)
    engine, own, found = Engine(model, core=core), listen("127.0.0.1", 0), list[int]()
    server = Server(create_app(engine, Options()), 20.0, 100)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{own.getsockname()[1]}"
    until(lambda: server.started and engine.ready)
    core.gate.clear()

    def ask() -> None:
        found.append(httpx.post(f"{address}/v1/predict", content=png(), timeout=30).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: engine.active)
    server.should_exit = True
    until(lambda: engine.state == "draining")
    assert not found
    core.gate.set()
    asking.join(30)
    thread.join(30)
    assert found == [200]
    assert (thread.is_alive(), engine.state) == (False, "closed")


def test_what_is_not_done_within_the_grace_is_told_so(tiny_bundle: Path) -> None:
    model = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(model, BundleModel)
    core = SlowSlots(model.graphs, 1)
    engine, own, found = Engine(model, core=core), listen("127.0.0.1", 0), list[httpx.Response]()
    server = Server(create_app(engine, Options()), 3.0, 100)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{own.getsockname()[1]}/v1/predict"
    until(lambda: server.started and engine.ready)
    core.gate.clear()
    asking = threading.Thread(target=lambda: found.append(httpx.post(address, content=png(), timeout=30)))
    asking.start()
    until(lambda: engine.active)
    server.should_exit = True
    asking.join(30)
    core.gate.set()
    thread.join(30)
    assert [answer.status_code for answer in found] == [503]
    assert "shut down before the answer was ready" in found[0].json()["error"]
