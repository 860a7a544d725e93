"""What a model costs on this machine, beside what else could be run in its place.

Everything is taken in one run: the same pictures, the same threads, systems in turns, several rounds, medians with
their spread. What needs torch is left out, with a sentence, where torch is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import bundle
from ..config import Config
from ..data.datasets import Images
from ..guarantee.calibrate import match_labels
from ..runtime.exits import Depth
from ..runtime.model import BundleModel, Model, load, load_bundle
from ..runtime.slots import Job, Slots
from .cost import fresh

Array = np.ndarray[Any, Any]
Say = Callable[[str], None]
BATCHES = (1, 8, 32)
FULL = "this model, full depth"
LIBRARIES = ("odevit-serve", "onnxruntime", "numpy", "torch", "timm", "onnx")


class PassResult(NamedTuple):
    """What one pass over the pictures gave."""

    answers: Array  # [n]
    latencies: list[float]  # seconds that an image (or the call it was part of) took
    mean_steps: float | None = None


@dataclass(frozen=True)
class System:
    """One way to answer pictures, at any batch size."""

    name: str
    where: str  # what runs it
    run: Callable[[Array, int], PassResult]
    macs: Callable[[float | None], float]  # of one image, by its mean steps
    files: tuple[Path, ...] = ()
    cost: dict[str, Any] = field(default_factory=dict)  # the task for a fresh process; empty: not measured
    only: int | None = None  # the one batch size it is made for


def sweep(slots: Slots, depth: Depth, pixels: Array) -> PassResult:
    """All pictures through the slots, each admitted as soon as there is room."""
    answers, latencies, steps, at = np.empty(len(pixels), int), [], 0, 0
    while at < len(pixels) or slots.active:
        count = min(slots.free, len(pixels) - at)
        if count:
            slots.admit(pixels[at : at + count], [Job(i, depth) for i in range(at, at + count)])
            at += count
        for outcome in slots.step():
            answers[outcome.job.key] = int(outcome.logits.argmax())
            latencies.append(outcome.seconds)
            steps += outcome.steps
    return PassResult(answers, latencies, steps / len(pixels))


def in_batches(call: Callable[[Array], tuple[Array, Array | None]], pixels: Array, batch: int) -> PassResult:
    """All pictures through a function of a batch, which gives logits and, if they differ, steps."""
    answers, latencies, steps = [], [], []
    for at in range(0, len(pixels), batch):
        began = time.perf_counter()
        logits, depth = call(pixels[at : at + batch])
        latencies.append(time.perf_counter() - began)
        answers.append(logits.argmax(-1))
        if depth is not None:
            steps.append(depth)
    return PassResult(np.concatenate(answers), latencies, float(np.concatenate(steps).mean()) if steps else None)


def bundle_systems(model: BundleModel, threads: int) -> list[System]:
    """The runtime itself: full depth, the same few steps for all, and adaptive where the bundle is calibrated."""
    own, shape, slots = model.config.integration, model.config.architecture, dict[int, Slots]()

    def run(depth: Depth) -> Callable[[Array, int], PassResult]:
        def at(pixels: Array, batch: int) -> PassResult:
            if batch not in slots:
                slots[batch] = model.slots(batch)
            return sweep(slots[batch], depth, pixels)

        return at

    def macs(steps: float | None) -> float:
        return own.macs(shape, steps)

    files = (model.path / bundle.STEM, model.path / bundle.STEP)
    cost = {"kind": "bundle", "path": model.path}
    found = [System(FULL, "odevit-serve", run(model.depth(adaptive=False)), macs, files, cost)]
    for steps in range(1, min(4, own.steps)):
        name, depth = f"this model, {steps} step{'s' * (steps > 1)}", model.depth(adaptive=False, steps=steps)
        found.append(System(name, "odevit-serve", run(depth), macs, files, cost))
    if model.depth().rule.name != "fixed":
        found.append(System("this model, adaptive", "odevit-serve", run(model.depth()), macs, files, cost))
    return found


def graph_system(name: str, path: Path, config: Config, threads: int, macs: float | None = None) -> System:
    """A single ONNX file in onnxruntime; `macs` of one image where it is not this model's."""
    from ..runtime.sessions import open_session

    session = open_session(path, threads=threads)
    outputs = [output.name for output in session.get_outputs()]
    fed, logits = session.get_inputs()[0].name, "logits" if "logits" in outputs else outputs[0]
    wanted = [logits, "steps"] if "steps" in outputs else [logits]

    def call(pixels: Array) -> tuple[Array, Array | None]:
        values = session.run(wanted, {fed: pixels})
        return values[0], values[1] if len(values) > 1 else None

    own, shape = config.integration, config.architecture
    return System(
        name,
        "onnxruntime",
        lambda pixels, batch: in_batches(call, pixels, batch),
        lambda steps: own.macs(shape, steps) if macs is None else macs,
        (path,),
        {"kind": "graph", "path": path},
    )


