"""The wheel, installed into an environment of its own: lean, whole, and answering."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from odevit_serve.bundle import bundled, find

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(target), str(ROOT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.whl"))


def test_nothing_but_our_package_lands_in_site_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "odevit_serve",
        next(n for n in names if ".dist-info" in n).split("/")[0],
    }
    for wanted in ("odevit_serve/train/model.py", "odevit_serve/export/__init__.py", "odevit_serve/demo/__init__.py"):
        assert wanted in names
    assert "odevit_serve/train/recipes/cifar10.toml" in names
    for model in bundled():
        for part in ("config.json", "model.safetensors", "stem.onnx", "step.onnx", "attention.onnx", "README.md"):
            assert f"odevit_serve/models/{model}/{part}" in names
        assert sum(file.stat().st_size for file in find(model).iterdir()) <= 10e6, model


@pytest.mark.slow
def test_a_lean_install_has_no_torch_and_answers(wheel: Path, tmp_path: Path) -> None:
    from PIL import Image

    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    run = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(home / "bin" / words[0]), *words[1:]], capture_output=True, text=True, env=run, cwd=tmp_path
        )

    installed = command("pip", "install", "--quiet", str(wheel))
    assert installed.returncode == 0, installed.stderr
    packages = {p["name"].lower() for p in json.loads(command("pip", "list", "--format", "json").stdout)}
    assert not packages & {"torch", "timm", "transformers", "gradio", "scipy", "matplotlib", "pandas"}
    Image.radial_gradient("L").convert("RGB").save(tmp_path / "picture.png")
    answer = command("odevit-serve", "predict", "picture.png", "--json")
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    first = result[0] if isinstance(result, list) else result
    assert first["label"]
    for words in (["--steps", "18", "-o", "fixed.onnx"], ["--format", "onnx-adaptive", "-o", "adaptive.onnx"]):
        made = command("odevit-serve", "export", *words)
        assert made.returncode == 0, made.stderr
        again = command("odevit-serve", "predict", "--model", words[-1], "picture.png", "--json")
        assert json.loads(again.stdout)[0]["label"], again.stderr
    assert "pip install 'odevit-serve[train]'" in command("odevit-serve", "train", "x").stderr
    assert command("odevit-serve", "--version").stdout.strip() in wheel.name
