"""Memory, time and error of one training batch's gradient against depth, for every gradient method.

    python tests/benchmarks/bench_gradients.py [--steps 24 96] [--batch 16] [--repeats 3] [--data DATA] [--output FILE]

Memory is the peak of what torch holds in tensors during forward and backward, beyond weights and pixels, as its
allocator reports it; it does not depend on what else runs on the machine. Time does: it is the median of repetitions
that take turns. The cosine is that between the gradient of psi's parameters and backprop's. The model is the bundled
`cifar10`, the losses those on its answers, the images random unless there is data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from odevit_serve.data.division import pick
from odevit_serve.train.batches import PictureDataset, loader
from odevit_serve.train.gradients import GRADIENTS
from odevit_serve.train.model import ODEViT
from odevit_serve.train.objective import Distillation
from odevit_serve.train.recipe import Training

VARIANTS = {name: Training(gradient=name) for name in GRADIENTS}
VARIANTS["adjoint, kept"] = Training(gradient="adjoint", gradient_steps=1)  # the state after every step


def objective(settings: Training, intermediate: float) -> Distillation:
    weights = {"cross_entropy": 1.0, "intermediate": intermediate}
    return Distillation(ODEViT.from_pretrained("cifar10"), settings, weights)


def run(which: Distillation, batch: tuple[torch.Tensor, torch.Tensor], steps: int) -> float:
    """Seconds of one forward and backward pass."""
    which.zero_grad(set_to_none=True)
    begun = time.perf_counter()
    terms = which(*batch, None, {}, steps, which.student.config.integration.horizon)
    sum(terms.values()).backward()  # type: ignore[union-attr]
    return time.perf_counter() - begun


def peak(which: Distillation, batch: tuple[torch.Tensor, torch.Tensor], steps: int) -> int:
    """Bytes held at the worst moment, by adding up what is allocated and freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(which, batch, steps)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def direction(which: Distillation) -> torch.Tensor:
    """The last gradient of psi, as one vector of length 1."""
    parts = [p.grad.flatten() for p in which.student.psi.parameters() if p.grad is not None]
    return torch.nn.functional.normalize(torch.cat(parts), dim=0)


def pictures(data: str | None, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    if data is None:
        return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))
    seen = PictureDataset(pick(data).sample(size, 0), ODEViT.from_pretrained("cifar10").config.preprocessing)
    batch = next(iter(loader(seen, size, workers=0)))
    return batch.pixel_values, batch.labels


def measure(
    steps: list[int], batch: tuple[torch.Tensor, torch.Tensor], repeats: int, memory: bool, intermediate: float
) -> list[dict[str, Any]]:
    objectives, rows = {name: objective(settings, intermediate) for name, settings in VARIANTS.items()}, []
    for depth in steps:
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for repeat in range(repeats + 1):
            for name, which in objectives.items():
                took = run(which, batch, depth)
                if repeat or not repeats:
                    seconds[name].append(took)
        exact = direction(objectives["backprop"])
        for name, which in objectives.items():
            row = {"gradient": name, "steps": depth, "cosine": float(direction(which) @ exact)}
            row |= {"seconds": statistics.median(seconds[name])}
            rows.append({**row, "mb": peak(which, batch, depth) / 2**20 if memory else float("nan")})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", nargs="+", type=int, default=[24, 96])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", help="images of the bundled cifar10's kind")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the peak of memory, which takes one more run"
    )
    parser.add_argument("--intermediate", type=float, default=0.5, help="weight of the answers on the way")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    batch = pictures(arguments.data, arguments.batch)
    rows = measure(arguments.steps, batch, arguments.repeats, not arguments.no_memory, arguments.intermediate)
    first = {row["steps"]: row for row in rows if row["gradient"] == "backprop"}
    print(
        f"{'gradient':14} {'steps':>5} {'peak MB':>9} {'of backprop':>11} {'seconds':>8} {'of backprop':>11} "
        f"{'cosine':>7}"
    )
    for row in rows:
        base = first[row["steps"]]
        print(
            f"{row['gradient']:14} {row['steps']:5} {row['mb']:9.1f} {row['mb'] / base['mb']:11.3f} "
            f"{row['seconds']:8.2f} {row['seconds'] / base['seconds']:11.2f} {row['cosine']:7.3f}"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
