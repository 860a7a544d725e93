"""What `benchmark own` draws: the folder and what is measured on share no photograph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve.data.datasets import open_splits
from odevit_serve.errors import UserError
from odevit_serve.train.own_benchmark import LEAST, Task, draw


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    for kind, count in (("ape", 30), ("bat", 9), ("cow", 25), ("dog", 40), ("other", 50)):
        (folder / kind).mkdir()
        for i in range(count):
            Image.fromarray(np.full((2, 2, 3), i, np.uint8)).save(folder / kind / f"{i}.png")
    return folder


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_kinds_have_enough_and_nothing_is_measured_that_was_learned(data: Path, tmp_path: Path, seed: int) -> None:
    task = Task(2, 20, 8, seed=seed, left_out=("other",))
    held = draw(str(data), task, tmp_path / "photos", pytest.fail)
    own = open_splits(tmp_path / "photos")["train"]
    assert own.labels is not None
    assert held.labels is not None
    assert set(own.classes) <= {"ape", "cow", "dog"}
    assert np.bincount(own.labels).tolist() == [20, 20]
    learned = {path.resolve() for path in (tmp_path / "photos").rglob("*.png")}
    measured = [(data / name).resolve() for name in held.names]
    assert len(set(measured)) == len(measured)
    assert not learned & set(measured)
    counts = np.bincount(held.labels, minlength=5)
    assert {held.classes[c] for c in np.flatnonzero(counts)} == set(own.classes)
    assert all(LEAST <= count <= 8 for count in counts[counts > 0])


def test_small_kinds_keep_some_to_measure_on_and_too_few_kinds_are_refused(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    held = draw(str(data), Task(4, 25, 50, left_out=("other",)), tmp_path / "photos", said.append)
    assert said == ["only 2 kinds have 30 photographs: the largest 4 are taken"]
    own = open_splits(tmp_path / "photos")["train"]
    assert own.labels is not None
    assert np.bincount(own.labels).tolist() == [25, 4, 20, 25]
    assert np.bincount(held.labels).tolist() == [5, 5, 5, 15]
    with pytest.raises(UserError, match="has 5 kinds, fewer than the 6 asked for"):
        draw(str(data), Task(6), tmp_path / "more", said.append)
