"""A load generator over plain sockets: so many clients, each asking again as soon as it has its answer."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"content-length: (\d+)")
_STEPS = re.compile(rb'"steps": ?(\d+)')  # of this server's answers; others answer in other words


@dataclass
class Load:
    """What the clients saw."""

    clients: int
    images: int = 1  # in one request
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  # of the good answers
    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0  # requests whose connection ended without an answer
    steps: list[int] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Images."""
        return self.images * len(self.latencies)

    @property
    def images_per_second(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> int:
        return self.lost + sum(count for status, count in self.statuses.items() if status != 200)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")

    def summary(self) -> dict[str, Any]:
        return {
            "clients": self.clients,
            "images": self.answered,
            "images_per_second": self.images_per_second,
            "p50_ms": 1000 * self.percentile(0.50),
            "p95_ms": 1000 * self.percentile(0.95),
            "p99_ms": 1000 * self.percentile(0.99),
            "mean_depth": sum(self.steps) / len(self.steps) if self.steps else None,
            "errors": self.errors,
        }


async def generate(
    address: str,
    bodies: Sequence[bytes],
    clients: int,
    seconds: float,
    path: str = "/v1/predict",
    kind: str = "application/octet-stream",
    most: int = 1_000_000,
    seed: int = 0,
    headers: str = "",
    images: int = 1,
) -> Load:
    """Let `clients` ask for `seconds`, or until `most` requests were sent; each asks for so many `images`."""
    load, left = Load(clients, images), [most]
    host, port = urlsplit(address).hostname or "127.0.0.1", urlsplit(address).port or 80
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n{headers}Content-Length: "
    messages = [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]
    began = time.monotonic()
    end = began + seconds
    await asyncio.gather(*(_client(host, port, messages, end, load, left, seed + i) for i in range(clients)))
    load.seconds = time.monotonic() - began
    return load


async def _client(
    host: str, port: int, messages: list[bytes], end: float, load: Load, left: list[int], seed: int
) -> None:
    """One client; it opens a new connection when the last one has ended."""
    loop = asyncio.get_running_loop()
    choose = random.Random(seed)
    while time.monotonic() < end and left[0] > 0:
        done = loop.create_future()
        try:
            await loop.create_connection(lambda own=done: _Asking(own, messages, choose, end, load, left), host, port)  # type: ignore[misc]
        except OSError:
            load.lost += 1
        else:
            await done
        if time.monotonic() < end:
            await asyncio.sleep(0.01)


class _Asking(asyncio.Protocol):
    """Requests one after the other on one connection. Without streams: the clients share the cores with the server."""

    def __init__(
        self,
        done: asyncio.Future[None],
        messages: list[bytes],
        choose: random.Random,
        end: float,
        load: Load,
        left: list[int],
    ):
        self.done, self.messages, self.choose, self.end, self.load, self.left = done, messages, choose, end, load, left
        self.asked = False  # and not yet answered
        self.got = b""
        self.length = -1  # of the whole answer, once its head is there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        if time.monotonic() >= self.end or self.left[0] <= 0:
            self.transport.close()
            return
        self.left[0] -= 1
        self.asked, self.got, self.length, self.began = True, b"", -1, time.monotonic()
        self.transport.write(self.choose.choice(self.messages))

    def data_received(self, data: bytes) -> None:
        self.got += data
        if self.length < 0:
            at = self.got.find(b"\r\n\r\n")
            if at < 0:
                return
            self.head = self.got[:at].lower()
            found = _LENGTH.search(self.head)
            self.body_at = at + 4
            self.length = self.body_at + (int(found[1]) if found else 0)
        if len(self.got) < self.length:
            return
        status = int(self.head[9:12])
        self.load.statuses[status] += 1
        self.asked = False
        if status == 200:
            self.load.latencies.append(time.monotonic() - self.began)
            self.load.steps += map(int, _STEPS.findall(self.got, self.body_at))
        if b"connection: close" in self.head:
            self.transport.close()
        else:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.lost += self.asked
        if not self.done.done():
            self.done.set_result(None)
