"""Pictures of what the model did, drawn with Pillow and numpy alone: attention on the picture, and line plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .dynamics import Floats
from .exits import RULES

if TYPE_CHECKING:
    from .results import Attention, Prediction

# Dark violet over red to pale yellow, rising evenly in lightness: heat stays readable in grey.
HEAT = np.array(
    [(8, 6, 38), (62, 14, 92), (122, 28, 109), (181, 50, 90), (228, 90, 49), (250, 150, 20), (252, 252, 164)], float
)
BLUE, ORANGE, GREEN, GREY = (31, 102, 176), (222, 110, 20), (30, 140, 90), (120, 120, 120)
INK, GRID = (35, 35, 40), (228, 228, 232)
Color = tuple[int, int, int]
_Place = Callable[[float, float], tuple[float, float]]  # from data to pixels


def overlay(
    picture: Image.Image, heat: Floats, smallest: int = 384, limits: tuple[float, float] | None = None
) -> Image.Image:
    """The heat of a map [grid, grid] laid on the picture; the hottest patch shows in full colour, cold ones not.

    `limits` are the values of the coldest and the hottest colour, if they are not those of the map itself.
    """
    scale = max(1.0, smallest / min(picture.size))
    size = (round(picture.width * scale), round(picture.height * scale))
    base = np.asarray(picture.convert("RGB").resize(size, Image.Resampling.BICUBIC), float)
    low, high = limits or (float(heat.min()), float(heat.max()))
    level = (heat - low) / (high - low) if high > low else np.zeros_like(heat)
    smooth = Image.fromarray(level.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    level = np.clip(np.asarray(smooth), 0, 1)
    stops = np.linspace(0, 1, len(HEAT))
    color = np.stack([np.interp(level, stops, HEAT[:, i]) for i in range(3)], -1)
    strength = (0.35 + 0.5 * level)[..., None]
    return Image.fromarray(np.rint(base * (1 - strength) + color * strength).astype(np.uint8))


def overlays(picture: Image.Image, attention: Attention) -> dict[str, Image.Image]:
    """`mean`, `head1`, `head2`, ...: each map on the picture."""
    maps = {"mean": attention.mean, **{f"head{i + 1}": heat for i, heat in enumerate(attention.heads)}}
    return {name: overlay(picture, heat) for name, heat in maps.items()}


@dataclass(frozen=True)
class Curve:
    """A series of points; None breaks the line."""

    name: str
    color: Color
    x: Sequence[float]
    y: Sequence[float | None]
    dots: bool = True


@dataclass(frozen=True)
class Panel:
    """One plot of several lines over a common x; `level` and `at` are a dashed horizontal and vertical line."""

    title: str
    lines: Sequence[Curve]
    level: tuple[float, str] | None = None
    at: tuple[float, str] | None = None
    log: bool = False
    zero: bool = False  # let the axis start at nought


def plot(
    panels: Sequence[Panel],
    title: str,
    x_label: str,
    x_range: tuple[float, float] | None = None,
    width: int = 760,
    height: int = 230,
) -> Image.Image:
    """Panels above each other, drawn at twice the size and reduced, so that lines and letters are smooth."""
    full = Image.new("RGB", (2 * width, 2 * (44 + height * len(panels) + 34)), "white")
    draw = ImageDraw.Draw(full)
    draw.text((32, 28), title, INK, font=font(32))
    values = [x for panel in panels for line in panel.lines for x in line.x]
    low, high = x_range or ((min(values), max(values)) if values else (0.0, 1.0))
    if low == high:
        low, high = low - 0.5, high + 0.5
    for index, panel in enumerate(panels):
        top = 2 * (44 + index * height)
        _panel(draw, panel, (150, top + 64, 2 * width - 40, top + 2 * height - 40), (low, high))
    draw.text((width, full.height - 20), x_label, GREY, font=font(24), anchor="mb")
    return full.resize((width, full.height // 2), Image.Resampling.LANCZOS)


def _panel(
    draw: ImageDraw.ImageDraw,
    panel: Panel,
    box: tuple[int, int, int, int],
    x_range: tuple[float, float],
) -> None:
    left, top, right, bottom = box
    seen = [
        y for line in panel.lines for y in line.y if y is not None and math.isfinite(y) and (y > 0 or not panel.log)
    ]
    if panel.level:
        seen.append(panel.level[0])
    ticks = _log_ticks(seen) if panel.log else _ticks([*seen, 0.0] if panel.zero else seen)
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        if panel.log:
            up = (math.log(max(y, low)) - math.log(low)) / (math.log(high) - math.log(low))
        else:
            up = (y - low) / (high - low)
        return left + across * (right - left), bottom - up * (bottom - top)

    draw.text((32, top - 52), panel.title, INK, font=font(26))
    for tick in ticks:
        _, y = place(x_range[0], tick)
        draw.line((left, y, right, y), GRID, 2)
        draw.text((left - 14, y), _label(tick), GREY, font=font(22), anchor="rm")
    whole = all(float(x).is_integer() for line in panel.lines for x in line.x)
    for tick in _ticks(x_range, 12):
        if x_range[0] <= tick <= x_range[1] and (tick.is_integer() or not whole):
            x, _ = place(tick, high)
            draw.line((x, bottom, x, bottom + 8), GREY, 2)
            draw.text((x, bottom + 12), _label(tick), GREY, font=font(22), anchor="mt")
    _dashes(draw, panel, place, box, x_range)
    corner = right
    for line in reversed(panel.lines):
        name = line.name
        corner -= int(draw.textlength(name, font=font(24)))
        draw.text((corner, top - 50), name, line.color, font=font(24))
        corner -= 36
    for line in panel.lines:
        _line(draw, line, place, panel.log)


def _dashes(
    draw: ImageDraw.ImageDraw, panel: Panel, place: _Place, box: tuple[int, int, int, int], x_range: tuple[float, float]
) -> None:
    left, top, right, bottom = box
    if panel.level:
        _, y = place(x_range[0], panel.level[0])
        for dash in range(left, right, 24):
            draw.line((dash, y, min(dash + 12, right), y), GREY, 3)
        draw.text((right - 8, y - 6), panel.level[1], GREY, font=font(22), anchor="rb")
    if panel.at and x_range[0] <= panel.at[0] <= x_range[1]:
        x, _ = place(panel.at[0], 1.0)
        for dash in range(top, bottom, 24):
            draw.line((x, dash, x, min(dash + 12, bottom)), GREY, 3)
        middle = (left + right) / 2
        side, anchor = (8, "la") if x < middle else (-8, "ra")
        draw.text((x + side, top + 4), panel.at[1], INK, font=font(22), anchor=anchor)


def _line(draw: ImageDraw.ImageDraw, line: Curve, place: _Place, log: bool) -> None:
    piece: list[tuple[float, float]] = []
    for x, y in [*zip(line.x, line.y), (0.0, None)]:
        if y is None or not math.isfinite(y) or (log and y <= 0):
            if len(piece) > 1:
                draw.line(piece, line.color, 5, joint="curve")
            piece = []
            continue
        piece.append(place(x, y))
        if line.dots:
            a, b = piece[-1]
            draw.ellipse((a - 7, b - 7, a + 7, b + 7), line.color)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _ticks(values: Sequence[float], count: int = 5) -> list[float]:
    """Round numbers that span the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low < 1e-12:
        low, high = low - max(abs(low) * 0.1, 0.01), high + max(abs(high) * 0.1, 0.01)
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(round(i * step, 12)) for i in range(first, last + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    low, high = (min(values), max(values)) if values else (0.1, 1.0)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
    return [10.0**i for i in range(first, max(last, first + 1) + 1)]


def _label(value: float) -> str:
    return f"{value:.4g}"


def trace_plot(prediction: Prediction) -> Image.Image:
    """The trajectory of one image: probability, what the rule compares, exponent, Lyapunov times."""
    trace = prediction.trace
    steps = [s.step for s in trace]
    at = (float(prediction.steps), f"{prediction.exit.short} at {prediction.steps}/{prediction.full_steps}")
    probability = Curve(f"probability of {prediction.label}", GREEN, steps, [s.probability for s in trace])
    panels = [Panel("answer", [probability], at=at, zero=True)]
    panels.append(_decision(prediction, (at[0], "")))
    exponent = Curve("exponent", BLUE, steps, [s.exponent for s in trace])
    times = Curve("times", BLUE, steps, [s.lyapunov_times for s in trace])
    panels += [
        Panel("exponent toward the boundary", [exponent], level=(0.0, "")),
        Panel("Lyapunov times passed", [times], zero=True),
    ]
    return plot(
        panels, f"{prediction.source}: {prediction.label}", "step", (0.0, float(prediction.full_steps)), height=170
    )


def _decision(prediction: Prediction, at: tuple[float, str]) -> Panel:
    """The score of the rule against its threshold. Where both are multiples of the travel, as distances of CLS."""
    trace, threshold, rule = prediction.trace, prediction.threshold, RULES.get(prediction.rule)
    steps = [s.step for s in trace]
    margin = Curve("margin", BLUE, steps, [s.margin for s in trace])
    # At the last step nothing is decided any more, and what is divided by a travel of nought leaves the scale.
    scores = [s.score if s.step < prediction.full_steps else None for s in trace]
    if threshold is None or rule is None or not any(score is not None for score in scores):
        return Panel("distance of CLS", [margin], at=at, zero=True)
    if not rule.needs_travel:
        line = Curve("score", BLUE, steps, scores)
        return Panel(f"score of {rule.name}", [line], (threshold, f"threshold {threshold:.3g}"), at)
    travel = [s.travel for s in trace]
    wanted = [None if far is None else threshold * far for far in travel]
    lines = [margin, Curve(f"{threshold:.3g} x expected travel", ORANGE, steps, wanted)]
    if rule.name != "travel":  # whose score times the travel is the margin
        reached = [None if score is None or far is None else score * far for score, far in zip(scores, travel)]
        lines.insert(1, Curve(f"what {rule.name} compares", GREEN, steps, reached))
    return Panel("distance of CLS", lines, at=at, zero=True)
