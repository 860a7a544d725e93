"""Real pictures in any number: parts of a few photographs, as a camera would see them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "demo" / "examples"
SCENES = (
    HERE / "pictures" / "airplane.jpg",
    EXAMPLES / "boats.jpg",
    EXAMPLES / "cat.jpg",
    HERE / "pictures" / "flower.jpg",
)


@cache
def scenes() -> tuple[Image.Image, ...]:
    return tuple(Image.open(path).convert("RGB").reduce(4) for path in SCENES)


def shots(count: int, seed: int, blur: float = 1.0, noise: float = 0.0, side: int = 16) -> list[np.ndarray]:
    """Square parts of the pictures, a little out of focus, with sensor noise on demand."""
    rng, taken = np.random.default_rng(seed), []
    for _ in range(count):
        scene = scenes()[rng.integers(len(scenes()))]
        edge = int(min(scene.size) * rng.uniform(0.3, 1.0))
        x, y = (int(rng.integers(0, size - edge + 1)) for size in scene.size)
        part = scene.crop((x, y, x + edge, y + edge)).resize((side, side), Image.Resampling.BICUBIC)
        seen = np.asarray(part.filter(ImageFilter.GaussianBlur(blur)) if blur else part, float)
        taken.append(np.clip(seen + rng.normal(0, noise, seen.shape), 0, 255).astype(np.uint8))
    return taken
