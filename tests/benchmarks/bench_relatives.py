"""What docs/relatives.md compares: accuracy, evaluations at 1% disagreement, and solvers by number of evaluations.

    python tests/benchmarks/bench_relatives.py DATA BUNDLE ... [--limit 400] [--solvers]

The images are those that the bundles' runs set aside to choose the model by. Evaluations are of psi, for one image; at
1% disagreement they are those of the best exit rule, its threshold from one half of the images, applied to the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from odevit_serve.anderson import EMPTY, anderson
from odevit_serve.data.datasets import Images, pick
from odevit_serve.solvers import SOLVERS
from odevit_serve.train.analysis import collect
from odevit_serve.train.analysis import numbers as sections
from odevit_serve.train.batches import Batch, PictureDataset, loader
from odevit_serve.train.model import ODEViT

EVALUATIONS = (2, 3, 4, 6, 8, 12, 16)


@torch.no_grad()
def exits(model: ODEViT, images: Images, parts: list[Batch]) -> tuple[float, float, float, str]:
    """Accuracy at full depth, mean evaluations at 1% disagreement, the disagreement there, and by which rule."""
    study = collect.Study(model, images, None, None, Path(), "")
    found = [collect.look_trajectory(study, part) for part in parts]
    arrays = {key: np.concatenate([part[key] for part in found]) for key in found[0]}
    labels = np.concatenate([part.labels.numpy() for part in parts])
    recordings = sections.record(arrays, labels, model.head.weight.numpy(), model.config.integration)
    rows = {name: sections.at_levels(recording)["1%"] for name, recording in recordings.items()}
    best = min(rows, key=lambda name: rows[name]["mean_steps"])
    right = float((arrays["logits"][:, -1].argmax(-1) == labels).mean())
    return right, rows[best]["mean_steps"], rows[best]["differs"], best


@torch.no_grad()
def solvers(model: ODEViT, parts: list[Batch]) -> None:
    """Accuracy, and agreement with the bundle's own answer, after so many evaluations of psi."""
    own = model.config.integration
    wanted = torch.cat([model(part.pixel_values).argmax(-1) for part in parts])
    labels = torch.cat([part.labels for part in parts])

    def accelerated(depth: int) -> Callable[[Tensor, int], Tensor]:
        def answer(pixels: Tensor, evaluations: int) -> Tensor:
            x, window = model.stem(pixels), EMPTY
            for _ in range(evaluations):
                x, _, window = anderson(model.psi, x, own.step_size, window, depth)
            return model.answer(x)

        return answer

    def integrated(solver: str) -> Callable[[Tensor, int], Tensor]:
        def answer(pixels: Tensor, evaluations: int) -> Tensor:
            return model(pixels, steps=evaluations // SOLVERS[solver].evaluations, solver=solver)  # type: ignore[no-any-return]

        return answer

    ways = {name: integrated(name) for name in SOLVERS}
    ways |= {f"anderson {depth}": accelerated(depth) for depth in (0, 1, 3, 5)}
    print("accuracy / agreement with the bundle's own steps, % by evaluations of psi")
    print(f"{'':12}" + "".join(f"{n:>14}" for n in EVALUATIONS))
    for name, way in ways.items():
        each = SOLVERS[name].evaluations if name in SOLVERS else 1
        cells = []
        for count in EVALUATIONS:
            if count % each or count < each:
                cells.append("-")
                continue
            answers = torch.cat([way(part.pixel_values, count).argmax(-1) for part in parts])
            right, same = (100 * (answers == other).float().mean() for other in (labels, wanted))
            cells.append(f"{right:.1f} / {same:.1f}")
        print(f"{name:12}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--solvers", action="store_true")
    arguments = parser.parse_args()
    for source in arguments.bundles:
        model = ODEViT.from_pretrained(source).requires_grad_(False)
        images = pick(arguments.data, "validation", model.config.division).sample(arguments.limit, 0)
        parts = list(loader(PictureDataset(images, model.config.preprocessing), 50, workers=0))
        right, evaluations, differs, rule = exits(model, images, parts)
        print(
            f"{source}: accuracy {right:.1%}, {evaluations:.2f} evaluations at 1% ({differs:.1%} differ, {rule})",
            flush=True,
        )
        if arguments.solvers:
            solvers(model, parts)


if __name__ == "__main__":
    main()
