"""What a half-empty batch costs, and whether waiting to admit several images at once pays.

    python tests/benchmarks/bench_admission.py [BUNDLE] --pictures FOLDER [--slots 16] [--threads 1] [--output FILE]

First the time of the stem and of a step, an image, by the number of images in them. Then the slots with more images
waiting than they hold, for several policies: images are admitted when so many slots are free (1: at once). The images
and their order are the same. Times are the best of interleaved repetitions, images/s are medians of rounds in which the
policies follow each other. The defaults are what one thread of `odevit-serve serve` has on two cores.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_runtime import best

from odevit_serve.benchmark.pictures import real_pictures
from odevit_serve.data import images
from odevit_serve.runtime.model import BundleModel, load_bundle
from odevit_serve.runtime.options import RequestOptions
from odevit_serve.runtime.slots import Job, Slots


def costs(model: BundleModel, pixels: np.ndarray, slots: int) -> dict[int, dict[str, float]]:
    """Milliseconds an image of the stem and of one step, by rows."""
    sizes = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= slots]
    depth = model.graphs.depth(RequestOptions(adaptive=False))
    found: dict[int, dict[str, float]] = {rows: {} for rows in sizes}
    for part in ("stem", "step"):
        calls: dict[str, Callable[[], object]] = {}
        for rows in sizes:
            core = Slots(model.graphs, slots)
            core.admit(pixels[:rows], [Job(None, depth)] * rows)
            stem = functools.partial(core._run_stem, pixels[:rows], core._states[0][:rows])
            calls[str(rows)] = stem if part == "stem" else functools.partial(core._run_step, rows)
        for rows, seconds in best(calls, seconds=10.0).items():
            found[int(rows)][part] = 1000 * seconds / int(rows)
    return found


def saturated(model: BundleModel, pixels: np.ndarray, slots: int, wait: int, seconds: float) -> dict[str, float]:
    """Images/s when images are admitted as soon as `wait` slots are free, and always enough of them wait."""
    core, depth = Slots(model.graphs, slots), model.graphs.depth(RequestOptions())
    order, done, turns, rows = itertools.cycle(range(len(pixels))), 0, 0, 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        if core.free >= wait:
            chosen = [next(order) for _ in range(core.free)]
            core.admit(pixels[chosen], [Job(None, depth)] * len(chosen))
        turns, rows = turns + 1, rows + core.active
        done += len(core.step())
    return {"images_per_second": done / (time.perf_counter() - began), "rows": rows / turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", default=None)
    parser.add_argument("--pictures", required=True)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    model = load_bundle(asked.bundle, threads=asked.threads)
    preprocessing = model.config.preprocessing
    pixels = np.stack(
        [images.prepare(images.open_picture(one), preprocessing) for one in real_pictures(asked.pictures, 200)]
    )
    result: dict[str, Any] = {"model": model.config.name, "slots": asked.slots, "threads": asked.threads}
    result["milliseconds_an_image"] = by_rows = costs(model, pixels, asked.slots)
    for rows, times in by_rows.items():
        print(f"{rows:3} rows: stem {times['stem']:.3f}, step {times['step']:.3f} ms an image")
    waits = sorted({1, max(1, asked.slots // 4), max(1, asked.slots // 2), asked.slots})
    seen: dict[int, list[dict[str, float]]] = {wait: [] for wait in waits}
    for turn in range(asked.rounds + 1):  # the first is not counted
        for wait in waits:
            found = saturated(model, pixels, asked.slots, wait, asked.seconds)
            if turn:
                seen[wait].append(found)
    at_once = seen[1]
    result["policies"] = {}
    for wait, runs in seen.items():
        ratios = [a["images_per_second"] / b["images_per_second"] for a, b in zip(runs, at_once, strict=True)]
        row = {key: statistics.median(run[key] for run in runs) for key in ("images_per_second", "rows")}
        result["policies"][wait] = {**row, "of_at_once": statistics.median(ratios)}
        print(
            f"admitted when {wait:2} are free: {row['images_per_second']:.0f} images/s, "
            f"{statistics.median(ratios):.3f} of at once, {row['rows']:.1f} rows a step"
        )
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
