"""Finished files move into place in one step; what was there before survives a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from odevit_serve.errors import UserError
from odevit_serve.export.install import move, size


def folder(path: Path, text: str) -> Path:
    (path / "in").mkdir(parents=True)
    (path / "in" / "a.txt").write_text(text)
    return path


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    scratch, target = tmp_path / "scratch", folder(tmp_path / "deep" / "target", "old")
    scratch.mkdir()
    move(folder(scratch / "made", "new"), target, scratch)
    assert (target / "in" / "a.txt").read_text() == "new"
    assert (scratch / "old-target" / "in" / "a.txt").read_text() == "old"


def test_a_file_goes_where_no_folder_was(tmp_path: Path) -> None:
    made = tmp_path / "made.onnx"
    made.write_bytes(b"1234")
    move(made, tmp_path / "a" / "b" / "model.onnx", tmp_path)
    assert (tmp_path / "a" / "b" / "model.onnx").read_bytes() == b"1234"


def test_a_target_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / "file"
    made.write_text("new")
    file.write_text("old")
    with pytest.raises(UserError, match=r"cannot write .*model\.onnx: (Not a directory|File exists)"):
        move(made, file / "model.onnx", tmp_path)
    assert (made.read_text(), file.read_text()) == ("new", "old")


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    folder(tmp_path / "x", "12345")
    assert size(tmp_path / "x") == size(tmp_path / "x" / "in" / "a.txt") == 5
