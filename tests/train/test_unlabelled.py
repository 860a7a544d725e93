"""Photographs without labels are chosen by a teacher, and a student learns what it says of them."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from safetensors.torch import load_file
from small_training import SMALL, command

from odevit_serve.data.datasets import open_splits
from odevit_serve.errors import UserError
from odevit_serve.train.unlabelled import add, stored, surest

CLASSES = ("0", "3", "5")  # of the teacher's seven


def jpeg(seed: int, size: tuple[int, int] = (24, 20)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "JPEG")
        return file.getvalue()


@given(hnp.arrays(np.int64, st.integers(1, 30), elements=st.integers(0, 3)), st.integers(1, 5), st.data())
def test_the_surest_of_each_class_are_taken(classes: np.ndarray, most: int, data: st.DataObject) -> None:
    certainty = np.array(data.draw(st.permutations(range(len(classes)))), float)
    chosen = surest(classes, certainty, most)
    assert (np.diff(chosen) > 0).all()
    for kind in np.unique(classes):
        own = np.flatnonzero(classes == kind)
        taken = np.intersect1d(own, chosen)
        assert len(taken) == min(most, len(own))
        left = np.setdiff1d(own, taken)
        assert not len(left) or certainty[taken].min() > certainty[left].max()


def test_large_photographs_are_stored_smaller_and_small_ones_as_they_are() -> None:
    small = jpeg(0)
    assert stored(small, "small.jpg") == small
    with Image.open(io.BytesIO(stored(jpeg(1, (600, 300)), "large.jpg"))) as picture:
        assert picture.size == (512, 256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for seed in range(60):
            archive.writestr(f"train/{CLASSES[seed % 3]}/{seed}.jpg", jpeg(seed))
    return path


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    folder = tmp_path / "photographs"
    folder.mkdir()
    for seed in range(100, 140):
        (folder / f"{seed}.jpg").write_bytes(jpeg(seed))
    (folder / "broken.jpg").write_bytes(b"broken")
    (folder / "note.txt").write_text("no picture")
    return folder


def test_what_is_added_is_learned_from(data: Path, photographs: Path, teacher_weights: Path, tmp_path: Path) -> None:
    counts = add(data, photographs, teacher_weights, most=8, limit=0, say=lambda message: None)
    assert 8 <= counts.total() <= 24
    assert max(counts.values()) <= 8
    added = open_splits(data)["unlabelled"]
    assert len(added) == counts.total()
    assert added.labels is None
    with pytest.raises(UserError, match="has photographs without labels already"):
        add(data, photographs, teacher_weights, most=8, limit=0, say=lambda message: None)
    words = ["train", data, *SMALL, "--teacher-weights", teacher_weights, "--epochs", "2", "--seed", "1"]
    words += ["--set", "teacher.whole=true"]
    done = command(*words, "--set", "data.unlabelled=true", "--set", "teacher.unlabelled_size=32", "-o", tmp_path / "a")
    assert f"images to learn from, {counts.total()} without labels" in done.stderr
    command(*words, "-o", tmp_path / "b")
    learned, other = (load_file(tmp_path / run / "bundle" / "model.safetensors") for run in "ab")
    assert any(not np.array_equal(learned[name], other[name]) for name in learned)


def test_the_command(data: Path, photographs: Path, teacher_weights: Path) -> None:
    command = [sys.executable, "-m", "odevit_serve.train.unlabelled", data, photographs]
    ran = subprocess.run([*command, teacher_weights, "--most", "2"], capture_output=True, text=True, check=True)
    assert "photographs added, of" in ran.stdout
    failed = subprocess.run([*command, data], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.unlabelled=true", "has no folder 'unlabelled' beside its splits"),
        ("teacher.unlabelled_size=32", "it needs teacher.whole"),
    ],
)
def test_what_cannot_work_is_said_first(data: Path, teacher_weights: Path, tmp_path: Path, setting: str, sentence: str
                                        ) -> None:  # fmt: skip
    done = command("train", data, *SMALL, "--teacher-weights", teacher_weights, "--set", setting, "-o",
                   tmp_path / "run", check=False)  # fmt: skip
    assert done.returncode == 2
    assert sentence in done.stderr
