"""Plots as SVG inside the page: sharp at any size, in its colours, with a text for who cannot see them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ..runtime.dynamics import Floats
from ..runtime.exits import ExitReason
from .trajectory import Inspection

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 30
COLORS = 5  # classes .c0 to .c4 of the style sheet


@dataclass(frozen=True)
class Series:
    name: str
    color: int
    x: Sequence[float]
    y: Floats


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers within the range."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((s * power for s in (1, 2, 5, 10)), key=lambda s: abs(s - raw))
    return [float(f"{n * step:.6g}") for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _figure(title: str, body: str, text: str, legend: Sequence[tuple[str, int]] = (), note: str = "") -> str:
    keys = "".join(f'<span class="key c{color}">{escape(name)}</span>' for name, color in legend)
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="plot"><figcaption>{escape(title)}<span class="legend">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(text)}"><title>{escape(text)}</title>'
        f"{body}</svg>"
        f"{below}</figure>"
    )


def chart(
    title: str,
    series: Sequence[Series],
    steps: int,
    exit_at: int | None = None,
    text: str = "",
    note: str = "",
    y_range: tuple[float, float] | None = None,
    ring: tuple[float, float] | None = None,
) -> str:
    """Lines over the steps, with a dashed line where the image left."""
    values = np.concatenate([s.y for s in series]) if series else np.zeros(0)
    values = values[np.isfinite(values)]
    low, high = y_range or _span(values)
    if high - low < 1e-9:
        high = low + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = x / steps, (y - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in _ticks(low, high):
        _, y = place(0, tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    every = max(1, math.ceil(steps / 12))
    for step in range(0, steps + 1, every):
        x, _ = place(step, low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{step}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 2}" text-anchor="middle">step</text>')
    if exit_at is not None:
        x, _ = place(exit_at, low)
        side, anchor = (-5, "end") if x > middle else (5, "start")
        parts.append(f'<path class="exit" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="exit-name" x="{x + side:.1f}" y="{TOP + 10}" text-anchor="{anchor}">exit</text>')
    for line in series:
        points = [place(x, float(y)) for x, y in zip(line.x, line.y) if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line c{line.color}" points="{path}"/>')
        if steps <= 30:
            parts += [f'<circle class="dot c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points]
    if ring is not None and math.isfinite(ring[1]):
        x, y = place(*ring)
        parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
    return _figure(title, "".join(parts), text or title, [(s.name, s.color) for s in series], note)


def _span(values: Floats) -> tuple[float, float]:
    low, high = (min(0.0, float(values.min())), max(0.0, float(values.max()))) if len(values) else (0.0, 1.0)
    room = 0.06 * (high - low)
    return (low - room if low < 0 else low), (high + room if high > 0 else high)


def trajectory(run: Inspection, head: tuple[Floats, Floats] | None) -> str:
    """All plots of a run."""
    parts = [probabilities(run), decision(run), speed(run), exponent(run), path(run, head)]
    if run.trajectory.energy is not None:
        parts.insert(4, energy(run, run.trajectory.energy))
    return f'<div class="plots {"five" if len(parts) == 5 else "six"}">{"".join(parts)}</div>'


def probabilities(run: Inspection) -> str:
    line = run.trajectory
    steps, values = range(1, line.steps + 1), line.probabilities
    chosen = list(dict.fromkeys([run.index, *np.argsort(-values[-1]), *np.argsort(-values.max(0))]))[
        : min(4, len(run.labels))
    ]
    series = [Series(run.labels[i], place, steps, values[:, i]) for place, i in enumerate(chosen)]
    first, last = values[0, run.index], values[-1, run.index]
    text = f"Probability of {run.label} at each step: {first:.0%} at first, {last:.0%} at the end"
    return chart("Class probabilities", series, line.steps, run.steps, text, y_range=(0.0, 1.0))


def decision(run: Inspection) -> str:
    """The score of the rule against its threshold. Where both are multiples of the travel, as distances of CLS."""
    line, rule, threshold = run.trajectory, run.depth.rule, run.depth.threshold
    steps = range(1, line.steps + 1)
    if not np.isfinite(line.score).any() or not math.isfinite(threshold):
        text = "Distance of CLS to the nearest decision boundary at each step"
        series = [Series("margin", 0, steps, line.margin)]
        return chart("Margin", series, line.steps, run.steps, text, "No rule ends this image early.")
    scale = line.travel if rule.needs_travel else np.ones(line.steps)
    compared, wanted = line.score * scale, np.where(np.isfinite(line.score), threshold * scale, np.nan)
    if rule.needs_travel:
        own = "margin" if rule.name == "travel" else f"what {rule.name} compares"
        title, series = "Margin against travel", [Series(own, 0, steps, compared)]
        series.append(Series(f"{threshold:.3g} × expected travel", 1, steps, wanted))
        if rule.name != "travel":
            series.append(Series("margin", 2, steps, line.margin))
    else:
        title, series = f"Score of {rule.name}", [Series("score", 0, steps, compared)]
        series.append(Series(f"threshold {threshold:.3g}", 1, steps, wanted))
    reached = np.flatnonzero(line.score >= threshold)
    where = f"it is reached at step {reached[0] + 1}" if len(reached) else "it is not reached before the last step"
    text = f"The score of the rule {rule.name} against its threshold: {where}"
    ring = (float(run.steps), float(compared[run.steps - 1])) if run.reason is ExitReason.EARLY else None
    return chart(title, series, line.steps, run.steps, text, _first_line(rule.score.__doc__), ring=ring)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def speed(run: Inspection) -> str:
    line = run.trajectory
    series = [Series("CLS speed", 0, range(line.steps), line.cls_speed)]
    text = f"Speed of CLS: {line.cls_speed[0]:.3g} at the start, {line.cls_speed[-1]:.3g} at the last step"
    return chart("Speed of CLS", series, line.steps, run.steps, text)


def exponent(run: Inspection) -> str:
    """How fast a perturbation toward the nearest decision boundary grows: below zero is the contraction region."""
    line = run.trajectory
    value, passed = float(line.exponent[run.steps - 1]), float(line.lyapunov_times[run.steps - 1])
    if value > 0:
        note = f"Lyapunov time {1 / value:.1f} at the exit, of a horizon of {run.config.integration.horizon:g}; "
    else:
        note = "Below zero at the exit: such perturbations shrink there; "
    note += f"{passed:.2f} Lyapunov times have passed."
    series = [Series("exponent", 2, range(1, line.steps + 1), line.exponent)]
    return chart("Exponent toward the boundary", series, line.steps, run.steps, note, note)


def energy(run: Inspection, values: Floats) -> str:
    """The Hopfield energy of CLS in each head; nothing in training asks for it to fall."""
    line = run.trajectory
    steps, heads = range(line.steps + 1), values.shape[1]
    series = [Series(f"head {h + 1}", h, steps, values[:, h]) for h in range(min(4, heads))]
    falls = int((values[-1] < values[0]).sum())
    text = f"Hopfield energy of CLS by head: from start to end it falls in {falls} of {heads}"
    return chart(
        "Hopfield energy of CLS", series, line.steps, run.steps, text, f"It falls in {falls} of {heads} heads."
    )


def path(run: Inspection, head: tuple[Floats, Floats] | None) -> str:
    """The trajectory of CLS in the plane of its two main directions, over the regions of the classes in it."""
    cls = run.trajectory.cls.astype(float)
    middle = cls.mean(0)
    _, singular, axes = np.linalg.svd(cls - middle, full_matrices=False)
    if len(axes) < 2:  # a single step is a line
        axes = np.vstack([axes, np.zeros_like(axes[0])])
    flat = (cls - middle) @ axes[:2].T
    share = float((singular[:2] ** 2).sum() / max((singular**2).sum(), 1e-30))
    centre = (flat.min(0) + flat.max(0)) / 2
    inner = (WIDTH - 24, HEIGHT - 24)
    scale = max(float(np.ptp(flat[:, i])) / inner[i] for i in range(2)) * 1.25 or 1.0

    def place(point: Floats) -> tuple[float, float]:
        return WIDTH / 2 + (point[0] - centre[0]) / scale, HEIGHT / 2 - (point[1] - centre[1]) / scale

    parts: list[str] = []
    legend: list[tuple[str, int]] = []
    if head is not None:
        parts, legend = _regions(run, head, middle, axes, centre, scale)
    points = [place(point) for point in flat]
    parts.append('<polyline class="way" points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>')
    parts += [f'<circle class="way-dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    for step, name in ((0, "start"), (run.steps, "exit"), (run.trajectory.steps, "end")):
        if name == "end" and run.steps == run.trajectory.steps:
            continue
        x, y = points[step]
        side, anchor = (10, "start") if x < WIDTH / 2 else (-10, "end")
        shape = "ring" if name == "exit" else "way-end"
        parts.append(f'<circle class="{shape}" cx="{x:.1f}" cy="{y:.1f}" r="{7 if name == "exit" else 5}"/>')
        parts.append(f'<text class="way-name" x="{x + side:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{name}</text>')
    note = f"The plane of its two main directions holds {share:.0%} of the path."
    text = f"Path of CLS in two dimensions from the start to {run.full_label}. {note}"
    if head is not None:
        note += " Colours: the class that the head answers at each point of it. Arrows: where a class grows."
    return _figure("Path of CLS", "".join(parts), text, legend, note)


def _regions(
    run: Inspection, head: tuple[Floats, Floats], middle: Floats, axes: Floats, centre: Floats, scale: float
) -> tuple[list[str], list[tuple[str, int]]]:
    weight, bias = head
    cell = 6
    across, down = math.ceil(WIDTH / cell), math.ceil(HEIGHT / cell)
    x = ((np.arange(across) + 0.5) * cell - WIDTH / 2) * scale + centre[0]
    y = (HEIGHT / 2 - (np.arange(down) + 0.5) * cell) * scale + centre[1]
    on_plane = weight @ axes[:2].T  # [C,2]
    base = weight @ middle + bias
    answers = (base + y[:, None, None] * on_plane[:, 1] + x[None, :, None] * on_plane[:, 0]).argmax(-1)
    names, counts = np.unique(answers, return_counts=True)
    order = [int(names[i]) for i in np.argsort(-counts)]
    final = [i for i in (run.index, int(run.trajectory.logits[-1].argmax())) if i in order]
    ranked = list(dict.fromkeys([*final, *order]))
    colors = {index: place for place, index in enumerate(ranked[:COLORS])}
    parts = []
    for row in range(down):
        start = 0
        for column in range(1, across + 1):
            if column == across or answers[row, column] != answers[row, start]:
                color = colors.get(int(answers[row, start]))
                if color is not None:
                    box = f'x="{start * cell}" y="{row * cell}" width="{(column - start) * cell}" height="{cell}"'
                    parts.append(f'<rect class="region c{color}" {box}/>')
                start = column
    away = on_plane - on_plane.mean(0)
    origin = (50, HEIGHT - 50)
    for index, color in list(colors.items())[:3]:
        length = float(np.hypot(*away[index]))
        if length < 1e-12:
            continue
        dx, dy = 34 * away[index, 0] / length, -34 * away[index, 1] / length
        left, right = (-dx * 0.25 - dy * 0.14, -dy * 0.25 + dx * 0.14), (-dx * 0.25 + dy * 0.14, -dy * 0.25 - dx * 0.14)
        tip = (origin[0] + dx, origin[1] + dy)
        parts.append(
            f'<path class="arrow c{color}" d="M{origin[0]:.1f} {origin[1]:.1f}L{tip[0]:.1f} {tip[1]:.1f}'
            f"M{tip[0] + left[0]:.1f} {tip[1] + left[1]:.1f}L{tip[0]:.1f} {tip[1]:.1f}"
            f'L{tip[0] + right[0]:.1f} {tip[1] + right[1]:.1f}"/>'
        )
    return parts, [(run.labels[index], color) for index, color in colors.items()]


def histogram(depths: Sequence[int], steps: int) -> str:
    """How many images took how many steps."""
    if not depths:
        return ""
    counts = np.bincount(depths, minlength=steps + 1)[1:]
    high = max(1, int(counts.max()))
    room, tall = (WIDTH - LEFT - RIGHT) / steps, HEIGHT - TOP - BOTTOM
    parts = []
    for tick in _ticks(0, high):
        if tick.is_integer():
            y = HEIGHT - BOTTOM - tall * tick / high
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    every = max(1, math.ceil(steps / 12))
    for step, count in enumerate(counts, 1):
        x, size = LEFT + (step - 1) * room, tall * count / high
        box = f'x="{x + room * 0.1:.1f}" y="{HEIGHT - BOTTOM - size:.1f}" width="{room * 0.8:.1f}" height="{size:.1f}"'
        parts.append(f'<rect class="bar c0" {box}><title>{count} at step {step}</title></rect>')
        if step == 1 or step % every == 0:
            at = f'x="{x + room / 2:.1f}" y="{HEIGHT - BOTTOM + 15}"'
            parts.append(f'<text class="tick" {at} text-anchor="middle">{step}</text>')
    parts.append(f'<text class="tick" x="{WIDTH / 2}" y="{HEIGHT - 2}" text-anchor="middle">steps</text>')
    mean = float(np.mean(depths))
    text = f"Depths of {len(depths)} pictures: {mean:.1f} of {steps} steps on average"
    return f'<div class="plots single">{_figure("Depths", "".join(parts), text, note=text + ".")}</div>'
