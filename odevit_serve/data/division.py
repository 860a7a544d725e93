"""Which images train, which choose the model, which calibrate it, and which measure it: disjoint, and by seed."""

from __future__ import annotations

import numpy as np

from ..config import Division
from ..errors import UsageError, UserError
from .datasets import Images, held_out, open_splits


def pick(source: str, split: str | None = None, division: Division | None = None) -> Images:
    """The split a user names, else the held-out one.

    `validation` and `calibration` name the training images that chose the model and those set aside to calibrate it:
    they are drawn again as the bundle's `division` says.
    """
    splits = open_splits(source)
    if split in ("validation", "calibration"):
        if division is None:
            raise UsageError(f"the bundle does not say which images its training set aside for {split}: name a split")
        return divide(splits, division, source)[split]
    if split and split not in splits:
        raise UsageError(f"{source} has no split {split!r}, only {', '.join(splits)}")
    return splits[split] if split else held_out(splits)


def divide(splits: dict[str, Images], division: Division, source: str = "the data") -> dict[str, Images]:
    """The images to `train` on, to choose the model by (`validation`) and to calibrate it with (`calibration`).

    All three are disjoint, and none is the test split.
    """
    if "train" not in splits:
        raise UserError(f"{source} has no training images, only {', '.join(splits)}")
    parts, rest = {}, splits["train"]
    if "val" in splits and division.own_validation:
        parts["validation"] = splits["val"]
    else:
        rest, parts["validation"] = split_off(rest, division.validation, division.seed)
    if division.calibration:
        rest, parts["calibration"] = split_off(rest, division.calibration, division.seed + 1)
    return {"train": rest, **parts}


def split_off(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    """Part `fraction` of the images from the rest, by seed, with each class in proportion.

    A class of three images or more gives at least one, and none gives its last.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"the fraction split off must lie between 0 and 1, not {fraction}")
    order = np.random.default_rng(seed).permutation(len(images))
    groups = [order] if images.labels is None else [order[images.labels[order] == c] for c in np.unique(images.labels)]
    shares = [min(len(group) - 1, max(round(fraction * len(group)), len(group) >= 3)) for group in groups]
    taken = np.concatenate([group[:share] for group, share in zip(groups, shares)])
    if not len(taken):
        raise UserError(f"{len(images)} images are too few to split off {fraction:.0%} of each class")
    rest = np.setdiff1d(np.arange(len(images)), taken)
    return images.subset(rest), images.subset(np.sort(taken))
