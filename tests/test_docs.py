"""The Python examples in the documentation run as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from odevit_serve import load
from odevit_serve.cli import app
from odevit_serve.runtime import exits

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_runtime(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of("runtime.md")
    assert len(blocks) == 3
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("odevit_serve.bundle.find", lambda source: tiny_bundle)
    model = load()
    names = {
        "model": model, "paths": ["photo.jpg"], "keys": [1, 2],
        "pixels": np.stack([model.prepare("photo.jpg")] * 2),
    }  # fmt: skip
    try:
        for block in blocks:
            exec(block, names)  # the page is ours
        assert names["answer"].label in model.labels
    finally:
        exits.RULES.pop("gap", None)


def test_ecosystem(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of a section go on where the one before ended; the command of the section runs first."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for index in range(8):
        picture = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        picture.save(tmp_path / "photos" / f"{index}.png")
    Image.open(tmp_path / "photos" / "3.png").save(tmp_path / "photo.jpg", quality=95)
    shutil.copytree(tiny_bundle, tmp_path / "FOLDER")
    vectors = ["embed", "photos/", "photo.jpg", "--output", "photos.npz", "-m", "FOLDER"]
    assert CliRunner().invoke(app, vectors).exit_code == 0
    blocks = blocks_of("ecosystem.md")
    assert len(blocks) == 4
    names: list[dict[str, object]] = [{} for _ in blocks]
    for block, space in zip(blocks, names):
        exec(block, space)  # the page is ours
    assert (tmp_path / "copy" / "config.json").is_file()
    assert sum("'label'" in line for line in capsys.readouterr().out.splitlines()) == 1
    known = np.load("photos.npz")
    order = np.argsort(-np.asarray(names[3]["similarity"]))
    assert known["sources"][order[:2]].tolist() == ["photo.jpg", "photos/3.png"]  # the picture it was made from
    assert len(blocks[3].splitlines()) <= 10
    assert len(blocks[2].splitlines()) <= 5
