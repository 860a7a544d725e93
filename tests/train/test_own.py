"""`train PHOTOS` end to end: one command from a folder of photographs to a bundle that is served."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import tiny_model
from PIL import Image
from safetensors.torch import load_file

from odevit_serve import cli
from odevit_serve.bundle import read_config
from odevit_serve.errors import UsageError
from odevit_serve.runtime.model import load_bundle
from odevit_serve.train import own
from odevit_serve.train.batches import PictureDataset
from odevit_serve.train.finish import Finished
from odevit_serve.train.model import ODEViT


def command(*words: str | Path) -> tuple[int, str]:
    err, code, argv = io.StringIO(), 0, sys.argv
    sys.argv = ["odevit-serve", "train", *map(str, words)]
    try:
        with contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
        AcceleratorState._reset_state(True)
    return code, err.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes told apart by the brighter half of the picture, under noise; one is larger than the others."""
    random = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("photos")
    for name, count in (("up", 30), ("down", 30), ("whole", 80)):
        (folder / name).mkdir()
        for i in range(count):
            pixels = random.integers(0, 120, (24, 24, 3))
            pixels[:12] += 100 * (name == "up")
            pixels[12:] += 100 * (name == "down")
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "tiny"
    tiny_model(steps=3).save_pretrained(folder)
    return folder


