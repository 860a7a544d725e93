"""Ways to serve one model, under the same load, in one run.

Every server is a process of its own with the same number of threads, and all are sent the same pictures by the same
clients: as the body of the request here, as base64 in JSON where that is LitServe's way. Rounds are interleaved, so
that what else the machine does falls on all of them alike. `in-process` has no server: the same pictures, decoded and
answered by the slots themselves. `many`, `tensors` and `grpc` are other ways to ask the server of `continuous`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import bundle
from ..runtime.model import Model, load_bundle
from .clients import MANY, by_grpc, by_http, in_process, messages
from .servers import AUDIT, free_port, process

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
CLIENTS = (1, 8, 32, 128)


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
            grpc_port = free_port() if "grpc" in systems else 0
            more = ["--grpc-port", str(grpc_port)] if grpc_port else []
            own = stack.enter_context(process("continuous", model, unrolled, threads, more))
        for name in systems:
            if name == "in-process":
                runs[name] = functools.partial(in_process, load_bundle(model, threads=threads), pictures)
            elif name == "grpc":
                runs[name] = functools.partial(by_grpc, own[1], grpc_port, bundle.read_config(model).name, pictures)
            elif name in ("continuous", *WAYS):
                runs[name] = functools.partial(by_http, own, name, messages(name, model, pictures))
            else:
                server = stack.enter_context(process(name, model, unrolled, threads))
                runs[name] = functools.partial(by_http, server, name, messages(name, model, pictures))
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
        if name != "continuous" and own and row["images_per_second"]:
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
        if row["system"] in ("continuous", *WAYS) and own.get(row["clients"]):
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