def interleave(calls: dict[str, Callable[[], Any]], rounds: int, say: Say) -> dict[str, list[tuple[float, Any]]]:
    """Every call once to warm up, then in turns, starting elsewhere each round: seconds and result of each."""
    names = list(calls)
    for name in names:
        calls[name]()
    found: dict[str, list[tuple[float, Any]]] = {name: [] for name in names}
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}")
        start = turn * len(names) // rounds
        for name in [*names[start:], *names[:start]]:
            began = time.perf_counter()
            result = calls[name]()
            found[name].append((time.perf_counter() - began, result))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def fit_exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The a of time ~ size^a, by least squares of the logarithms."""
    x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(times, float))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def row(system: System, batch: int, images: int, runs: list[tuple[float, PassResult]], peak: float) -> dict[str, Any]:
    """Medians over the rounds, and their spread."""
    speeds = [images / seconds for seconds, _ in runs]
    latencies = [value for _, run in runs for value in run.latencies]
    speed, steps = statistics.median(speeds), runs[-1][1].mean_steps
    macs = system.macs(steps)
    return {
        "system": system.name,
        "where": system.where,
        "batch": batch,
        "images_per_second": speed,
        "images_per_second_spread": [min(speeds), max(speeds)],
        "p50_ms": 1000 * percentile(latencies, 0.50),
        "p95_ms": 1000 * percentile(latencies, 0.95),
        "macs": macs,
        "of_peak": macs * speed / peak,
        "mean_steps": steps,
    }


@dataclass(frozen=True)
class BenchmarkPlan:
    """How much is measured."""

    batches: tuple[int, ...] = BATCHES
    pictures: int = 128
    rounds: int = 7
    judged: int = 1000  # images for accuracy
    compiled: bool = True
    grown: int = 5  # sizes of each scaling curve
    loads: int = 3  # fresh processes to load each system


QUICK = BenchmarkPlan(pictures=32, rounds=3, judged=500, compiled=False, grown=3, loads=1)


def run(
    source: str | None,
    plan: BenchmarkPlan = QUICK,
    images: Images | None = None,
    data: str | None = None,
    threads: int | None = None,
    scratch: Path | None = None,
    teacher_weights: Path | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """The whole benchmark; `images` and `data` are the same pictures, opened and by name."""
    threads = threads or os.cpu_count() or 1
    path = bundle.find(source)
    whole = load_bundle(path, threads=threads) if path.is_dir() else None
    model: Model = whole or load(path, threads=threads)
    config, left_out = model.config, list[str]()
    pixels = some_pixels(config, plan.pictures, images, model.prepare)
    if whole is None:
        systems = [graph_system(path.name, path, config, threads)]
        left_out.append("A single file was given: the other forms of the model need the bundle it came from.")
    else:
        systems = bundle_systems(whole, threads)
        if len(systems) < 2:
            left_out.append("Adaptive depth: the bundle is not calibrated (odevit-serve calibrate).")
    if scratch is not None and whole is not None:
        try:
            from . import torch_rows as benchmark_torch
        except ImportError as error:
            left_out.append(
                f"The exported files, the ViTs and the curve over tokens: {error.name} is not installed "
                "(pip install 'odevit-serve[train,export]')."
            )
        else:
            systems += benchmark_torch.systems(
                model.path, config, plan, data, teacher_weights, threads, scratch, left_out, say
            )
    measured = _measure(systems, plan, pixels, threads, say)
    result: dict[str, Any] = {
        "model": config.name,
        "settings": {"threads": threads, "rounds": plan.rounds, "pictures": plan.pictures,
                     "pictures_are": "noise" if images is None else "from the data"},
        "machine": machine(),
        "versions": versions(),
        **measured,
    }  # fmt: skip
    if whole is not None:
        result["growth"] = growth(whole, plan, pixels, threads, scratch, left_out, say)
    say("load time and peak memory")
    _add_costs(result["rows"], systems, config, threads, plan.loads)
    if images is not None:
        say("accuracy")
        _add_accuracy(result, systems, model, images, plan)
    else:
        left_out.append("Accuracy: no labelled pictures were given (--data).")
    return {**result, "left_out": left_out}


def _measure(systems: list[System], plan: BenchmarkPlan, pixels: Array, threads: int, say: Say) -> dict[str, Any]:
    pairs = {f"{s.name} / {s.where} / {b}": (s, b) for s in systems for b in plan.batches if s.only in (None, b)}
    calls: dict[str, Callable[[], Any]] = {"peak": lambda: fresh(threads, kind="peak")["macs_per_second"]}
    for name, (system, batch) in pairs.items():
        calls[name] = lambda system=system, batch=batch: system.run(pixels, batch)  # type: ignore[misc]
    found = interleave(calls, plan.rounds, say)
    peaks = [value for _, value in found["peak"]]
    peak = statistics.median(peaks)
    rows = [row(system, batch, len(pixels), found[name], peak) for name, (system, batch) in pairs.items()]
    return {"peak_macs_per_second": {"median": peak, "spread": [min(peaks), max(peaks)]}, "rows": rows}


def some_pixels(config: Config, count: int, images: Images | None, prepare: Callable[[Any], Array]) -> Array:
    if images is None:
        shape = (count, *config.preprocessing.input_size)
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return np.stack([prepare(images.read(i % len(images))) for i in range(count)])


def growth(
    model: BundleModel,
    plan: BenchmarkPlan,
    pixels: Array,
    threads: int,
    scratch: Path | None,
    left_out: list[str],
    say: Say,
) -> list[dict[str, Any]]:
    """Time of a batch as it, the steps or the tokens grow, each with the fitted exponent."""
    own, batch = model.config.integration.steps, min(8, len(pixels))
    full, spare = model.depth(adaptive=False), model.slots(max(plan.batches))
    calls: dict[str, dict[float, Callable[[], Any]]] = {"batch": {}, "steps": {}, "tokens": {}}
    for size in np.unique(np.geomspace(1, max(plan.batches), plan.grown).round().astype(int)).tolist():
        some = pixels[np.arange(size) % len(pixels)]
        calls["batch"][size] = lambda some=some: sweep(spare, full, some)  # type: ignore[misc]
    for steps in np.unique(np.geomspace(max(1, own / 4), 2 * own, plan.grown).round().astype(int)).tolist():
        depth = model.depth(adaptive=False, steps=steps)
        calls["steps"][steps] = lambda depth=depth: sweep(spare, depth, pixels[:batch])  # type: ignore[misc]
    if scratch is not None:
        with contextlib.suppress(ImportError):
            from . import torch_rows as benchmark_torch

            say("models of other picture sizes, for the curve over tokens")
            grown = benchmark_torch.grown(model.config, plan.grown, threads, scratch)
            for tokens, other in grown.items():
                noise = some_pixels(other.config, batch, None, other.prepare)
                slots, deep = other.slots(batch), other.depth(adaptive=False)
                calls["tokens"][tokens] = lambda s=slots, d=deep, n=noise: sweep(s, d, n)  # type: ignore[misc]
    flat = {f"{kind} {size}": call for kind, sizes in calls.items() for size, call in sizes.items()}
    found = interleave(flat, plan.rounds, lambda text: None)
    answer = []
    for kind, sizes in calls.items():
        if len(sizes) < 2:
            left_out.append(f"Cost over {kind}: fewer than two sizes were available.")
            continue
        times = [statistics.median(seconds for seconds, _ in found[f"{kind} {size}"]) for size in sizes]
        each = [(size if kind == "batch" else batch) / seconds for size, seconds in zip(sizes, times)]
        answer.append(
            {
                "over": kind,
                "sizes": list(sizes),
                "batch_ms": [1000 * seconds for seconds in times],
                "images_per_second": each,
                "exponent": fit_exponent(list(sizes), times),
            }
        )
    return answer


def _add_costs(rows: list[dict[str, Any]], systems: list[System], config: Config, threads: int, loads: int) -> None:
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for system in systems:
        facts: dict[str, Any] = {"load_seconds": None, "peak_megabytes": None, "file_bytes": None}
        if system.files:
            facts["file_bytes"] = sum(path.stat().st_size for path in system.files)
        if system.cost:
            shape = config.preprocessing.input_size
            runs = [
                fresh(threads, **system.cost, batch=max(r["batch"] for r in rows), shape=shape) for _ in range(loads)
            ]
            facts |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        known[system.name, system.where] = facts
    for entry in rows:
        entry |= known[entry["system"], entry["where"]]


def _add_accuracy(
    result: dict[str, Any], systems: list[System], model: Any, images: Images, plan: BenchmarkPlan
) -> None:
    labels = match_labels(images, model.config)
    count = min(plan.judged, len(images))
    if labels is None:
        result["accuracy_of"] = "the pictures have no labels that the model knows"
        return
    pixels = some_pixels(model.config, count, images, model.prepare)
    given: dict[tuple[str, str], Array | None] = {}
    for system in systems:
        trained = not system.cost.get("random")
        answers = system.run(pixels, max(plan.batches)).answers if trained and system.only is None else None
        given[system.name, system.where] = answers
    full = next((answers for (name, _), answers in given.items() if name == FULL), None)
    for entry in result["rows"]:
        answers = given[entry["system"], entry["where"]]
        entry["accuracy"] = None if answers is None else float((answers == labels[:count]).mean())
        entry["agreement"] = None if answers is None or full is None else float((answers == full).mean())
    result["accuracy_of"] = f"{count} images"


def machine() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    memory = None
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    load_average = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else math.nan
    return {"processor": name, "cores": os.cpu_count(), "memory_gib": memory, "system": platform.system(),
            "load_average": load_average}  # fmt: skip


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
