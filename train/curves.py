"""Pictures of a model's life: how its training went, and what each step is worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import Integration
from ..files import atomic


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
    with atomic(target) as scratch:
        figure.savefig(scratch, dpi=120, format="png")


def draw_depth(walked: Sequence[float], rows: list[dict[str, Any]], own: Integration, target: Path) -> None:
    """Accuracy after each step of the same size, with the horizon cut into other numbers of steps beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(walked) + 1), [100 * a for a in walked], "o-", markersize=4, label="after this many steps")
    plain = [r for r in rows if r["solver"] == own.solver and r.get("pictures", "as they are") == "as they are"]
    cut = [r for r in plain if r["depth"] == "fixed" and r["horizon"] == own.horizon]
    low = 100 * min(walked) - 5  # steps too large for the model may end far below: they are named at the edge
    axes.plot([r["steps"] for r in cut], [max(low, 100 * r["accuracy"]) for r in cut], "s", markersize=7,
              fillstyle="none", clip_on=False, label="the horizon in this many steps")  # fmt: skip
    for row in cut:
        if 100 * row["accuracy"] < low:
            axes.annotate(f"{row['accuracy']:.0%}", (row["steps"], low), xytext=(8, 5), textcoords="offset points")
    for row in plain:
        if row["depth"] != "fixed":
            axes.plot(row["steps"], 100 * row["accuracy"], "*", markersize=13, label="early exit, at its mean")
    if "teacher_accuracy" in rows[0]:
        axes.axhline(100 * rows[0]["teacher_accuracy"], color="grey", linewidth=1, label="teacher")
    axes.axvline(own.steps, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel=f"steps ({own.steps} reach the horizon of {own.horizon:g})", ylabel="accuracy, %")
    axes.set_ylim(bottom=low)
    axes.legend(frameon=False, fontsize=8, loc="lower center")
    axes.grid(alpha=0.2)
    with atomic(target) as scratch:
        figure.savefig(scratch, dpi=120, format="png")
