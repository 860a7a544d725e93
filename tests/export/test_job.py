"""`odevit-serve export`, as it is typed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import tiny_model
from PIL import Image

from odevit_serve.bundle import METADATA_KEY, read_config, write_config
from odevit_serve.cli import main
from odevit_serve.config import Calibration, Config
from odevit_serve.runtime.graph_builder import replace as replace_all
from odevit_serve.runtime.model import load
from odevit_serve.runtime.sessions import read_metadata


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> Path:
    """A bundle `model` in the folder the command runs in."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_bundle, tmp_path / "model")
    return tmp_path


class Command:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `odevit-serve export ...`."""
        self.monkeypatch.setattr(sys, "argv", ["odevit-serve", "export", *words])
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        captured = self.capsys.readouterr()
        assert isinstance(code, int | None)
        return code or 0, captured.out, captured.err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], traced_once: None) -> Command:
    return Command(monkeypatch, capsys)


def test_export_then_read_is_the_identity_on_the_config(command: Command, folder: Path) -> None:
    code, _, err = command("model", "--format", "onnx-adaptive", "--steps", "6", "-o", "a.onnx")
    assert code == 0, err
    config, own = read_metadata(folder / "a.onnx"), tiny_model().config
    assert config.integration.steps == 6
    export = config.provenance["export"]
    assert export["command"] == "odevit-serve export random --format onnx-adaptive --steps 6"
    assert config.exported_from == own.integration
    assert config.replace(integration=own.integration, provenance={}, exported_from=None) == own
    assert config.exit.travel  # of the same horizon


def test_a_proof_for_other_settings_is_left_out_and_said(command: Command, folder: Path) -> None:
    config = read_config(folder / "model")
    setting = load(folder / "model").graphs.setting
    proof = Calibration(0.01, 0.05, 1000, "", setting)
    write_config(folder / "model", config.replace(exit=replace(config.exit, calibration=proof)))
    picture = np.full((20, 30, 3), 90, np.uint8)
    for words, kept in (([], True), (["--steps", "6"], False), (["--precision", "fp16", "--max-drop", "50"], False)):
        code, _, err = command("model", "--format", "onnx-adaptive", *words, "-o", "a.onnx", "--overwrite")
        assert code == 0, err
        assert (read_metadata(folder / "a.onnx").exit.calibration == proof) is kept
        assert ("does not cover this export" in err) is not kept
        assert load(folder / "a.onnx").predict(picture).guaranteed is kept
    code, _, err = command("model", "--format", "onnx-adaptive", "--horizon", "6", "-o", "b.onnx")
    assert (code, "needs the travel over a horizon of 6" in err.splitlines()[-1]) == (1, True)
    for words, kept in (([], True), (["--steps", "1"], False), (["--horizon", "6"], False)):
        assert command("model", *words, "-o", "c.onnx", "--overwrite")[0] == 0
        assert load(folder / "c.onnx").predict(picture).guaranteed is kept


def test_measured_accuracy_is_quoted_and_a_loss_refused(command: Command, folder: Path) -> None:
    config = read_config(folder / "model")
    write_config(folder / "model", config.replace(metrics={"accuracy_by_steps": {"4": 0.5, "8": 0.9, "12": 0.899}}))
    code, _, err = command("model", "--steps", "12", "-o", "a.onnx")
    assert code == 0
    assert "measured accuracy 89.9% at 12 steps, 90.0% at the bundle's own 8" in err
    code, _, err = command("model", "--steps", "4", "-o", "b.onnx")
    assert code == 1
    assert "4 steps of euler (parallel) over horizon 4 loses 40.0 points of accuracy" in err.splitlines()[-1]
    assert not (folder / "b.onnx").exists()
    assert command("model", "--steps", "4", "--max-drop", "45", "-o", "b.onnx")[0] == 0
    assert "accuracy was never measured at 5 steps, only at 4, 8, 12" in command("model", "--steps", "5")[2]
    assert "never measured at 8 steps of heun" in command("model", "--solver", "heun", "-o", "h.onnx")[2]


@pytest.mark.parametrize("format", ["onnx", "onnx-adaptive"])
def test_anderson_in_a_file_is_that_of_the_runtime(command: Command, folder: Path, format: str) -> None:
    words = ("--format", format, "--solver", "anderson", "--steps", "4", "--check", "torch", "-o", "a.onnx")
    code, _, err = command("model", *words)
    assert code == 0, err
    pictures = list(np.random.default_rng(3).integers(0, 256, (6, 20, 20, 3), dtype=np.uint8))
    found, model = load(folder / "a.onnx").predict(pictures), load(folder / "model")
    wanted = model.predict(pictures, solver="anderson", steps=4, adaptive=format != "onnx")
    assert [answer.steps for answer in found] == [answer.steps for answer in wanted]
    for ours, theirs in zip(found, wanted):
        np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-4)
    euler = model.predict(pictures, steps=4, adaptive=format != "onnx")
    assert max(np.abs(a.probabilities - b.probabilities).max() for a, b in zip(euler, wanted)) > 1e-3


@pytest.mark.parametrize("format", ["onnx", "onnx-adaptive", "triton"])
def test_values_are_compared_with_torch_where_asked(command: Command, folder: Path, format: str) -> None:
    target = "animals" if format == "triton" else "a.onnx"
    code, _, err = command("model", "--format", format, "--steps", "3", "--check", "torch", "-o", target)
    assert code == 0, err
    assert "logits against torch, off by" in err
    assert "logits against the runtime, off by 0 " in err


def without(path: Path, key: str = "", output: str = "") -> None:
    """A graph as older versions wrote it: without a key of its metadata, or an output."""
    model = onnx.load(path)
    replace_all(model.metadata_props, [entry for entry in model.metadata_props if entry.key != key])
    replace_all(model.graph.output, [value for value in model.graph.output if value.name != output])
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "step.onnx").unlink(),
            "model has no step.onnx: run odevit-serve export model --format parts --overwrite",
        ),
        (lambda folder: (folder / "stem.onnx").write_bytes(b"no"), "not a readable ONNX file"),
        (
            lambda folder: tiny_model(seed=5).save_pretrained(folder),
            "stem.onnx was made from other weights than those in model.safetensors: "
            "run odevit-serve export model --format parts --overwrite",
        ),
        (
            lambda folder: without(folder / "step.onnx", key="evaluated"),
            "step.onnx does not name its pieces, as one of an older version: "
            "run odevit-serve export model --format parts --overwrite",
        ),
        (
            lambda folder: without(folder / "step.onnx", output="exponent"),
            "without exponent: run odevit-serve export model --format parts --overwrite",
        ),
    ],
)
def test_parts_that_cannot_be_used_are_told_with_the_command_that_mends_them(
    command: Command, folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder / "model")
    code, _, err = command("model", "--steps", "3", "-o", "a.onnx")
    assert code == 1
    assert message in err.splitlines()[-1]
    assert not (folder / "a.onnx").exists()


def test_parts_go_into_the_bundle(command: Command, folder: Path) -> None:
    for name in ("stem.onnx", "step.onnx", "attention.onnx"):
        (folder / "model" / name).unlink()
    assert command("model", "--format", "parts")[0] == 0
    names = {path.name for path in (folder / "model").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "stem.onnx",
        "step.onnx",
        "attention.onnx",
        "preprocessor_config.json",
    }
    code, _, err = command("model", "--format", "parts")
    assert (code, err) == (
        2,
        "model/stem.onnx exists: add --overwrite to replace it, or choose another with --output\n",
    )
    assert command("model", "--format", "parts", "--overwrite")[0] == 0
    assert command("model", "--format", "parts", "--output", "lean")[0] == 0
    assert {path.name for path in (folder / "lean").iterdir()} == names - {
        "model.safetensors",
        "preprocessor_config.json",
    }
    props = {entry.key: entry.value for entry in onnx.load(folder / "lean" / "step.onnx").metadata_props}
    assert (props["format"], props["part"]) == ("parts", "step")
    assert Config.from_json(props[METADATA_KEY]).labels == tiny_model().config.labels


def test_triton_makes_a_repository(command: Command, folder: Path) -> None:
    code, _, err = command("model", "--format", "triton", "--batch", "1,4,16", "--output", "repository/animals")
    assert code == 0, err
    made = sorted(
        p.relative_to(folder / "repository").as_posix() for p in (folder / "repository").rglob("*") if p.is_file()
    )
    assert made == ["animals/1/model.onnx", "animals/config.pbtxt", "animals/labels.txt"]
    assert "max_batch_size: 16" in (folder / "repository" / "animals" / "config.pbtxt").read_text()
    assert err.splitlines()[-1] == "next: tritonserver --model-repository repository"
    assert command("model", "--format", "triton", "--output", "repository/animals")[0] == 2
    assert command("model", "--format", "triton", "--output", "repository/animals", "--overwrite")[0] == 0
    assert "max_batch_size: 64" in (folder / "repository" / "animals" / "config.pbtxt").read_text()
    assert [p.name for p in (folder / "repository").iterdir()] == ["animals"]


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("unrolled", {"random-8steps-fp16-unrolled.engine", "random-8steps-fp16-unrolled.json"}),
        ("adaptive", {"random-8steps-fp16-adaptive.engine", "random-8steps-fp16-adaptive.json"}),
        ("parts", {"stem.engine", "step.engine", "attention.engine", "config.json"}),
    ],
)
def test_tensorrt_makes_engines(command: Command, folder: Path, source: str, files: set[str]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")
    code, _, err = command(
        "model", "--format", "tensorrt", "--source", source, "--precision", "fp16", "--batch", "1,2,4"
    )
    assert code == 0, err
    where = folder / "random-8steps-fp16" if source == "parts" else folder
    made = {path.name for path in where.iterdir() if path.is_file()}
    assert made == files
    assert all((where / name).stat().st_size > 5_000 for name in files if name.endswith(".engine"))
    assert "build" in err
    assert "tensorrt_rtx" in err


def pictures(folder: Path) -> Path:
    path = folder / "images.npz"
    pixels = np.random.default_rng(0).integers(0, 255, (64, 16, 16, 3), np.uint8)
    np.savez(path, x=pixels)
    return path


def test_int8_needs_images_and_says_what_it_costs(command: Command, folder: Path) -> None:
    code, _, err = command("model", "--precision", "int8", "-o", "q.onnx")
    assert code == 2
    assert err.splitlines()[-1].startswith("int8 needs images to calibrate on")
    images = str(pictures(folder))
    code, out, err = command(
        "model", "--precision", "int8", "--calibration", images, "--max-drop", "50", "-o", "q.onnx", "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["comparison"]["images"] == "64"
    assert 50 <= report["comparison"]["agreement"] <= 100
    assert {"8-bit matrix products", "disagreement with fp32 in points"} <= {c["name"] for c in report["checks"]}
    assert str(folder) not in (folder / "q.onnx").read_bytes().decode("latin1")


@pytest.mark.parametrize(("format", "name"), [("onnx-adaptive", "a.onnx"), ("parts", "lean")])
def test_int8_in_the_other_formats(command: Command, folder: Path, format: str, name: str) -> None:
    images = str(pictures(folder))
    words = ["--precision", "int8", "--calibration", images, "--max-drop", "50", "-o", name]
    code, _, err = command("model", "--format", format, *words)
    assert code == 0, err
    assert "8-bit matrix products 4 (allowed 4)" in err


def test_a_precision_that_costs_too_much_is_refused(command: Command, folder: Path) -> None:
    model = tiny_model()
    with torch.no_grad():  # one weight far larger than all others leaves the others no levels
        model.psi.mlp.up.weight[:, 0] *= 3000
        model.psi.attention.value.weight[:, 0] *= 3000
    model.save_pretrained(folder / "rough")
    assert command("rough", "--format", "parts")[0] == 0
    images = str(pictures(folder))
    code, _, err = command("rough", "--precision", "int8", "--calibration", images, "-o", "q.onnx")
    assert code == 1
    assert "disagreement with fp32 in points" in err.splitlines()[-1]
    assert "(allowed 0.5)" in err.splitlines()[-1]
    assert not (folder / "q.onnx").exists()


def test_an_existing_file_needs_overwrite(command: Command, folder: Path) -> None:
    (folder / "m.onnx").write_bytes(b"mine")
    code, out, err = command("model", "-o", "m.onnx")
    assert (code, out) == (2, "")
    assert err == "m.onnx exists: add --overwrite to replace it, or choose another with --output\n"
    assert (folder / "m.onnx").read_bytes() == b"mine"
    assert command("model", "-o", "m.onnx", "--overwrite")[0] == 0
    assert (folder / "m.onnx").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["model", "--format", "onx"], 2, "unknown format 'onx': did you mean 'onnx'?"),
        (["model", "--format", "tensorr"], 2, "did you mean 'tensorrt'?"),
        (["model", "--stepz", "3"], 2, "--steps"),
        (["model", "--precision", "int4"], 2, "unknown precision 'int4': did you mean 'int8'?"),
        (["model", "--solver", "eular"], 2, "unknown solver 'eular': did you mean 'euler'?"),
        (["model", "--solver", "anderson", "--splitting", "lie"], 2, "the solver anderson has no sub-flows"),
        (["model", "--steps", "0"], 2, "steps must be at least 1, not 0"),
        (["model", "--horizon", "-1"], 2, "horizon must be a positive number, not -1.0"),
        (["model", "--format", "parts", "--steps", "3"], 2, "--steps does not apply to the format parts"),
        (["model", "--format", "onnx-adaptive", "--with-attention"], 2, "--with-attention does not apply"),
        (["model", "--format", "triton", "--batch", "8"], 2, "--batch takes three numbers"),
        (["model", "--max-drop", "-1"], 2, "--max-drop must be 0 or more points, not -1.0"),
        (["model", "--format", "tensorrt", "--source", "step"], 2, "unknown source 'step'"),
        (["model", "-o", "file.pt"], 2, "--output file.pt must end in .onnx"),
        (["nowhere"], 1, "no model 'nowhere'"),
        (["empty"], 1, "empty is not a bundle: it has no config.json"),
    ],
)
def test_what_a_user_can_get_wrong(command: Command, folder: Path, words: list[str], code: int, message: str) -> None:
    (folder / "empty").mkdir()
    before = sorted(folder.iterdir())
    found, out, err = command(*words)
    assert (found, out) == (code, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert sorted(folder.iterdir()) == before


def test_an_exported_file_cannot_be_exported_again(command: Command, folder: Path) -> None:
    assert command("model", "-o", "m.onnx")[0] == 0
    code, _, err = command("m.onnx", "-o", "n.onnx")
    assert (code, err) == (1, "m.onnx is exported already: give the bundle it was made from\n")


@pytest.mark.parametrize("format", ["onnx", "onnx-adaptive"])
def test_predict_and_info_need_nothing_but_the_file(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    assert command("model", "--format", format, "-o", "m.onnx")[0] == 0
    (folder / "away").mkdir()
    (folder / "m.onnx").rename(folder / "away" / "m.onnx")
    Image.fromarray(np.full((20, 30, 3), 90, np.uint8)).save(folder / "away" / "img.png")
    monkeypatch.chdir(folder / "away")
    for words in (["predict", "--model", "m.onnx", "img.png", "--json"], ["info", "m.onnx", "--json"]):
        monkeypatch.setattr(sys, "argv", ["odevit-serve", *words])
        with pytest.raises(SystemExit) as stop:
            sys.exit(main())
        assert not stop.value.code
        assert any(label in capsys.readouterr().out for label in tiny_model().config.labels)
