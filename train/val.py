"""`odevit-serve val`: what a bundle's weights are worth on held-out images, by steps and by horizon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from .. import bundle, exits
from ..bundle import SOLVERS, Config
from ..data import Images, pick
from ..errors import UsageError
from ..model import Prediction, load
from .data import Batch, Pictures, Unreadable, loader
from .loop import Say
from .model import ODEViT
from .recipe import Teaching
from .run import _judge, sample
from .teacher import choose_classes, load_teacher


def _noise(strength: float, batch: Batch, config: Config) -> Tensor:
    """Gaussian noise of so many parts of the grey scale, the same for the same images."""
    generator = torch.Generator().manual_seed(int(batch.rows[0]))
    scale = torch.tensor(config.preprocessing.std).view(-1, 1, 1)
    return batch.pixel_values + strength / scale * torch.randn(batch.pixel_values.shape, generator=generator)


def _blur(strength: float, batch: Batch, config: Config) -> Tensor:
    """Gaussian blur; its width is a part of the picture's."""
    sigma = strength * config.architecture.image_size
    return gaussian_blur(batch.pixel_values, [2 * math.ceil(3 * sigma) + 1] * 2, [sigma, sigma])


SPOILT: dict[str, Callable[[Batch, Config], Tensor]] = {
    "noise 0.05": partial(_noise, 0.05),
    "noise 0.10": partial(_noise, 0.10),
    "blur 1/64": partial(_blur, 1 / 64),
    "blur 1/32": partial(_blur, 1 / 32),
}


