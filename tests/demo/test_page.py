"""The handlers of the page, without a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve.demo import page as module
from odevit_serve.demo.page import Models, Page


@pytest.fixture
def page(tiny_bundle: Path) -> Iterator[Page]:
    models = Models([str(tiny_bundle)], threads=1)
    yield Page(models)
    models.close()


def test_playing_shows_each_map_and_rests_at_the_exit(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    name = page.models.default
    settings = [control["value"] for control in page.defaults(name).settings]
    run = page.run(str(tmp_path / "p.png"), *settings)
    rests: list[float] = []
    monkeypatch.setattr(module.time, "sleep", rests.append)
    shown = list(page.play(run, "mean", 0.5))
    assert [step for step, _ in shown] == list(range(9))
    assert [html for _, html in shown] == [page.map(run, step, "mean", 0.5) for step in range(9)]
    assert [i for i, rest in enumerate(rests) if rest == module.PAUSE] == [run.steps]
    assert len(list(page.play(None, "mean", 0.5))) == 1  # no picture yet
