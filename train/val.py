"""`odevit-serve val`: what a bundle's weights are worth on held-out images, by steps and by horizon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..data import held_out, open_splits
from ..errors import UsageError
from .data import Pictures, Unreadable, loader
from .loop import Say
from .model import ODEViT
from .recipe import Teaching
from .run import _judge, sample
from .teacher import choose_classes, load_teacher


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
    limit: int = 0,
    batch_size: int = 64,
    say: Say = print,
) -> list[dict[str, Any]]:
    """One row for each pair of steps and horizon, all on the same images."""
    student = ODEViT.from_pretrained(source)
    config = student.config
    own, shape = config.integration, config.architecture
    splits = open_splits(data)
    if split and split not in splits:
        raise UsageError(f"{data} has no split {split!r}, only {', '.join(splits)}")
    images = splits[split] if split else held_out(splits)
    if images.labels is None and not (teacher or teacher_weights):
        raise UsageError(f"{data} has no labels: name a teacher to measure agreement with")
    if images.classes and len(images.classes) != shape.classes:
        raise UsageError(f"the data has {len(images.classes)} classes, the model {shape.classes}")
    if limit and limit < len(images):
        images = sample(images, limit, 0)
    expert = None
    if teacher or teacher_weights:
        expert = load_teacher(Teaching(source=teacher, weights=teacher_weights), shape).eval()
        head: Any = expert.vit.head
        if config.labels and getattr(head, "out_features", 0) != shape.classes:
            choose_classes(expert, config.labels)
    counts = list(steps) or sorted({max(1, own.steps // 2), own.steps, own.steps * 3 // 2, own.steps * 2})
    grid = [(n, t) for t in (list(horizons) or [own.horizon]) for n in counts]
    sums = torch.zeros(len(grid), 6, dtype=torch.double)
    right = 0
    unreadable = Unreadable(len(images), say)
    pictures = Pictures(images, config.preprocessing)
    for batch in _progress(loader(pictures, batch_size), say):
        unreadable.add(batch.unreadable)
        expected = expert(batch.pixel_values) if expert else None
        if expected is not None:
            right += int((expected.argmax(-1) == batch.labels).sum())
        for place, (n, horizon) in enumerate(grid):
            logits = student(batch.pixel_values, steps=n, horizon=horizon, solver=solver, splitting=splitting)
            sums[place] += _judge(logits, batch.labels, logits if expected is None else expected).double().sum(0)
    rows = []
    for (n, horizon), total in zip(grid, (sums / len(images)).tolist()):
        row: dict[str, Any] = {"steps": n, "horizon": horizon, "solver": solver or own.solver, "images": len(images)}
        if images.labels is not None:
            row |= {"accuracy": total[0], "accuracy@3": total[1], "accuracy@5": total[2], "loss": total[3]}
        if expert:
            row["agreement"] = total[4]
            if images.labels is not None:
                row["teacher_accuracy"] = right / len(images)
        rows.append(row)
    return rows


def _progress(data: Any, say: Say) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(data, "validating", console=Console(stderr=True), transient=True)


HEADINGS = {
    "accuracy": "top-1",
    "accuracy@3": "top-3",
    "accuracy@5": "top-5",
    "agreement": "agrees",
    "teacher_accuracy": "teacher",
}


def table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in rows[0]:
        shown.add_column(HEADINGS.get(name, name), justify="left" if name == "solver" else "right")
    for row in rows:
        shown.add_row(
            *[f"{v:.2%}" if k in HEADINGS else f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()]
        )
    Console().print(shown)
