"""The examples in docs/runtime.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve import exits, load

PAGE = Path(__file__).resolve().parents[1] / "docs" / "runtime.md"


def test_examples(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
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
