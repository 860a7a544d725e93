"""A picture of how a run went."""

from __future__ import annotations

import json
from pathlib import Path

from .. import bundle


def draw_curves(metrics: Path, target: Path) -> None:
    """Losses with the bound, and validation figures, by epoch."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "epoch" in row]
    if not rows:
        return
    epochs = [row["epoch"] for row in rows]
    parts = ("accuracy", "accuracy@3", "accuracy@5", "agreement", "certainty")
    measured = [k for k in rows[-1] if k in parts]
    losses = [k for k in rows[-1] if k not in {*parts, "step", "epoch", "lr", "seconds", "bound"}]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in losses:
        left.plot(epochs, [row[name] for row in rows], marker=".", label=name.replace("_", " "))
    if "bound" in rows[-1]:
        left.plot(epochs, [row["bound"] for row in rows], "k--", label="bound (eq. 11)")
    left.set(xlabel="epoch", ylabel="loss", yscale="log")
    for name in measured:
        right.plot(epochs, [row[name] for row in rows], marker=".", label=name)
    right.set(xlabel="epoch", ylabel="validation", ylim=(0, 1))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.2)
    with bundle.atomic(target) as scratch:
        figure.savefig(scratch, dpi=120, format="png")
