"""Which pictures may calibrate a model: none that trained it, none that chose among its weights.

A bundle says how its training data was divided and what the file or folder was called. Where pictures of that name are
given, those that trained or chose are excluded; where nothing is known of them, that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import Config
from ..data.datasets import Images, open_splits
from ..data.division import pick
from ..errors import UserError


@dataclass(frozen=True)
class Chosen:
    """Images to calibrate on."""

    images: Images
    words: str  # how they were chosen
    warning: str = ""  # where it is not known that they are new to the model


def training_data(config: Config) -> str:
    """The name of the file or folder that a model was trained on, without its path; empty where it is not known."""
    found = config.provenance
    recipe, own = found.get("recipe") or {}, found.get("own") or {}
    return str((recipe.get("data") or {}).get("source") or own.get("data") or "")


def choose_images(config: Config, source: str, split: str | None, limit: int | None = None, seed: int = 0) -> Chosen:
    """The split that was set aside to calibrate, else one that had no part in training; at most `limit`, at random."""
    division, splits = config.division, open_splits(source)
    known = division is not None and training_data(config) == Path(source).name
    used: dict[str, str] = {}  # splits that had a part in training, and which
    if known and division is not None:
        used = {"train": "trained this model", "validation": "chose its weights"}
        if "val" in splits and division.own_validation:
            used["val"] = "chose its weights"
    if split in used:
        raise UserError(
            f"the images of {split!r} of {Path(source).name} {used[split]}, so they must not calibrate it: "
            "take --split calibration or test, or other pictures"
        )
    if split is None:
        if known and division is not None and division.calibration:
            split = "calibration"
        else:
            split = next((name for name in ("test", "val", "train") if name in splits and name not in used), None)
        if split is None:
            raise UserError(f"all images of {Path(source).name} trained this model or chose its weights: give others")
    images = pick(source, split, division)
    warning = ""
    if not known and split != "test":
        warning = (
            f"it is not known whether these {len(images):,} pictures trained this model or chose its weights: "
            "if they did, the proof does not hold for other pictures"
        )
    if limit is not None and limit < len(images):
        images = images.subset(np.random.default_rng(seed).permutation(len(images))[:limit])
    return Chosen(images, f"{len(images):,} images of the split {split!r}, seed {seed}", warning)
