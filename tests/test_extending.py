"""What CONTRIBUTING says about adding things, done: one function or file, and one line that registers it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_model
from PIL import Image
from typer.testing import CliRunner

from odevit_serve import Readings, load, rule, solvers
from odevit_serve.bundle import read_config, write_config
from odevit_serve.cli import app
from odevit_serve.export import formats
from odevit_serve.export.formats.format import Format
from odevit_serve.export.job import ExportJob
from odevit_serve.runtime import exits
from odevit_serve.solvers import Field, Memory, Result, Solver, Value
from odevit_serve.train import losses
from odevit_serve.train.batches import Batch
from odevit_serve.train.losses import Rollout
from odevit_serve.train.objective import Distillation
from odevit_serve.train.recipe import Training

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.fromarray(PIXELS[0]).save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


def test_a_solver(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path, tmp_path: Path, picture: str) -> None:
    def ralston(f: Field, x: Value, h: Value, memory: Memory | None) -> Result:
        v = f(x)
        return x + h * (0.25 * v + 0.75 * f(x + (2 / 3 * h) * v)), v, None

    monkeypatch.setitem(solvers.SOLVERS, "ralston", Solver(ralston, order=2, evaluations=2))
    model = tiny_model()
    expected = model(torch.from_numpy(load(tiny_bundle).prepare(picture))[None], solver="ralston").softmax(-1)
    found = load(tiny_bundle).integrated(solver="ralston").predict(picture, adaptive=False)
    np.testing.assert_allclose(found.probabilities, expected[0].detach(), atol=1e-5)
    file = str(tmp_path / "file.onnx")
    made = CliRunner().invoke(app, ["export", str(tiny_bundle), "--solver", "ralston", "-o", file])
    assert made.exit_code == 0, made.output
    np.testing.assert_allclose(load(file).predict(picture).probabilities, expected[0].detach(), atol=1e-5)


def test_a_rule(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(exits.RULES, "wide", exits.RULES["travel"])  # taken away again at the end

    @rule("wide", needs_travel=True, exports=True)
    def wide(readings: Readings) -> np.ndarray:
        """The margin against half the expected travel."""
        return 2 * readings.margin / readings.travel

    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    config = read_config(folder)
    traces = [answer.trace for answer in load(folder).predict(list(PIXELS), adaptive=False, trace=True)]
    threshold = float(
        np.median([2 * trace[3].margin / trace[3].travel for trace in traces])
    )  # half of the images reach it by step 4
    write_config(folder, config.replace(exit=dataclasses.replace(config.exit, rule="wide", threshold=threshold)))
    found = load(folder).predict(list(PIXELS))
    assert min(answer.steps for answer in found) < 8
    for answer in found:
        assert answer.steps == 8 or "the score of the rule 'wide' reached its threshold" in answer.sentence
    file = str(tmp_path / "file.onnx")
    made = CliRunner().invoke(app, ["export", str(folder), "--format", "onnx-adaptive", "-o", file])
    assert made.exit_code == 0, made.output
    assert [answer.steps for answer in load(file).predict(list(PIXELS))] == [answer.steps for answer in found]


def test_a_format(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path, tmp_path: Path) -> None:
    def make(job: ExportJob, scratch: Path) -> dict[str, Path]:
        (scratch / "labels.json").write_text(json.dumps(job.config.labels))
        return {"labels.json": job.target}

    entry = Format("labels", "people", "none", "{name}.json", (), lambda job: Path("labels.json"), make)
    monkeypatch.setitem(formats.FORMATS, "labels", entry)
    target = tmp_path / "labels.json"
    made = CliRunner().invoke(app, ["export", str(tiny_bundle), "--format", "labels", "-o", str(target)])
    assert made.exit_code == 0, made.output
    assert json.loads(target.read_text()) == ["ant", "bee", "cat", "dog", "eel"]
    assert "labels" in CliRunner().invoke(app, ["export", "--list"]).output


def test_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(rollout: Rollout) -> torch.Tensor:
        """Mean square of the last CLS."""
        return rollout.cls[-1].square().mean()

    monkeypatch.setitem(losses.LOSSES, "far", far)
    objective = Distillation(tiny_model(), Training(), {"far": 2.0})
    batch = Batch(torch.randn(3, 3, 16, 16), torch.zeros(3, dtype=torch.long), torch.arange(3), [])
    found = objective(*objective.prepare(batch, 0, 0))
    assert list(found) == ["far"]
    found["far"].backward()
    assert objective.student.psi.mlp.up.weight.grad is not None
