"""A load generator over plain sockets: so many clients, each asking again as soon as it has its answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Load:
    """What the clients saw."""

    clients: int
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  # of the good answers
    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0  # requests whose connection ended without an answer
    steps: list[int] = field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> int:
        return self.lost + sum(count for status, count in self.statuses.items() if status != 200)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")

    def summary(self) -> dict[str, Any]:
        return {
            "clients": self.clients,
            "images": len(self.latencies),
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
) -> Load:
    """Let `clients` ask for `seconds`, or until `most` requests were sent."""
    load, left = Load(clients), [most]
    host, port = urlsplit(address).hostname or "127.0.0.1", urlsplit(address).port or 80
    messages = [
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
        for body in bodies
    ]
    began = time.monotonic()
    end = began + seconds
    await asyncio.gather(*(_client(host, port, messages, end, load, left, seed + i) for i in range(clients)))
    load.seconds = time.monotonic() - began
    return load


async def _client(
    host: str, port: int, messages: list[bytes], end: float, load: Load, left: list[int], seed: int
) -> None:
    choose = random.Random(seed)
    streams = None
    while time.monotonic() < end and left[0] > 0:
        left[0] -= 1
        began = time.monotonic()
        try:
            if streams is None:
                streams = await asyncio.open_connection(host, port)
            status, keep, body = await ask(*streams, choose.choice(messages))
        except (OSError, EOFError, ValueError):
            load.lost += 1
            streams = None
            await asyncio.sleep(0.01)
            continue
        load.statuses[status] += 1
        if status == 200:
            load.latencies.append(time.monotonic() - began)
            load.steps += _depths(body)
        if not keep:
            streams[1].close()
            streams = None
    if streams is not None:
        streams[1].close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> tuple[int, bool, bytes]:
    """One request on an open connection: status, whether the connection stays, and the body."""
    writer.write(message)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    fields = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
    body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return int(lines[0].split()[1]), fields.get(b"connection") != b"close", body


def _depths(body: bytes) -> list[int]:
    try:
        return [entry["steps"] for entry in json.loads(body)["predictions"] if "steps" in entry]
    except (ValueError, KeyError, TypeError):  # other servers answer in other words
        return []
