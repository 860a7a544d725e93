"""Three pictures of each of two classes, in a training and a validation split."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            for i in range(3):
                path = tmp_path / "set" / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 6), (10 * number + i,) * 3).save(path)
    return tmp_path / "set"
