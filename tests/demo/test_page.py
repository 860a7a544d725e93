"""The handlers of the page, without a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve import bundle
from odevit_serve.demo import html as cards
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


def test_many_classes_and_measured_steps(tiny_bundles: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundles(classes=284), tmp_path / "many"))
    config = bundle.read_config(folder)
    names = tuple(f"class {number} with a <long> name" for number in range(284))
    measured = {"accuracy_by_steps": {"8": 0.5, "30": 0.4}}
    bundle.write_config(folder, config.replace(labels=names, metrics=measured))
    models = Models([str(folder)], threads=1)
    try:
        page = Page(models)
        controls = page.defaults("many")
        assert controls.steps["maximum"] == 30
        settings = {name: control["value"] for name, control in vars(controls).items()}
        Image.new("RGB", (40, 40), "green").save(tmp_path / "p.png")
        run = page.run(str(tmp_path / "p.png"), *settings.values())
        shown = cards.answer(run)
        assert shown.count('class="top"') == len(run.top()) == 5
        assert f'title="{escape(run.label)}"' in shown
        assert "accuracy" not in page.words(*settings.values()).lower()
        other = {**settings, "steps": 30, "max_steps": 30}.values()
        assert "Measured accuracy 40.0% at 30 steps, 50.0% at the bundle's own 8." in page.words(*other)
        other = {**settings, "steps": 7, "max_steps": 7}.values()
        assert "Accuracy was never measured at 7 steps, only at 8, 30." in page.words(*other)
    finally:
        models.close()
