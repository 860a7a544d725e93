"""Ways to serve one model, under the same load, in one run.

Every server is a process of its own with the same number of threads, and all are sent the same pictures by the same
clients: as the body of the request here, as base64 in JSON where that is LitServe's way. Rounds are interleaved, so
that what else the machine does falls on all of them alike. `in-process` has no server: the same pictures, decoded and
answered by the slots themselves. `many`, `tensors` and `grpc` are other ways to ask the server of `continuous`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import math
import os
import platform
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .. import bundle
from ..data import images
from ..errors import UserError
from ..runtime.model import Model, load_bundle
from ..runtime.results import Prediction
from ..runtime.slots import Job, Outcome, Slots
from . import cnn
from .load import Load, generate

MANY = 32  # pictures in one request, where there are many
SYSTEMS = {
    "continuous": "this engine",
    "audited": "this engine with --audit 0.02",
    "synchronous": "the same engine, a batch runs until all of it has exited",
    "fixed": "fixed depth, dynamic batching (this server, unrolled ONNX)",
    "litserve": "LitServe, unrolled ONNX",
    "in-process": "the slots without a server, decoding included",
    "cnn": "LitServe, a CNN of ResNet-20's size (random weights)",
    "many": f"this engine, {MANY} pictures in one request (a form), by one client for 16",
    "tensors": f"this engine, pixel values of {MANY} pictures in one request (Open Inference Protocol), as `many`",
    "grpc": "this engine, one picture a call by gRPC",
}
WAYS = {"many": 32, "tensors": 32, "grpc": 1}  # to ask the server of `continuous`: from how many clients on
BY_LITSERVE = ("litserve", "cnn")
AUDIT = 0.02  # of the answers
CLIENTS = (1, 8, 32, 128)
SLOTS = 32
BOUNDARY = "odevit-serve-pictures"
T = TypeVar("T")


class SynchronousSlots(Slots):
    """A batch as other early-exit systems run it: nobody comes in, and nobody leaves, until the last one is done."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._done: dict[int, Outcome] = {}

    @property
    def free(self) -> int:
        return 0 if self.active else self.capacity

    def step(self) -> list[Outcome]:
        for outcome in super().step():
            self._done.setdefault(id(outcome.job.key), outcome)
        if len(self._done) < self.active:
            return []
        done = list(self._done.values())
        self.clear()
        return done

    def cancel(self, key: Any) -> bool:
        return False  # its row is computed to the end all the same

    def clear(self) -> tuple[Job, ...]:
        jobs, self._done = self.jobs, {}
        if jobs:
            super()._compact(np.arange(self.active))
        return jobs

    def _compact(self, ended: np.ndarray) -> None:
        pass


