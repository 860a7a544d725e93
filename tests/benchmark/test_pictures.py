"""Pictures to send: the same at every call, and as rough as they say."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve.benchmark.pictures import real_pictures, some_pictures
from odevit_serve.errors import UserError


def test_made_up_pictures_are_repeatable_and_go_from_smooth_to_rough() -> None:
    made = some_pictures(10, 32)
    assert made == some_pictures(10, 32)
    assert len(set(made)) == 10
    opened = [np.asarray(Image.open(io.BytesIO(one)), np.float64) for one in made]
    assert {one.shape for one in opened} == {(32, 32, 3)}
    smooth, rough = ([np.abs(np.diff(one, axis=0)).mean() for one in opened[start::5]] for start in (0, 4))
    assert max(smooth) < min(rough)


def test_pictures_of_a_folder_are_drawn_without_repeats(tmp_path: Path) -> None:
    kept = some_pictures(6, 8)
    for number, picture in enumerate(kept):
        (tmp_path / f"{number}.png").write_bytes(picture)
    drawn = real_pictures(str(tmp_path), 4)
    assert drawn == real_pictures(str(tmp_path), 4)
    assert len(set(drawn)) == 4
    assert set(drawn) < set(kept)
    assert sorted(real_pictures(str(tmp_path), 99)) == sorted(kept)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no pictures"):
        real_pictures(str(tmp_path / "empty"), 1)
