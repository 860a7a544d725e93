"""Where CLS looks as time passes: the maps of a trajectory on the picture, one frame after another, the exit marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from .drawing import GREY, INK, ORANGE, font, overlay
from .dynamics import Floats

if TYPE_CHECKING:
    from .model import Attention, Prediction

SIDE = 384  # of the shorter side of the picture
STRIP = 88  # height of the time line below it
BETWEEN = 4  # frames a step; those between two maps are mixtures of them
FRAME, PAUSE = 70, 1400  # milliseconds of a frame, and of the one at the exit and the last one


def frames(picture: Image.Image, maps: Sequence[Attention], answer: Prediction) -> tuple[list[Image.Image], list[int]]:
    """Pictures and their durations in milliseconds, from the start of the trajectory to the full horizon.

    Each map has its own scale of colours, as in the stills: late maps would leave nothing to see of the early ones.
    """
    scale = SIDE / min(picture.size)
    base = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
    heats = [_level(one.mean) for one in maps]
    shown: list[Image.Image] = []
    durations: list[int] = []
    last = len(heats) - 1
    for number in range(last * BETWEEN + 1):
        step, part = divmod(number, BETWEEN)
        heat: Floats = heats[step]
        if part:
            heat = heat + (heats[step + 1] - heat) * (part / BETWEEN)
        shown.append(_frame(overlay(base, heat, limits=(0.0, 1.0)), number / BETWEEN, last, answer))
        durations.append(PAUSE if number in (answer.steps * BETWEEN, last * BETWEEN) else FRAME)
    return shown, durations


def _level(heat: Floats) -> Floats:
    low, high = heat.min(), heat.max()
    return (heat - low) / (high - low) if high > low else heat * 0


def _frame(picture: Image.Image, time: float, steps: int, answer: Prediction) -> Image.Image:
    """The picture above its time line: how far the trajectory is, and where the image left it."""
    whole = Image.new("RGB", (picture.width, picture.height + STRIP), "white")
    whole.paste(picture)
    draw = ImageDraw.Draw(whole)
    left, right, y = 18, picture.width - 18, picture.height + 50

    def place(step: float) -> float:
        return left + (right - left) * step / steps

    exit_at = place(answer.steps)
    draw.line((left, y, right, y), GREY, 2)
    draw.line((left, y, place(time), y), ORANGE, 6)
    for step in range(steps + 1):
        draw.line((place(step), y - 5, place(step), y + 5), GREY, 2)
    draw.ellipse((place(time) - 7, y - 7, place(time) + 7, y + 7), ORANGE)
    draw.line((exit_at, y - 16, exit_at, y + 16), INK, 3)
    draw.text((min(exit_at, right - 14), y + 18), "exit", INK, font=font(14), anchor="ma")
    reached = time >= answer.steps
    text = f"{answer.label} {answer.probability:.0%}" if reached else "where CLS looks"
    draw.text((left, picture.height + 8), text, INK, font=font(17))
    draw.text((right, picture.height + 10), f"step {int(time)} of {steps}", GREY, font=font(15), anchor="ra")
    return whole


def save(path: Path, picture: Image.Image, maps: Sequence[Attention], answer: Prediction) -> None:
    """Write the animation as WebP; it plays over and over."""
    first, *rest = (made := frames(picture, maps, answer))[0]
    first.save(path, "WEBP", save_all=True, append_images=rest, duration=made[1], loop=0, quality=80, method=4)
