"""A bundle on disk: its configuration written and read again, and where bundles are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odevit_serve import bundle
from odevit_serve.config import Architecture, Config, Integration, Preprocessing, TeacherFacts
from odevit_serve.errors import UserError


def test_writing_and_reading_is_the_identity(tmp_path: Path) -> None:
    config = Config(
        Architecture(64, 8, 96, 3, classes=2, registers=1, stem="deep"),
        Integration(6.0, 5, "ab2", "lie"),
        Preprocessing((3, 64, 64), crop_pct=0.9),
        labels=("größe", "b"),
        teacher=TeacherFacts("x", accuracy=0.5),
        metrics={"test_accuracy": 0.25},
    )
    bundle.write_config(tmp_path, config)
    assert bundle.read_config(tmp_path) == config
    processor = json.loads((tmp_path / bundle.PROCESSOR).read_text(encoding="utf-8"))
    assert (processor["crop_pct"], processor["input_size"]) == (0.9, [3, 64, 64])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "is not a bundle: it has no config"), (b"\xff", "is not UTF-8 text"), (b"[]", "object")],
)
def test_a_configuration_that_cannot_be_read_is_told_with_its_place(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / bundle.CONFIG).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as failure:
        bundle.read_config(tmp_path)
    assert str(failure.value).startswith(str(tmp_path))


def test_models_are_found_by_name_folder_and_file(tmp_path: Path) -> None:
    assert bundle.find("cifar10") == bundle.MODELS / "cifar10"
    assert bundle.find() == bundle.MODELS / bundle.DEFAULT
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "file.onnx").write_bytes(b"")
    assert bundle.find(tmp_path / "file.onnx") == tmp_path / "file.onnx"  # what is in it is seen when it is opened
    with pytest.raises(UserError, match=r"has no config\.json"):
        bundle.find(tmp_path)
    with pytest.raises(UserError, match=r"neither a bundle folder nor an \.onnx file"):
        bundle.find(tmp_path / "text.txt")
    with pytest.raises(UserError, match=r"no model 'cifar11': bundled are .*cifar10"):
        bundle.find("cifar11")


def test_the_folder_one_is_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    bundle.write_config(tmp_path / "mine", Config())
    monkeypatch.chdir(tmp_path / "mine")
    assert bundle.find(".") == tmp_path / "mine"
    monkeypatch.chdir(tmp_path / "mine" / "inner")
    assert bundle.find("..") == tmp_path / "mine"
