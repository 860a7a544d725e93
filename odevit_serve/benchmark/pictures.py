"""The pictures that `benchmark serve` sends: from a folder, or made up."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ..data import images
from ..errors import UserError


def some_pictures(count: int, side: int) -> list[bytes]:
    """Made-up pictures, from smooth to rough, for want of real ones."""
    from PIL import Image

    chance, made = np.random.default_rng(0), []
    for number in range(count):
        rough = chance.integers(0, 256, (2 ** (1 + number % 5), 2 ** (1 + number % 5), 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(rough).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "PNG")
        made.append(buffer.getvalue())
    return made


def real_pictures(folder: str, count: int) -> list[bytes]:
    found = list(images.walk([folder]))
    if not found:
        raise UserError(f"{folder} has no pictures")
    chosen = np.random.default_rng(0).permutation(len(found))[:count]
    return [Path(found[i]).read_bytes() for i in chosen.tolist()]
