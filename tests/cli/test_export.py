"""`export` as it is typed: what reaches the export, what is told, and where."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import tiny_model
from small_training import command

from odevit_serve.errors import UserError
from odevit_serve.export import formats, job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> Path:
    """A bundle `model` in the folder the command runs in."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_bundle, tmp_path / "model")
    return tmp_path


def test_the_installed_command(folder: Path) -> None:
    """In a process of its own: progress and summary on stderr, the report on stdout, a file that runs."""
    words = ["export", "model", "--steps", "3", "--horizon", "2", "--output", "m.onnx", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "odevit_serve", *words], capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["files"] == {"m.onnx": (folder / "m.onnx").stat().st_size}
    assert (report["integration"]["steps"], report["integration"]["horizon"]) == (3, 2.0)
    assert {check["name"] for check in report["checks"]} >= {"opset", "bytes", "private text", "ONNX checker"}
    assert report["load_seconds"] > 0
    lines = done.stderr.splitlines()
    assert any(line.strip().startswith("put 3 steps together") and line.endswith(" s") for line in lines)
    assert lines[-1] == "next: odevit-serve predict --model m.onnx image.jpg"
    images = torch.randn(2, 3, 16, 16)
    found = onnxruntime.InferenceSession(folder / "m.onnx").run(["logits"], {"pixel_values": images.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, tiny_model()(images, steps=3, horizon=2.0), atol=1e-4)


def test_results_go_to_stdout_and_all_else_to_stderr(folder: Path) -> None:
    done = command("export", "model", "--steps", "2", "-o", "m.onnx")
    assert done.stdout == ""
    assert f"wrote m.onnx ({(folder / 'm.onnx').stat().st_size / 1e6:.2f} MB)" in done.stderr.splitlines()
    as_json = command("export", "model", "--steps", "2", "-o", "m.onnx", "--overwrite", "--json")
    report = json.loads(as_json.stdout)
    for check in report["checks"]:
        assert sum(line.startswith(f"  checked: {check['name']}") for line in as_json.stderr.splitlines()) >= 1
    assert as_json.stderr.splitlines()[-1] == f"next: {report['next']}"


def test_every_option_reaches_the_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def export(*given: object) -> None:
        asked.extend(given)
        raise UserError("enough")

    monkeypatch.setattr(job, "export", export)
    words = [
        "--format", "openvino", "--steps", "3", "--horizon", "2.5", "--solver", "heun", "--splitting", "lie",
        "--tolerance", "0.5", "--precision", "int8", "--calibration", "images", "--max-drop", "1.5",
        "--with-attention", "--batch", "1,2,3", "--gpu", "turing", "--source", "adaptive", "--check", "torch",
        "--output", "x", "--overwrite",
    ]  # fmt: skip
    done = command("export", "model", *words, check=False)
    assert (done.returncode, done.stderr) == (1, "enough\n")
    assert asked[:2] == [
        "model",
        job.Settings("openvino", 3, 2.5, "heun", "lie", 0.5, "int8", "images", 1.5, True, "1,2,3", "turing",
                     "adaptive", "x", True, "torch"),
    ]  # fmt: skip
    asked.clear()
    command("export", check=False)
    assert asked[:2] == [None, job.Settings()]


def test_the_list_is_complete_and_needs_no_torch() -> None:
    shown = command("export", "--list").stdout
    assert all(f"{name}: " in shown for name in formats.FORMATS)
    rows = json.loads(command("export", "--list", "--json").stdout)
    assert [row["format"] for row in rows] == list(formats.FORMATS)
    for row in rows:
        assert all(value in shown for value in row.values())
    probe = "import sys; from odevit_serve.export import formats; formats.rows(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["--format", "parts"], "onnxscript", "export"),
        (["--format", "triton"], "tritonclient", "triton"),
        (["--format", "openvino"], "openvino", "openvino"),
        (["--check", "torch"], "torch", "export"),
    ],
)
def test_a_missing_package_is_told_with_the_line_to_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], module: str, extra: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    done = command("export", "model", *words, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"pip install 'odevit-serve[{extra}]', or from a checkout pip install '.[{extra}]'" in done.stderr
