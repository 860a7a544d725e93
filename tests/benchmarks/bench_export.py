"""Figures that exports are held to, taken in one run: `python tests/benchmarks/bench_export.py [BUNDLE] [options]`.

`--json` prints them as JSON, `--check` ends with 1 if a limit is missed, and `--against FILE.onnx`, which may be given
several times, compares images/s with those of another file of the same model and steps, unrolled or adaptive, in turns
on the pictures of `--data`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from odevit_serve import bundle
from odevit_serve.config import Config
from odevit_serve.data.division import pick
from odevit_serve.data.images import prepare
from odevit_serve.export import precision
from odevit_serve.export.formats.onnx_adaptive import adaptive_graph
from odevit_serve.runtime.graphs import Parts, step_graph, unrolled_graph
from odevit_serve.runtime.sessions import Graphs

BATCHES, BATCH, REPEATS = (1, 8, 32), 32, 15
MOST = {
    "export --steps 18, seconds from shell to file": 1.5,
    "export --format onnx-adaptive, seconds from shell to file": 2.0,
    "peak memory of an export, MB": 300.0,
    "file of 24 steps / file of 1 step": 1.05,
    "adaptive time / (stem + mean steps x time of a step)": 1.15,
}
# The loop also holds the exponent toward the boundary; 3.5 was found with it.
LEAST = {"loading: 24 steps / adaptive": 3.0, "int8 / fp32 throughput of the step at batch 1": 1.4}


def images(config: Config, count: int) -> np.ndarray[Any, Any]:
    """Pictures of different contrast, which exit at different depths."""
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(count, *config.preprocessing.input_size))
    return (pixels * rng.uniform(0.2, 2.0, size=(count, 1, 1, 1))).astype(np.float32)


def session(source: onnx.ModelProto | str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(source if isinstance(source, str) else source.SerializeToString(), options)


def times(*runs: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Best time of each, taken in turns so that a busy moment hits all alike."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - began)
    return best


def commands(source: str) -> dict[str, float]:
    """The command itself, from shell to file, checks included."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for words in (["--steps", "18"], ["--format", "onnx-adaptive"]):
            command = [sys.executable, "-m", "odevit_serve", "export", source, *words, "--max-drop", "100"]
            command += ["--overwrite", "-o", f"{folder}/m.onnx"]
            run = partial(subprocess.run, command, check=True, capture_output=True)
            figures[f"export {' '.join(words)}, seconds from shell to file"] = times(run, repeats=5)[0]
    figures["peak memory of an export, MB"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return figures


def graphs(folder: Path, config: Config) -> dict[str, float]:
    parts, own = Parts.of(folder, config), config.integration
    whole, single, exact = (
        unrolled_graph(parts, dataclasses.replace(own, steps=steps)) for steps in (24, 1, own.steps)
    )
    loop = adaptive_graph(parts, config)
    load_whole, load_loop = times(partial(session, whole), partial(session, loop), repeats=7)
    feed = {"pixel_values": images(config, BATCH)}
    first, full, free = session(single), session(exact), session(loop)
    depths = free.run(["steps"], feed)[0]
    one, all_steps, adaptive = times(*(partial(each.run, ["logits"], feed) for each in (first, full, free)))
    step = (all_steps - one) / (own.steps - 1)
    return {
        "file of 24 steps / file of 1 step": whole.ByteSize() / single.ByteSize(),
        "loading: 24 steps / adaptive": load_whole / load_loop,
        "mean steps": float(depths.mean()),
        "adaptive time / (stem + mean steps x time of a step)": adaptive / (one + (depths.mean() - 1) * step),
        "int8 / fp32 throughput of the step at batch 1": int8_gain(folder, config),
        "CPU has VNNI": float(vnni()),
    }


def int8_gain(folder: Path, config: Config) -> float:
    own, parts = Graphs(folder, config), Parts.of(folder, config)
    full = session(step_graph(parts, config.integration))
    states = precision.states(own, images(config, BATCH))
    precision.quantise_fields(parts, states)
    small = session(step_graph(parts, config.integration))
    feed = {"state": states[0][:1], "step_size": np.full(1, config.integration.step_size, np.float32)}
    fast = times(*(partial(each.run, ["next_state"], feed) for each in (full, small)), repeats=200)
    return fast[0] / fast[1]


def against(folder: Path, config: Config, other: str, pixels: np.ndarray[Any, Any]) -> dict[str, float]:
    """Images/s of a file over those of another of its kind: the same pictures, in turns, best of five.

    Adaptive files each by its own rule, and both at full depth.
    """
    theirs, figures, parts = session(other), dict[str, float](), Parts.of(folder, config)
    adaptive = "steps" in {output.name for output in theirs.get_outputs()}
    mine = session(adaptive_graph(parts, config) if adaptive else unrolled_graph(parts, config.integration))
    for batch in BATCHES:
        for depth in ("adaptive", "adaptive at full depth") if adaptive else ("unrolled",):
            calls = [
                [partial(file.run, ["logits"], feed) for feed in feeds(file, pixels, batch, "full" in depth)]
                for file in (theirs, mine)
            ]
            found = np.array([times(*pair, repeats=5) for pair in zip(*calls)]).sum(0)
            count = batch * len(calls[0])
            figures[f"{depth}, batch {batch}: images/s"] = count / found[1]
            figures[f"{depth}, batch {batch}: images/s / those of the other file"] = found[0] / found[1]
    return figures


def feeds(
    file: onnxruntime.InferenceSession, pixels: np.ndarray[Any, Any], batch: int, full: bool
) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Up to 32 different batches; `full`: with a threshold, whatever the file calls it, that no image reaches."""
    never = {
        given.name: np.array(np.inf, np.float32)
        for given in file.get_overridable_initializers()
        if full and given.type == "tensor(float)"
    }
    starts = range(0, len(pixels) - batch + 1, batch)[:32]
    return [{"pixel_values": pixels[start : start + batch], **never} for start in starts]


def pictures(config: Config, data: str | None, count: int) -> np.ndarray[Any, Any]:
    """Real ones where there are some: how deep noise goes says nothing about pictures."""
    if data is None:
        return images(config, count)
    found = pick(data)
    chosen = np.random.default_rng(0).permutation(len(found))[:count]
    return np.stack([prepare(found.read(int(i)), config.preprocessing) for i in chosen])


def vnni() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and any(flag in info.read_text() for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))


def missed(figures: dict[str, float]) -> list[str]:
    """The limits that were not kept; that of int8 holds for CPUs with VNNI."""
    above = [f"{name}: {figures[name]:.3f}, allowed {limit}" for name, limit in MOST.items() if figures[name] > limit]
    least = LEAST if figures["CPU has VNNI"] else {k: v for k, v in LEAST.items() if not k.startswith("int8")}
    below = [f"{name}: {figures[name]:.3f}, at least {limit}" for name, limit in least.items() if figures[name] < limit]
    return above + below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", default="cifar10")
    parser.add_argument("--against", metavar="FILE.onnx", action="append", default=[])
    parser.add_argument("--data", help="folder, zip or .npz of pictures for --against; without it, noise")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    folder = bundle.find(asked.source)
    config = bundle.read_config(folder)
    figures = commands(asked.source) | graphs(folder, config)
    for other in asked.against:
        figures |= against(folder, config, other, pictures(config, asked.data, 256))
    if asked.json:
        print(json.dumps(figures, indent=2))
    else:
        print("\n".join(f"{name:<62} {value:10.3f}" for name, value in figures.items()))
    if asked.check:
        sys.exit("\n".join(missed(figures)) or 0)


if __name__ == "__main__":
    main()
