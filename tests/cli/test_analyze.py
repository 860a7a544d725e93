"""`analyze` as it is typed: numbers to stdout, the report beside it, and an interruption that can be continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from odevit_serve import bundle, cli
from odevit_serve.errors import UsageError, UserError
from odevit_serve.train.analysis import collect


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "some.npz"
    x = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 3), dtype=np.uint8)
    np.savez(path, x_test=x, y_test=np.arange(10) % 5, classes=np.array(["ant", "bee", "cat", "dog", "eel"]))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["analyze", *map(str, words)])


def test_the_numbers_go_to_stdout_and_the_report_is_named(tiny_bundle: Path, data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "my model"))
    done = run(folder, "--data", data, "--quick", "--limit", 8, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert numbers == json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert numbers["images"] == 8
    assert f"report: {tmp_path / 'out' / 'report.html'}" in done.stderr
    best, own = numbers["sections"]["depth"]["recommended_steps"], bundle.read_config(tiny_bundle).integration.steps
    assert (f"odevit-serve export '{folder}' --steps {best}" in done.stderr) is (best < own)


def test_every_option_reaches_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def open_study(*given: Any, **named: Any) -> None:
        named.pop("say")
        asked.append((given, named))
        raise UserError("enough")

    monkeypatch.setattr(collect, "open_study", open_study)
    words = ["--split", "val", "--teacher", "timm:vit", "--teacher-weights", "w.safetensors", "--quick", "--limit", 9]
    assert str(run("model", "--data", "d", *words, "--batch-size", 5, "-o", tmp_path).exception) == "enough"
    run("--data", "d")
    assert asked == [
        (
            ("model", "d", tmp_path),
            {"split": "val", "teacher": "timm:vit", "teacher_weights": "w.safetensors", "limit": 9, "quick": True,
             "batch_size": 5},
        ),
        (
            (None, "d", Path("analysis")),
            {"split": None, "teacher": "", "teacher_weights": "", "limit": None, "quick": False, "batch_size": 32},
        ),
    ]  # fmt: skip


def test_an_interruption_can_be_continued(
    tiny_bundle: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(study: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "analyze", stop)
    done = run(tiny_bundle, "--data", data, "--quick", "-o", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (130, "")
    assert "run the same command again" in done.stderr


def test_wrong_use(tiny_bundle: Path, data: Path, tmp_path: Path) -> None:
    assert "no split 'val'" in str(run(tiny_bundle, "--data", data, "--split", "val").exception)
    (tmp_path / "file").write_text("")
    found = run(tiny_bundle, "--data", data, "-o", tmp_path / "file").exception
    assert isinstance(found, UsageError)
    assert "is a file" in str(found)
    assert "no such file" in str(run(tiny_bundle, "--data", tmp_path / "none").exception)
    assert run(tiny_bundle, "--data", data, "--limit", 3).exit_code == 2
