"""A server under mixed load for a long time: nothing is lost, nothing leaks, memory does not grow.

    PYTHONPATH=tests python -m hardening.soak --requests 200000 --minutes 120

A real `odevit-serve serve` with a tiny model on 127.0.0.1 is asked by some clients at once: good requests of every
interface, malformed ones, slow ones, ones whose client goes away, bursts beyond the queue, deadlines that cannot be
met, and models that are loaded anew meanwhile. It ends after so many requests or minutes, whichever comes first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from conftest import tiny_folder
from servers import Process, ask, png, until

KEY = "soak"
PICTURES = [png(i) for i in range(16)]
KINDS = {"good": 50, "options": 8, "inference": 8, "attention": 3, "malformed": 15, "slow": 4, "cancelled": 6,
         "burst": 3, "deadline": 3, "reload": 0.2}  # fmt: skip
BURST, QUEUE = 24, 16  # images at once, and places: some of them are refused
IMAGES = ("accepted", "answered", "cancelled", "failed", "refused")
ALLOWED = {200, 400, 404, 413, 414, 415, 422, 429, 504}
ANSWER_SECONDS = 120.0  # after which a request counts as lost


def malformed(chance: random.Random, model: str = "random") -> bytes:
    """A request that is wrong somewhere, from the first line to the last byte."""
    kinds = ["image/png", "application/json", "multipart/form-data; boundary=b", "text/plain", "", "\x01", "a/" * 50]
    paths = [
        "/v1/predict",
        "/v1/attention",
        f"/v2/models/{model}/infer",
        "/v1/predict?max_steps=%00",
        "/v1/predict?a&&=%ff",
    ]
    picture = bytearray(PICTURES[chance.randrange(16)])
    for _ in range(chance.randrange(1, 30)):
        picture[chance.randrange(len(picture))] = chance.randrange(256)
    tensor = {"name": "image", "shape": [chance.choice([1, -1, 2**62, 0])], "datatype": "BYTES"}
    bodies = [
        bytes(picture),
        bytes(picture[: chance.randrange(len(picture))]),
        chance.randbytes(chance.randrange(200)),
        b'{"image": "' + chance.randbytes(20).hex().encode() + b'"}',
        b"[" * chance.randrange(1, 5000),
        b'{"images": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + bytes(picture) + b"\r\n--b--\r\n",
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
        json.dumps({"inputs": [{**tensor, "data": [[]]}]}).encode(),
        json.dumps(
            {"inputs": [{**tensor, "parameters": {"binary_data_size": chance.choice([5, -1, None, "a"])}}]}
        ).encode(),
    ]
    body = chance.choice(bodies)
    extra = chance.choice(["", "", f"Inference-Header-Content-Length: {chance.choice([0, 5, 10**9, -3, 'x'])}\r\n"])
    extra += chance.choice(["", "", "X-Request-ID: \xff\xfe\r\n", "Content-Encoding: gzip\r\n"])
    return request(chance.choice(paths), body, chance.choice(kinds), extra)


def request(path: str, body: bytes = b"", kind: str = "application/octet-stream", extra: str = "") -> bytes:
    start = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Type: {kind}\r\n{extra}"
    return start.encode("latin-1") + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Soak:
    """What the clients saw, and what the process looked like from time to time."""

    host: str
    port: int
    model: str
    process: psutil.Process
    left: int
    end: float
    asked: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)  # "kind status"
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    samples: list[tuple[int, float, int, int]] = field(default_factory=list)  # asked, megabytes, descriptors, threads

    async def client(self, seed: int) -> None:
        chance, streams = random.Random(seed), None
        while self.left > 0 and time.monotonic() < self.end:
            kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
            self.left -= BURST if kind == "burst" else 1
            self.asked[kind] += BURST if kind == "burst" else 1
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    if kind == "cancelled":
                        await self._cancelled(chance)
                    elif kind == "burst":
                        await asyncio.gather(*(self._alone("burst", self._good(chance)) for _ in range(BURST)))
                    elif kind == "slow":
                        await self._slow(chance)
                    else:
                        streams = streams or await asyncio.open_connection(self.host, self.port)
                        keep = await self._ask(kind, streams, self._message(kind, chance))
                        if not keep:
                            streams[1].close()
                            streams = None
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                self.lost.append(f"{kind}: {type(error).__name__} {error}")
                streams = None
        if streams is not None:
            streams[1].close()

    def _good(self, chance: random.Random) -> bytes:
        return request("/v1/predict", chance.choice(PICTURES))

    def _message(self, kind: str, chance: random.Random) -> bytes:
        picture = chance.choice(PICTURES)
        if kind == "options":
            query = chance.choice(["adaptive=false", "max_steps=2", "trace=true", "rule=confidence&threshold=0.4"])
            return request(f"/v1/models/{self.model}/predict?{query}", picture)
        if kind == "attention":
            return request(f"/v1/attention?step={chance.randrange(4)}", picture)
        if kind == "deadline":
            return request(f"/v1/predict?deadline_ms={chance.choice(['0.001', '1', '5'])}", picture)
        if kind == "inference":
            size = {"binary_data_size": len(picture) + 4}
            head = {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "parameters": size}]}
            text = json.dumps(head).encode()
            length = f"Inference-Header-Content-Length: {len(text)}\r\n"
            body = text + len(picture).to_bytes(4, "little") + picture
            return request(f"/v2/models/{self.model}/infer", body, extra=length)
        if kind == "malformed":
            return malformed(chance, self.model)
        if kind == "reload":
            return request(f"/v2/repository/models/{self.model}/load")
        return self._good(chance)

    async def _ask(self, kind: str, streams: Any, message: bytes) -> bool:
        status, keep, body = await ask(*streams, message)
        self.statuses[f"{kind} {status}"] += 1
        expected = {"good": {200, 429}, "options": {200, 429}, "inference": {200, 429}, "attention": {200, 429},
                    "burst": {200, 429}, "slow": {200, 429}, "deadline": {200, 429, 504},
                    "reload": {200}}.get(kind, ALLOWED)  # fmt: skip
        if status not in expected or b"Traceback" in body:
            self.wrong.append(f"{kind}: {status} {body[:200]!r}")
        return keep

    async def _alone(self, kind: str, message: bytes) -> None:
        streams = await asyncio.open_connection(self.host, self.port)
        try:
            await self._ask(kind, streams, message)
        finally:
            streams[1].close()

    async def _slow(self, chance: random.Random) -> None:
        message = self._good(chance)
        streams = await asyncio.open_connection(self.host, self.port)
        try:
            parts = sorted(chance.randrange(len(message)) for _ in range(3))
            for begin, stop in zip([0, *parts[:-1]], parts):
                streams[1].write(message[begin:stop])
                await streams[1].drain()
                await asyncio.sleep(chance.random() * 0.05)
            await self._ask("slow", streams, message[parts[-1] :])
        finally:
            streams[1].close()

    async def _cancelled(self, chance: random.Random) -> None:
        message = request("/v1/predict?adaptive=false", chance.choice(PICTURES))
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(message[: chance.choice([len(message), len(message), chance.randrange(len(message))])])
        await writer.drain()
        await asyncio.sleep(chance.random() * 0.01)
        if chance.random() < 0.5:  # reset instead of an orderly end
            own: Any = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        self.statuses["cancelled"] += 1

    async def watch(self, every: int) -> None:
        """Look at the process after every so many requests."""
        while True:
            total = self.asked.total()
            if not self.samples or total - self.samples[-1][0] >= every:
                self.samples.append((total, *look(self.process)))
            await asyncio.sleep(0.05)


def look(process: psutil.Process) -> tuple[float, int, int]:
    return process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()


def counts(address: str) -> dict[str, float]:
    """The counters of /metrics, summed over labels other than the name."""
    text = httpx.get(f"{address}/metrics", headers={"X-API-Key": KEY}, timeout=60).text
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        found[name] += float(value)  # type: ignore[assignment]
    return dict(found)


def soak(requests: int, seconds: float, clients: int = 12, seed: int = 0) -> dict[str, Any]:
    """Run it; the figures, with what is wrong under `faults`."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        model = tiny_folder(home / "models" / "random").name
        options = ["--repository", str(home / "models"), "--queue", str(QUEUE), "--slots", "8", "--log", "off"]
        options += ["--header-timeout", "600", "--body-timeout", "600"]  # a busy machine is no slow client
        environment = {"ODEVIT_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        with Process(home / "models" / model, *options, environment=environment, patience=300) as server:
            with httpx.Client() as client:
                server.wait_ready(client)
            host, port = server.address.removeprefix("http://").split(":")
            process = psutil.Process(server.process.pid)
            run = Soak(host, int(port), model, process, requests, time.monotonic() + seconds)
            begun = time.monotonic()
            asyncio.run(_all(run, clients, seed, max(1, requests // 100)))
            took = time.monotonic() - begun
            until(lambda: not _busy(counts(server.address)), 120)
            until(lambda: look(process)[1] <= run.samples[0][1] + 4, 120)  # connections end on both sides
            run.samples.append((run.asked.total(), *look(process)))
            return _report(run, counts(server.address), took)


async def _all(run: Soak, clients: int, seed: int, every: int) -> None:
    watching = asyncio.create_task(run.watch(every))
    await asyncio.gather(*(run.client(seed * 1000 + number) for number in range(clients)))
    watching.cancel()


def _busy(found: dict[str, float]) -> float:
    ended = sum(found.get(f"odevit_images_{name}_total", 0) for name in ("answered", "cancelled", "failed"))
    left = found["odevit_images_accepted_total"] - ended
    return left + found["odevit_slots_active"] + found["odevit_queue_waiting"]


def _report(run: Soak, found: dict[str, float], seconds: float) -> dict[str, Any]:
    half = [sample for sample in run.samples if sample[0] >= run.asked.total() / 2]
    memory = [sample[1] for sample in half]
    third = max(1, len(memory) // 3)
    before, after = statistics.median(memory[:third]), statistics.median(memory[-third:])
    faults = [*run.lost[:5], *run.wrong[:5]]
    return {
        "requests": run.asked.total(),
        "seconds": round(seconds, 1),
        "asked": dict(run.asked),
        "statuses": dict(sorted(run.statuses.items())),
        "lost": len(run.lost),
        "wrong": len(run.wrong),
        "images": {name: int(found.get(f"odevit_images_{name}_total", 0)) for name in IMAGES},
        "loaded_anew": int(found.get("odevit_replaced_total", 0)),
        "megabytes_second_half": [round(before, 1), round(after, 1)],
        "megabytes_samples": [round(sample[1]) for sample in run.samples[:: max(1, len(run.samples) // 10)]],
        "descriptors": [run.samples[0][2], run.samples[-1][2]],
        "threads": [run.samples[0][3], run.samples[-1][3]],
        "flat": after <= 1.05 * before,
        "faults": faults,
    }  # fmt: skip


def main() -> int:
    reader = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    reader.add_argument("--requests", type=int, default=200_000)
    reader.add_argument("--minutes", type=float, default=120.0)
    reader.add_argument("--clients", type=int, default=12)
    reader.add_argument("--seed", type=int, default=0)
    asked = reader.parse_args()
    report = soak(asked.requests, 60 * asked.minutes, asked.clients, asked.seed)
    print(json.dumps(report, indent=1))
    return 1 if report["faults"] or not report["flat"] else 0


if __name__ == "__main__":
    sys.exit(main())