@pytest.fixture
def graphless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end with their best weights: tracing graphs takes most of the time, and one test does it."""

    def stop(model: ODEViT, folder: Path, *rest: object) -> Finished:
        model.save_pretrained(folder)
        return Finished(folder, 0.5, (0.0, 1.0), 18, False, None, 1.0, 3.0)

    monkeypatch.setattr(own, "finish", stop)


def test_one_command_from_photographs_to_a_served_model(
    photos: Path, start: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = tmp_path / "mine"
    code, said = command(photos, "--start", start, "--epochs", "8", "-o", run)
    assert code == 0, said
    lines = said.splitlines()
    assert lines[0] == "140 photographs of 3 classes, from 30 (down) to 80 (whole) in a class"
    assert lines[1].startswith("classes differ in size: each is drawn equally often")
    assert lines[2] == "102 to learn from, 20 to choose the model by, 18 to calibrate and measure it (seed 0)"
    assert lines[3].startswith("baseline, the head alone on the features of random: ")
    assert lines[3].endswith("(the largest class alone: 60.0%)")
    assert "early exit is not calibrated: 18 photographs prove too little, 356 more set aside are needed" in said
    assert "95% interval" in said
    assert lines[-1] == f"next: odevit-serve serve {run}, odevit-serve demo --model {run}"
    config = read_config(run)
    assert config.labels == ("down", "up", "whole")
    assert config.division is not None
    assert config.provenance["started_from"] == "random"
    assert str(tmp_path) not in config.to_json()
    assert config.metrics["calibration_images"] == 18
    model = load_bundle(run)
    answers = [model.predict(path).label for path in sorted((photos / "up").iterdir())]
    assert answers.count("up") > 20
    code, said = command(photos, "--start", start, "-o", run)
    assert (code, said) == (2, f"{run} already holds a run: --resume {run}, or choose another --output\n")

    request.getfixturevalue("graphless")
    code, said = command("--resume", run, "--epochs", "9")
    assert code == 0, said
    assert "baseline, the head" not in said
    epochs = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in epochs if "epoch" in row] == list(range(1, 10))
    after = read_config(run / "training" / "best").metrics["score"]
    assert after >= max(row["score"] for row in epochs if "epoch" in row) - 1e-6


@pytest.mark.usefixtures("graphless")
def test_an_interrupted_run_leaves_a_complete_bundle_and_goes_on(
    photos: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, seen = tmp_path / "mine", PictureDataset.__getitem__, [0]

    def read(self: PictureDataset, row: int) -> object:
        seen[0] += 1
        if seen[0] == 150:  # in the second epoch
            raise KeyboardInterrupt
        return real(self, row)

    monkeypatch.setattr(PictureDataset, "__getitem__", read)
    code, said = command(photos, "--start", start, "--epochs", "3", "--batch-size", "16", "-o", run)
    assert code == 130
    assert "interrupted: the best so far becomes the bundle" in said
    assert read_config(run).labels == ("down", "up", "whole")
    code, said = command("--resume", run)
    assert code == 0, said
    epochs = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in epochs if "epoch" in row] == [1, 2, 3]


@pytest.mark.usefixtures("graphless")
def test_the_baseline_is_kept_where_fine_tuning_does_harm(photos: Path, start: Path, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    code, said = command(photos, "--start", start, "--epochs", "1", "--lr", "1e20", "-o", run)
    assert code == 0, said
    assert "fine-tuning ended: the" in said
    baseline = json.loads((run / "training" / "run.json").read_text())["baseline"]
    assert read_config(run).metrics["validation_accuracy"] == pytest.approx(baseline, abs=1e-5)
    kept = load_file(run / "model.safetensors")
    for name, weight in load_file(start / "model.safetensors").items():
        if not name.startswith("head."):
            assert kept[name].equal(weight), name


@pytest.mark.usefixtures("graphless")
def test_time_is_shared_out_and_kept(
    photos: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "RESERVE", 0.0)
    monkeypatch.setattr(own, "LEAST", 0.0)
    monkeypatch.setattr(own, "PASSES", 3)
    code, said = command(photos, "--start", start, "--minutes", "60", "-o", tmp_path / "mine")
    assert code == 0, said
    facts = json.loads((tmp_path / "mine" / "training" / "run.json").read_text())
    assert (facts["epochs"], facts["draws"]) == (3, 96)
    monkeypatch.setattr(own, "LEAST", 1e9)
    code, said = command("--resume", tmp_path / "mine", "--minutes", "0.1")
    assert code == 0
    assert "no time is left for fine-tuning" in said


@pytest.mark.usefixtures("graphless")
def test_two_classes_of_five_photographs_are_enough(photos: Path, start: Path, tmp_path: Path) -> None:
    for name in ("up", "down"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for i in range(5):
            shutil.copy(photos / name / f"{i}.png", tmp_path / "few" / name)
    code, said = command(tmp_path / "few", "--start", start, "--epochs", "1", "-o", tmp_path / "run")
    assert code == 0, said
    assert "6 to learn from, 2 to choose the model by, 2 to calibrate and measure it (seed 0)" in said


@pytest.mark.usefixtures("graphless")
def test_a_baseline_that_stays_the_best_learns_from_the_photographs_that_chose_it(
    photos: Path, start: Path, tmp_path: Path
) -> None:
    run = tmp_path / "mine"
    code, said = command(photos, "--start", start, "--epochs", "0", "-o", run)
    assert code == 0, said
    assert "fine-tuning found nothing better: the head is fitted again, also on the photographs that chose it" in said
    made, best = (ODEViT.from_pretrained(folder) for folder in (run, run / "training" / "best"))
    assert torch.equal(made.psi.mlp.up.weight, best.psi.mlp.up.weight)
    assert not torch.equal(made.head.weight, best.head.weight)
    assert made.config.metrics["validation_accuracy"] == best.config.metrics["validation_accuracy"]


def test_another_size_of_pictures_keeps_all_but_the_positions(start: Path) -> None:
    given = ODEViT.from_pretrained(start)
    side, patch = given.config.architecture.image_size, given.config.architecture.patch_size
    assert own.resized(given, 0) is given
    assert own.resized(given, side) is given
    larger = own.resized(given, side + patch)
    assert larger.config.preprocessing.input_size == (3, side + patch, side + patch)
    assert larger.position.shape[1] == 1 + (side // patch + 1) ** 2
    torch.testing.assert_close(larger.position[:, 0], given.position[:, 0])
    for name, value in given.state_dict().items():
        assert name == "position" or torch.equal(larger.state_dict()[name], value), name
    with pytest.raises(UsageError, match=f"multiple of {patch} pixels, a patch, not {side + 1}"):
        own.resized(given, side + 1)
