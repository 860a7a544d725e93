"""`demo`: what cannot be shown is told before there is a page, and engines end with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from servers import until
from typer.testing import CliRunner, Result

from odevit_serve import cli
from odevit_serve.bundle import DEFAULT, bundled
from odevit_serve.demo import app
from odevit_serve.demo.page import Models
from odevit_serve.errors import UserError


def demo(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["demo", *map(str, words)])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a page would be made of; tests/demo has the page."""
    seen: list[tuple[Any, ...]] = []

    def launch(models: Models, *where: Any) -> None:
        seen.append((models, *where))
        until(lambda: models.engine(models.default).ready)
        raise KeyboardInterrupt  # as Ctrl-C ends it

    monkeypatch.setattr(app, "launch", launch)
    return seen


def test_the_first_model_given_is_shown_first_beside_the_bundled_ones(
    tiny_bundle: Path, tmp_path: Path, launched: list[tuple[Any, ...]]
) -> None:
    folder = shutil.copytree(tiny_bundle, tmp_path / "mine")
    done = demo("--model", folder, "--model", "cifar10", "--host", "0.0.0.0", "--port", 1234, "--share", "--threads", 1)
    ((models, *where),) = launched
    assert where == ["0.0.0.0", 1234, True]
    assert models.default == "mine"
    assert models.names == [*bundled(), "mine"]
    assert f"showing {', '.join(models.names)} on http://0.0.0.0:1234" in done.stderr
    assert done.stdout == ""


def test_engines_end_with_the_page(tiny_bundle: Path, launched: list[tuple[Any, ...]]) -> None:
    demo("--model", tiny_bundle, "--threads", 1)
    models = launched[0][0]
    engine = models.engine(models.default)
    assert not engine.ready


def test_without_a_model_the_bundled_one_is_shown(launched: list[tuple[Any, ...]]) -> None:
    demo("--threads", 1)
    assert launched[0][0].default == DEFAULT
    assert launched[0][1:] == ("127.0.0.1", 7860, False)


def test_what_cannot_be_shown_is_told_before_there_is_a_page(
    tiny_files: dict[str, Path], tmp_path: Path, launched: list[tuple[Any, ...]], tiny_bundle: Path
) -> None:
    broken = Path(shutil.copytree(tiny_bundle, tmp_path / "broken"))
    (broken / "step.onnx").unlink()
    for source, words in (
        ("no-such", "no model 'no-such'"),
        (tiny_files["onnx"], "give the bundle"),
        (broken, "has no step.onnx"),
    ):
        found = demo("--model", source).exception
        assert isinstance(found, UserError)
        assert words in str(found)
    assert demo("--port", 70000).exit_code == 2
    assert not launched
