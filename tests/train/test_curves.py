"""The pictures of a run: they are drawn from its numbers, and leave no half-written file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve.train.curves import draw_curves


def rows(*accuracies: float) -> str:
    numbers = [
        {"epoch": n, "step": n, "loss": 1 / n, "accuracy": a, "lr": 0.1, "seconds": 1.0}
        for n, a in enumerate(accuracies, 1)
    ]
    return "\n".join(json.dumps(row) for row in [{"step": 0, "loss": 9.0}, *numbers])


def drawn(tmp_path: Path, text: str) -> np.ndarray:
    (tmp_path / "metrics.jsonl").write_text(text)
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    return np.asarray(Image.open(tmp_path / "curves.png").convert("L"))


def test_other_numbers_are_another_picture(tmp_path: Path) -> None:
    first = drawn(tmp_path, rows(0.1, 0.9))
    assert (first != drawn(tmp_path, rows(0.9, 0.1))).any()
    assert (first == drawn(tmp_path, rows(0.1, 0.9))).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_before_the_first_epoch_there_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        drawn(tmp_path, '{"step": 0, "loss": 9.0}')
