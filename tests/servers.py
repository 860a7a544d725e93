"""What the serving tests share: pictures, a server in a thread, a server as a process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

from odevit_serve.runtime.slots import Slots
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.http.app import create_app
from odevit_serve.serving.http.middleware import Options
from odevit_serve.serving.http.uvicorn_server import Server, listen
from odevit_serve.serving.repository import Repository


class SlowSlots(Slots):
    """Real slots whose steps take a while and can be told to fail or to wait."""

    def __init__(self, *args: Any, pause: float = 0.002, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pause, self.broken = pause, False
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[int] = []

    def _run_step(self, rows: int) -> None:
        self.gate.wait(20)
        time.sleep(self.pause)
        if self.broken:
            raise RuntimeError("the graph exploded")
        self.seen.append(rows)
        super()._run_step(rows)


def png(seed: int = 0, side: int = 16) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


@contextlib.contextmanager
def running(engine: Engine | Repository, options: Options | None = None, ready: bool = True) -> Iterator[str]:
    """The engine behind a real socket, in a thread; gives its address."""
    socket = listen("127.0.0.1", 0)
    server = Server(create_app(engine, options), 5.0, 2000)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{socket.getsockname()[1]}"
    try:
        until(lambda: server.started)
        if ready:
            until(lambda: engine.ready)
        yield address
    finally:
        server.should_exit = True
        thread.join(15)


class Process:
    """`odevit-serve serve` for real."""

    def __init__(
        self,
        bundle: Path,
        *options: str,
        code: str = "",
        environment: dict[str, str] | None = None,
        patience: float = 60,
    ):
        start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "odevit_serve"]
        command = [*start, "serve", str(bundle), "--port", "0", "--threads", "1", "--log", "json", *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        until(lambda: any("serving" in line for line in self.lines) or self.process.poll() is not None, patience)
        first = next((line for line in self.lines if "serving" in line), None)
        assert first is not None, self.lines
        self.address = first.split(" on ")[1].split()[0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def wait_ready(self, client: httpx.Client) -> None:
        until(lambda: ready(client, self.address), 60)

    def memory(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


def ready(client: httpx.Client, address: str) -> bool:
    try:
        return client.get(f"{address}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def until(true: Any, seconds: float = 20.0) -> None:
    """Wait for a condition; fail when it does not come."""
    limit = time.monotonic() + seconds
    while not true():
        if time.monotonic() > limit:
            raise AssertionError(f"did not happen within {seconds} s")
        time.sleep(0.005)


def nothing_left(engine: Engine) -> None:
    """No request lost, no slot or place leaked."""
    until(lambda: not (engine.pending or engine.active or engine.waiting), 60)
    assert not engine._pending.line
    stats = engine.stats
    assert stats.accepted == stats.answered + stats.cancelled + sum(stats.failed.values())


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> tuple[int, bool, bytes]:
    """One request on an open connection: status, whether the connection stays, and the body."""
    writer.write(message)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    fields = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
    body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return int(lines[0].split()[1]), fields.get(b"connection") != b"close", body
