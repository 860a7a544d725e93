"""Connections that end: slow heads, slow bodies, pauses, and clients that do not read."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import png, running, until

import odevit_serve
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.http.app import create_app
from odevit_serve.serving.http.middleware import Options
from odevit_serve.serving.http.uvicorn_server import MAX_HEAD, Server

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