@torch.no_grad()
def validate(
    source: str | None,
    data: str,
    split: str | None = None,
    steps: Sequence[int] = (),
    horizons: Sequence[float] = (),
    solver: str | None = None,
    splitting: str | None = None,
    teacher: str = "",
    teacher_weights: str = "",
    robustness: bool = False,
    limit: int = 0,
    batch_size: int = 64,
    say: Say = print,
) -> list[dict[str, Any]]:
    """One row for each pair of steps and horizon, all on the same images.

    With `robustness` come rows at the first of those steps for every solver and for each of `SPOILT`. Where nothing
    is asked but the bundle's own way, and it is calibrated, the last row is that of early exit in the runtime.
    """
    student = ODEViT.from_pretrained(source)
    config = student.config
    own, shape = config.integration, config.architecture
    images = _images(config, data, split, limit)
    if images.labels is None and not (teacher or teacher_weights):
        raise UsageError(f"{data} has no labels: name a teacher to measure agreement with")
    expert = None
    if teacher or teacher_weights:
        expert = load_teacher(Teaching(source=teacher, weights=teacher_weights), shape).eval()
        head: Any = expert.vit.head
        if config.labels and getattr(head, "out_features", 0) != shape.classes:
            choose_classes(expert, config.labels)
    counts = list(steps) or sorted({max(1, own.steps // 2), own.steps, own.steps * 3 // 2, own.steps * 2})
    used = solver or own.solver
    grid: list[tuple[float, float, str, str]] = []
    grid += [(n, t, used, "as they are") for t in (list(horizons) or [own.horizon]) for n in counts]
    if robustness:
        count, time = (steps[0] if steps else own.steps), (horizons[0] if horizons else own.horizon)
        grid += [(count, time, other, "as they are") for other in SOLVERS if other != used]
        grid += [(count, time, used, pictures) for pictures in SPOILT]
    sums = torch.zeros(len(grid), 6, dtype=torch.double)
    right, answers = 0, list[Tensor]()  # of the teacher
    unreadable = Unreadable(len(images), say)
    pictures = Pictures(images, config.preprocessing)
    for batch in _progress(loader(pictures, batch_size), say):
        unreadable.add(batch.unreadable)
        expected = expert(batch.pixel_values) if expert else None
        if expected is not None:
            right += int((expected.argmax(-1) == batch.labels).sum())
            answers.append(expected)
        for place, (n, horizon, scheme, worse) in enumerate(grid):
            pixels = SPOILT[worse](batch, config) if worse in SPOILT else batch.pixel_values
            logits = student(pixels, steps=n, horizon=horizon, solver=scheme, splitting=splitting)
            sums[place] += _judge(logits, batch.labels, logits if expected is None else expected).double().sum(0)
    means = (sums / len(images)).tolist()
    folder = bundle.find(source)
    asked = steps or horizons or solver or splitting
    if not asked and exits.calibrated(config) and (folder / bundle.STEP).is_file():
        mean_steps, judged = _early(folder, images, torch.cat(answers) if expert else None)
        grid.append((mean_steps, own.horizon, own.solver, "as they are"))
        means.append(judged)
    rows = []
    for (n, horizon, scheme, worse), total in zip(grid, means):
        row: dict[str, Any] = {"depth": "fixed" if isinstance(n, int) else "early exit", "steps": n}
        row |= {"horizon": horizon, "solver": scheme, "images": len(images)}
        if robustness:
            row["pictures"] = worse
        if images.labels is not None:
            row |= {"accuracy": total[0], "accuracy@3": total[1], "accuracy@5": total[2], "loss": total[3]}
        if expert:
            row["agreement"] = total[4]
            if images.labels is not None:
                row["teacher_accuracy"] = right / len(images)
        rows.append(row)
    return rows


def _images(config: Config, data: str, split: str | None, limit: int) -> Images:
    images = pick(data, split, config.provenance)
    if images.classes and len(images.classes) != config.architecture.classes:
        raise UsageError(f"the data has {len(images.classes)} classes, the model {config.architecture.classes}")
    return sample(images, limit, 0) if limit and limit < len(images) else images


@torch.no_grad()
def by_step(
    source: str | None, data: str, split: str | None = None, limit: int = 0, batch_size: int = 64, say: Say = print
) -> list[float]:
    """Accuracy after step 1, 2, ... of the bundle's own size, and on past the horizon to twice the steps."""
    student = ODEViT.from_pretrained(source)
    own = student.config.integration
    images = _images(student.config, data, split, limit)
    if images.labels is None:
        raise UsageError(f"{data} has no labels to draw the curve by")
    right = torch.zeros(2 * own.steps, dtype=torch.double)
    for batch in _progress(loader(Pictures(images, student.config.preprocessing), batch_size), say):
        for point in student.trajectory(student.stem(batch.pixel_values), len(right), 2 * own.horizon):
            right[point.step - 1] += (student.answer(point.state).argmax(-1) == batch.labels).sum()
    return (right / len(images)).tolist()


def _early(folder: Path, images: Images, expected: Tensor | None) -> tuple[float, list[float]]:
    """Mean steps and judgement of the images that the runtime can read, stopping by the bundle's own rule."""
    kept, steps, logits = list[int](), list[int](), list[Tensor]()

    def picture(place: int) -> Any:
        try:
            return images.read(place)
        except Exception:  # decoders fail in every way there is
            return b""  # which the runtime cannot read either

    for place, answer in enumerate(load(folder).stream(map(picture, range(len(images))))):
        if isinstance(answer, Prediction):
            kept.append(place)
            steps.append(answer.steps)
            logits.append(torch.from_numpy(answer.probabilities).log())
    found = torch.stack(logits)
    labels = torch.full((len(kept),), -1) if images.labels is None else torch.as_tensor(images.labels)[kept]
    judged = _judge(found, labels, found if expected is None else expected[kept])
    return float(np.mean(steps)), judged.double().mean(0).tolist()


def _progress(data: Any, say: Say) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(data, "validating", console=Console(stderr=True), transient=True)


HEADINGS = {
    "accuracy": "top-1",
    "accuracy@3": "top-3",
    "accuracy@5": "top-5",
    "agreement": "agrees",
}
SAME = ("images", "teacher_accuracy")  # in every row: said once, below the table


def table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in [name for name in rows[0] if name not in SAME]:
        words = name in ("depth", "solver", "pictures")
        shown.add_column(HEADINGS.get(name, name), justify="left" if words else "right")
    for row in rows:
        shown.add_row(
            *[
                f"{v:.2%}" if k in HEADINGS else f"{v:.4g}" if isinstance(v, float) else str(v)
                for k, v in row.items()
                if k not in SAME
            ]
        )
    console = Console()
    console.print(shown)
    teacher = f", of which the teacher knows {rows[0]['teacher_accuracy']:.2%}" if "teacher_accuracy" in rows[0] else ""
    console.print(f"{rows[0]['images']:,} images{teacher}")
