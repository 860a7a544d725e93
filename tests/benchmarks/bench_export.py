"""Ratios that exports are held to, each taken in one run: `python tests/benchmarks/bench_export.py [--json] [--check]`.

A model of the shape of the preset `tiny` with random weights: speed does not depend on what was learned. Exits at
different depths come from a travel table fitted to the model itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from odevit_serve.bundle import Config, ExitPolicy, Integration
from odevit_serve.export import checks, precision
from odevit_serve.export.formats.adaptive import adaptive
from odevit_serve.export.formats.unrolled import unrolled
from odevit_serve.export.graph import Folded
from odevit_serve.export.pieces import Pieces
from odevit_serve.train.model import ODEViT
from odevit_serve.train.presets import PRESETS

STEPS, BATCH = 24, 32
MOST = {
    "export of 24 unrolled steps, seconds": 60.0,
    "file of 24 steps / file of 1 step": 1.05,
    "adaptive time / (mean steps / N * unrolled time)": 1.15,
}
LEAST = {"loading: unrolled / adaptive": 4.0, "int8 / fp32 throughput of the step at batch 1": 1.4}


def model() -> ODEViT:
    torch.manual_seed(0)
    config = PRESETS["tiny"].replace(integration=Integration(12.0, STEPS))
    made = ODEViT(config).eval()
    with torch.no_grad():
        made.head.weight.normal_()
    return made


def images(config: Config, count: int) -> np.ndarray[Any, Any]:
    """Pictures of different contrast: those with little of it stay near the boundary for longer."""
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(count, *config.preprocessing.input_size))
    return (pixels * rng.uniform(0.2, 2.0, size=(count, 1, 1, 1))).astype(np.float32)


@torch.no_grad()
def fitted(made: ODEViT, pixels: np.ndarray[Any, Any]) -> Config:
    """A policy by which these images exit at different depths, half of them in the first half of the steps."""
    x = made.stem(torch.from_numpy(pixels))
    states = [x[:, 0], *(point.state[:, 0] for point in made.trajectory(x))]
    travel = torch.stack([(states[-1] - s).norm(dim=-1).mean() for s in states]).tolist()
    half = checks.margins(made.head(states[STEPS // 2]).numpy(), made.head.weight.numpy())
    return made.config.replace(
        exit=ExitPolicy(threshold=float(np.median(half)) / travel[STEPS // 2], travel=tuple(travel))
    )


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def fastest(*runs: Callable[[], object], repeats: int = 15) -> list[float]:
    """Best time of each, taken in turns so that a busy moment hits all alike."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - began)
    return best


def vnni() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and any(flag in info.read_text() for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))


def measure() -> dict[str, float]:
    made = model()
    pixels = images(made.config, BATCH)
    config = fitted(made, pixels)
    pieces = Pieces(Folded(made))
    began = time.perf_counter()
    whole = unrolled(pieces)
    export_seconds = time.perf_counter() - began
    single = unrolled(Pieces(Folded(made, Integration(12.0, 1))))
    loop = adaptive(pieces, config)
    load_whole, load_loop = fastest(partial(session, whole), partial(session, loop), repeats=7)

    fixed, free, feed = session(whole), session(loop), {"pixel_values": pixels}
    depths = free.run(["steps"], feed)[0]
    time_fixed, time_free = fastest(partial(fixed.run, None, feed), partial(free.run, None, feed), repeats=9)
    return {
        "export of 24 unrolled steps, seconds": export_seconds,
        "file of 24 steps / file of 1 step": whole.ByteSize() / single.ByteSize(),
        "loading: unrolled / adaptive": load_whole / load_loop,
        "mean steps": float(depths.mean()),
        "shallowest": float(depths.min()),
        "deepest": float(depths.max()),
        "adaptive time / (mean steps / N * unrolled time)": time_free / (depths.mean() / STEPS * time_fixed),
        "int8 / fp32 throughput of the step at batch 1": int8_gain(made, pixels),
        "CPU has VNNI": float(vnni()),
    }


def int8_gain(made: ODEViT, pixels: np.ndarray[Any, Any]) -> float:
    folded = Folded(made, quantisable=True)
    seen = precision.ranges(folded, pixels)
    full = session(Pieces(Folded(made)).step())
    small = session(Pieces(folded, partial(precision.quantise, seen=seen)).step())
    state = folded.begin(torch.from_numpy(pixels[:1])).detach().numpy()
    feed = {"state": state, "step_size": np.full(1, 0.5, np.float32)}
    times = fastest(partial(full.run, None, feed), partial(small.run, None, feed), repeats=200)
    return times[0] / times[1]


def missed(figures: dict[str, float]) -> list[str]:
    """The limits that were not kept; that of int8 holds for CPUs with VNNI."""
    above = [f"{name}: {figures[name]:.3f}, allowed {limit}" for name, limit in MOST.items() if figures[name] > limit]
    least = LEAST if figures["CPU has VNNI"] else {k: v for k, v in LEAST.items() if not k.startswith("int8")}
    below = [f"{name}: {figures[name]:.3f}, at least {limit}" for name, limit in least.items() if figures[name] < limit]
    return above + below


if __name__ == "__main__":
    figures = measure()
    if "--json" in sys.argv:
        print(json.dumps(figures, indent=2))
    else:
        print("\n".join(f"{name:<52} {value:8.3f}" for name, value in figures.items()))
    if "--check" in sys.argv:
        sys.exit("\n".join(missed(figures)) or 0)