def serve_synchronous(source: str, port: int, threads: int) -> None:
    from ..serving.engine import Engine
    from ..serving.http.middleware import Options
    from ..serving.http.uvicorn_server import run
    from ..serving.logs import set_up_logging

    set_up_logging("off")
    model = load_bundle(source, threads=threads)
    engine = Engine(model, core=model.computes(SLOTS, SynchronousSlots), queue=1024)
    run(engine, Options(), "127.0.0.1", port, 5.0, 1024)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def process(
    system: str, model: Path, unrolled: Path, threads: int, more: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """A server of one of the systems, ready; gives its address and its session."""
    port = free_port()
    source = unrolled if system in ("fixed", *BY_LITSERVE) else model
    if system == "cnn":
        source = cnn.write(unrolled.with_name("cnn.onnx"), bundle.read_config(model))
    if system in ("continuous", "audited", "fixed"):
        options = ["--slots", str(SLOTS), "--queue", "1024", "--log", "off", "--threads", str(threads)]
        options += ["--audit", str(AUDIT)] if system == "audited" else []
        command = [sys.executable, "-m", "odevit_serve", "serve", str(source), "--port", str(port), *options, *more]
    else:
        module = "odevit_serve.benchmark.litserve" if system in BY_LITSERVE else "odevit_serve.benchmark.serve"
        command = [sys.executable, "-m", module, str(source), str(port), str(threads)]
    own = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(own, f"{address}/{'health' if system in BY_LITSERVE else 'v2/health/ready'}", system)
        yield address, own.pid
    finally:
        own.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            own.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(own.pid, signal.SIGKILL)  # with whatever it started itself
        own.wait()


def _wait(own: subprocess.Popen[bytes], address: str, system: str) -> None:
    limit = time.monotonic() + 60
    while time.monotonic() < limit and own.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(address, timeout=1).status == 200:
                return
        time.sleep(0.1)
    raise UserError(f"{system} did not start")


def compare(
    model: Path,
    unrolled: Path,
    pictures: Sequence[bytes],
    clients: Sequence[int] = CLIENTS,
    seconds: float = 4.0,
    rounds: int = 3,
    threads: int | None = None,
    systems: Sequence[str] = tuple(SYSTEMS),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Medians over rounds of what the clients saw, by system and number of clients."""
    threads = threads or os.cpu_count() or 1
    where = _where()
    runs: dict[str, Callable[[int, float], dict[str, Any]]] = {}
    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        own: tuple[str, int] = ("", 0)
        if {"continuous", *WAYS} & set(systems):
            by_grpc = free_port() if "grpc" in systems else 0
            more = ["--grpc-port", str(by_grpc)] if by_grpc else []
            own = stack.enter_context(process("continuous", model, unrolled, threads, more))
        for name in systems:
            if name == "in-process":
                runs[name] = functools.partial(in_process, load_bundle(model, threads=threads), pictures)
            elif name == "grpc":
                runs[name] = functools.partial(_by_grpc, own[1], by_grpc, bundle.read_config(model).name, pictures)
            elif name in ("continuous", *WAYS):
                runs[name] = functools.partial(_load, own, name, _asked(name, model, pictures))
            else:
                server = stack.enter_context(process(name, model, unrolled, threads))
                runs[name] = functools.partial(_load, server, name, _asked(name, model, pictures))
            runs[name](max(clients), min(1.0, seconds))  # what only the first pays for
        for turn in range(rounds):
            for count in clients:
                for name in [*systems[turn % len(systems) :], *systems[: turn % len(systems)]]:
                    if count < WAYS.get(name, 1):
                        continue
                    summary = runs[name](count, seconds)
                    seen.setdefault((name, count), []).append(summary)
                    speed = f"{summary['images_per_second']:.0f} images/s"
                    say(f"round {turn + 1}/{rounds}, {count} clients, {name}: {speed}")
    full = bundle.read_config(model).integration.steps
    rows = [_median(name, count, runs, full) for (name, count), runs in seen.items()]
    rows.sort(key=lambda row: (row["clients"], list(SYSTEMS).index(row["system"])))
    result = {"rows": rows, "ratios": ratios(rows), "audit": audit_cost(seen, full), "of_in_process": shares(rows)}
    return {**result, "threads": threads, "rounds": rounds, "seconds": seconds, **where}


def audit_cost(seen: dict[tuple[str, int], list[dict[str, Any]]], full: int) -> dict[str, Any]:
    """What the audit takes, by number of clients: medians over rounds of one server against the other.

    `allowed` is what continuing 2% of the images from their mean depth to full depth explains, and three points more.
    """
    found: dict[str, Any] = {}
    for (name, clients), runs in seen.items():
        plain = seen.get(("continuous", clients))
        if name != "audited" or not plain:
            continue
        depth = statistics.mean(run["mean_depth"] for run in plain if run["mean_depth"])
        ended = sum(run["audited"] + run["dropped"] for run in runs)
        found[str(clients)] = {
            "throughput_lost": 1 - _between(runs, plain, "images_per_second"),
            "cpu_added": _between(runs, plain, "cpu_ms") - 1,
            "allowed": AUDIT * full / depth + 0.03,
            "coverage": sum(run["audited"] for run in runs) / ended if ended else None,
            "audited": sum(run["audited"] for run in runs),
        }
    return found


def _between(runs: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] / other[key] for run, other in zip(runs, others, strict=True))


@dataclass(frozen=True)
class Messages:
    """What the clients of a system send."""

    bodies: Sequence[bytes]
    path: str = "/v1/predict"
    kind: str = "application/octet-stream"
    headers: str = ""
    images: int = 1


def _asked(system: str, model: Path, pictures: Sequence[bytes]) -> Messages:
    if system in BY_LITSERVE:
        bodies = [json.dumps({"image": base64.b64encode(picture).decode()}).encode() for picture in pictures]
        return Messages(bodies, "/predict", "application/json")
    if system == "many":
        return Messages([_form(some) for some in _several(pictures)], kind=f"multipart/form-data; boundary={BOUNDARY}",
                     images=MANY)  # fmt: skip
    if system == "tensors":
        config = bundle.read_config(model)
        values = [images.prepare(images.open_picture(picture), config.preprocessing) for picture in pictures]
        blobs = [np.stack(some).tobytes() for some in _several(values)]
        shape = [MANY, *config.preprocessing.input_size]
        given = {"name": "pixel_values", "shape": shape, "datatype": "FP32",
                 "parameters": {"binary_data_size": len(blobs[0])}}  # fmt: skip
        head = json.dumps({"inputs": [given]}).encode()
        length = f"Inference-Header-Content-Length: {len(head)}\r\n"
        path = f"/v2/models/{config.name}/infer"
        return Messages([head + blob for blob in blobs], path, headers=length, images=MANY)
    return Messages(pictures)


def _several(items: Sequence[T], count: int = 8) -> list[list[T]]:
    chance = np.random.default_rng(0)
    return [[items[i] for i in chance.integers(0, len(items), MANY).tolist()] for _ in range(count)]


def _form(pictures: Sequence[bytes]) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
    return b"".join(head + picture + b"\r\n" for picture in pictures) + f"--{BOUNDARY}--\r\n".encode()


def _load(server: tuple[str, int], system: str, asked: Messages, clients: int, seconds: float) -> dict[str, Any]:
    address, session = server
    own = dict(vars(asked))
    at_once = clients if asked.images == 1 else max(1, clients // 16)
    before, counted = cpu_seconds(session), _audited(address, system)
    load = asyncio.run(generate(address, own.pop("bodies"), at_once, seconds, **own))
    found = {**load.summary(), "cpu_ms": _each(cpu_seconds(session) - before, load.answered)}
    return found | {name: count - counted[name] for name, count in _audited(address, system).items()}


def _audited(address: str, system: str) -> dict[str, int]:
    """Images drawn for the audit so far that were followed to full depth, and those that were dropped."""
    if system != "audited":
        return {}
    with urllib.request.urlopen(f"{address}/v1/model", timeout=30) as answer:
        audit = json.load(answer)["audit"]
    return {"audited": audit["audited"], "dropped": sum(audit["dropped"].values())}


def _by_grpc(
    session: int, port: int, name: str, pictures: Sequence[bytes], clients: int, seconds: float
) -> dict[str, Any]:
    before = cpu_seconds(session)
    load = asyncio.run(_call(port, name, pictures, clients, seconds))
    return {**load.summary(), "cpu_ms": _each(cpu_seconds(session) - before, load.answered)}


async def _call(port: int, name: str, pictures: Sequence[bytes], clients: int, seconds: float) -> Load:
    """The same load as calls of `ModelInfer`."""
    import grpc

    from ..serving.grpc_messages import SERVICE, TYPES

    made = []
    for picture in pictures:
        request = TYPES["ModelInferRequest"](
            model_name=name, raw_input_contents=[struct.pack("<I", len(picture)) + picture]
        )
        request.inputs.add(name="image", datatype="BYTES", shape=[1])
        made.append(request.SerializeToString())
    load, end = Load(clients), time.monotonic() + seconds

    async def client(seed: int) -> None:
        choose = random.Random(seed)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer", None, TYPES["ModelInferResponse"].FromString)
            while time.monotonic() < end:
                began = time.monotonic()
                try:
                    answer = await call(choose.choice(made))
                except grpc.aio.AioRpcError:
                    load.lost += 1
                    continue
                load.latencies.append(time.monotonic() - began)
                at = [output.name for output in answer.outputs].index("steps")
                load.steps.append(int.from_bytes(answer.raw_output_contents[at], "little"))

    began = time.monotonic()
    await asyncio.gather(*map(client, range(clients)))
    load.seconds = time.monotonic() - began
    return load


def in_process(model: Model, pictures: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """The same pictures without a server: one after the other for one client, all the slots for more."""
    load, began, before = Load(clients), time.monotonic(), time.process_time()
    given = itertools.takewhile(lambda _: time.monotonic() < began + seconds, itertools.cycle(pictures))
    results = map(model.predict, given) if clients == 1 else model.stream(given)
    for result in results:
        if isinstance(result, Prediction):
            load.latencies.append(result.read_seconds + result.compute_seconds)
            load.steps.append(result.steps)
    load.seconds = time.monotonic() - began
    return {**load.summary(), "cpu_ms": _each(time.process_time() - before, len(load.latencies))}


def _each(seconds: float, images: int) -> float:
    return 1000 * seconds / images if images else math.nan


def cpu_seconds(session: int) -> float:
    """CPU time so far of all processes of a session, as Linux counts it; NaN elsewhere."""
    if not sys.platform.startswith("linux"):
        return math.nan
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # those that have ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _median(name: str, clients: int, runs: list[dict[str, Any]], full: int) -> dict[str, Any]:
    row: dict[str, Any] = {"system": name, "clients": clients}
    for key in ("images_per_second", "p50_ms", "p95_ms", "p99_ms", "cpu_ms"):
        values = [run[key] for run in runs]
        row[key] = statistics.median(values)
        row[f"{key}_spread"] = [min(values), max(values)]
    depths = [run["mean_depth"] for run in runs if run["mean_depth"] is not None]
    row["mean_depth"] = statistics.mean(depths) if depths else None if name in ("cnn", "tensors") else float(full)
    row["images"] = sum(run["images"] for run in runs)
    row["errors"] = sum(run["errors"] for run in runs)
    return row


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """This engine against each other system, by number of clients: throughput, and p99."""
    by = {(row["system"], row["clients"]): row for row in rows}
    answer: dict[str, Any] = {}
    for (name, count), row in by.items():
        own = by.get(("continuous", count))
        if name != "continuous" and own:
            answer.setdefault(str(count), {})[name] = {
                "images_per_second": own["images_per_second"] / row["images_per_second"],
                "p99": own["p99_ms"] / row["p99_ms"],
            }
    return answer


def shares(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Images/s of this engine, by every way to ask it, as a share of what the slots do without a server."""
    own: dict[int, float] = {row["clients"]: row["images_per_second"] for row in rows if row["system"] == "in-process"}
    answer: dict[str, Any] = {}
    for row in rows:
        if row["system"] in ("continuous", *WAYS) and row["clients"] in own:
            share = row["images_per_second"] / own[row["clients"]]
            answer.setdefault(str(row["clients"]), {})[row["system"]] = share
    return answer


def _where() -> dict[str, Any]:
    import onnxruntime

    versions = {"python": platform.python_version(), "onnxruntime": onnxruntime.__version__}
    with contextlib.suppress(ImportError):
        import litserve

        versions["litserve"] = litserve.__version__
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "load_average": load}
    return {"machine": machine, "versions": versions}


def depths(model: Model, pictures: Sequence[bytes]) -> dict[str, Any]:
    """How deep the pictures go: a comparison says little when they all go equally deep."""
    steps = [prediction.steps for prediction in model.predict(list(pictures))]
    full = model.config.integration.steps
    return {"full": full, "mean": statistics.mean(steps), "counts": {n: steps.count(n) for n in sorted(set(steps))}}


def some_pictures(count: int, side: int) -> list[bytes]:
    """Made-up pictures, from smooth to rough, for want of real ones."""
    from PIL import Image

    chance, made = np.random.default_rng(0), []
    for number in range(count):
        rough = chance.integers(0, 256, (2 ** (1 + number % 5), 2 ** (1 + number % 5), 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(rough).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "PNG")
        made.append(buffer.getvalue())
    return made


def real_pictures(folder: str, count: int) -> list[bytes]:
    found = list(images.walk([folder]))
    if not found:
        raise UserError(f"{folder} has no pictures")
    chosen = np.random.default_rng(0).permutation(len(found))[:count]
    return [Path(found[i]).read_bytes() for i in chosen.tolist()]


if __name__ == "__main__":
    serve_synchronous(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
