"""Training, choosing, calibrating and measuring images are disjoint, repeat by seed, and keep every class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from odevit_serve.config import Division
from odevit_serve.data.datasets import Images, open_splits
from odevit_serve.data.division import divide, pick, split_off
from odevit_serve.errors import UsageError, UserError


def test_splitting_off_keeps_the_classes_in_proportion_and_repeats_by_seed(folder: Path) -> None:
    train = open_splits(folder)["train"]
    rest, taken = split_off(train, 0.34, seed=5)
    assert len(rest) == 4
    assert taken.labels is not None
    assert sorted(taken.labels.tolist()) == [0, 1]
    assert not set(rest.names) & set(taken.names)
    assert split_off(train, 0.34, seed=5)[1].names == taken.names


def test_validation_is_what_training_set_aside(folder: Path) -> None:
    division = Division(0.34, 0.5, seed=3, own_validation=False)
    rest, aside = split_off(open_splits(folder)["train"], 0.34, 3)
    assert pick(str(folder), "validation", division).names == aside.names
    third = pick(str(folder), "calibration", division)
    assert third.names == split_off(rest, 0.5, 4)[1].names
    parts = divide(open_splits(folder), division)
    everyone = [name for part in parts.values() for name in part.names]
    assert sorted(everyone) == sorted(open_splits(folder)["train"].names)
    own = replace(division, own_validation=True)
    assert pick(str(folder), "validation", own).names == open_splits(folder)["val"].names
    with pytest.raises(UsageError, match="does not say which images"):
        pick(str(folder), "validation")
    np.savez(folder / "t.npz", x_test=np.zeros((4, 8, 8, 3), np.uint8), y_test=np.arange(4) % 2)
    with pytest.raises(UserError, match="no training images, only test"):
        pick(str(folder / "t.npz"), "validation", division)
    with pytest.raises(UsageError, match="no split 'test', only train, val"):
        pick(str(folder), "test")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0.05, 0.6), st.integers(0, 9))
def test_no_class_gives_its_last_image_and_one_of_three_gives_some(sizes: list[int], part: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = Images([str(i) for i in range(len(labels))], labels, tuple(map(str, range(len(sizes)))), Image.open)
    if max(min(n - 1, max(round(part * n), int(n >= 3))) for n in sizes) == 0:
        with pytest.raises(UserError, match="too few to split off"):
            split_off(images, part, seed)
        return
    rest, taken = split_off(images, part, seed)
    assert sorted([*rest.names, *taken.names]) == sorted(images.names)
    left, gone = (np.bincount(images.labels[[int(n) for n in p.names]], minlength=len(sizes)) for p in (rest, taken))
    assert (left >= 1).all()
    assert all(gone[c] >= 1 for c, size in enumerate(sizes) if size >= 3)
    assert all(abs(gone[c] - part * size) <= 1 for c, size in enumerate(sizes) if size >= 3)
