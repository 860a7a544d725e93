"""What training costs, as ratios in one run: psi against a ViT block, and gradient checkpointing.

    python tests/benchmarks/bench_train.py [--output FILE]

Prints a table; every ratio comes from interleaved repetitions on the same machine and threads.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timm.models.vision_transformer import Block

from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.train.model import ODEViT, Psi
from odevit_serve.train.objective import Distillation
from odevit_serve.train.recipe import Training


def once(module: torch.nn.Module, x: torch.Tensor) -> float:
    begun = time.perf_counter()
    module(x).sum().backward()
    return time.perf_counter() - begun


def psi_against_block(width: int = 192, heads: int = 3, ratio: float = 4.0, repeats: int = 15) -> dict[str, float]:
    shape = Architecture(32, 4, width, heads, ratio)
    psi, block = Psi(shape), Block(width, heads, ratio, qkv_bias=True)
    x = torch.randn(64, shape.tokens, width, requires_grad=True)
    times: dict[str, list[float]] = {"psi": [], "block": []}
    for repeat in range(repeats + 2):
        for name, module in (("psi", psi), ("block", block)):
            seconds = once(module, x)
            if repeat >= 2:
                times[name].append(seconds)
    ratios = [p / b for p, b in zip(times["psi"], times["block"])]
    return {
        "psi_ms": 1000 * statistics.median(times["psi"]),
        "block_ms": 1000 * statistics.median(times["block"]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def one_step(checkpointing: bool, steps: int) -> Callable[[], None]:
    shape = Architecture(32, 4, 192, 3, 4.0)
    student = ODEViT(Config(shape, Integration(12.0, steps), Preprocessing((3, 32, 32))))
    objective = Distillation(
        student, Training(gradient="checkpoint" if checkpointing else "backprop"), {"cross_entropy": 1.0}
    )
    pixels, labels = torch.randn(32, 3, 32, 32), torch.zeros(32, dtype=torch.long)

    def run() -> None:
        objective(pixels, labels, None, {}, steps, 12.0)["cross_entropy"].backward()
        objective.zero_grad()

    return run


def memory_of(checkpointing: bool, steps: int) -> None:
    """Runs in a process of its own: prints what a step adds to the peak, and its time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = one_step(checkpointing, steps)
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    run()
    print(json.dumps({"mb": (peak - before) / 1024, "seconds": time.perf_counter() - begun}))


def checkpointing_saves(steps: int = 24, repeats: int = 3) -> dict[str, float]:
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(repeats):
        for on in (True, False):
            own = [sys.executable, __file__, "--memory", str(int(on)), str(steps)]
            done = subprocess.run(own, capture_output=True, text=True, check=True)
            found[on].append(json.loads(done.stdout))
    peak = {on: statistics.median(r["mb"] for r in rows) for on, rows in found.items()}
    seconds = {on: statistics.median(r["seconds"] for r in rows) for on, rows in found.items()}
    return {
        "peak_mb": peak[False],
        "peak_mb_checkpointed": peak[True],
        "memory_ratio": peak[True] / peak[False],
        "time_ratio": seconds[True] / seconds[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory", nargs=2, type=int)
    arguments = parser.parse_args()
    if arguments.memory:
        memory_of(bool(arguments.memory[0]), arguments.memory[1])
        return
    results = {"psi_against_block": psi_against_block(), "checkpointing_24_steps": checkpointing_saves()}
    goals = {("psi_against_block", "ratio"): 1.1, ("checkpointing_24_steps", "memory_ratio"): 1 / 3}
    goals[("checkpointing_24_steps", "time_ratio")] = 1.5
    for name, rows in results.items():
        for key, value in rows.items():
            goal = goals.get((name, key))
            print(f"{name:24} {key:22} {value:10.3f}" + (f"   goal <= {goal:.2f}" if goal else ""))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
