"""Pushing to and reading from the Hub: the real `huggingface_hub` against a local fake of its HTTP interface."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub import Hub, fake_hub
from huggingface_hub import ModelCard, constants
from PIL import Image

from odevit_serve import bundle
from odevit_serve.config import Config
from odevit_serve.errors import UsageError
from odevit_serve.hub import SUMS, split
from odevit_serve.model_card import card


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fake_hub() as running:
        yield running


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    return tmp_path / "p.png"


def run(hub: Hub, home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odevit_serve", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=hub.environment(home))


def test_push_then_predict_by_a_pinned_name(hub: Hub, tiny_bundle: Path, picture: Path, tmp_path: Path) -> None:
    bundled = Path(shutil.copytree(tiny_bundle, tmp_path / "mine"))
    (bundled / "calibration.png").write_bytes(b"not part of the bundle")
    done = run(hub, tmp_path / "a", "push", bundled, "someone/mine")
    assert done.returncode == 0, done.stderr
    pinned = done.stdout.strip()
    sha, files = hub.repositories["someone/mine"][-1]
    assert pinned == f"hf:someone/mine@{sha}"
    graphs = {"stem.onnx", "step.onnx", "attention.onnx"}
    own = {"config.json", "preprocessor_config.json", "model.safetensors", "README.md", *graphs}
    assert set(files) == {*own, SUMS, ".gitattributes"}
    for line in files[SUMS].decode().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256(files[name]).hexdigest() == digest
    assert "odevit-serve predict --model hf:someone/mine picture.jpg" in files["README.md"].decode()
    assert hub.cards == [files["README.md"].decode()]  # what the Hub was asked to validate

    local = json.loads(run(hub, tmp_path / "b", "predict", picture, "-m", bundled, "--json").stdout)[0]
    for name in (pinned, "hf:someone/mine", "someone/mine"):
        done = run(hub, tmp_path / "b", "predict", picture, "-m", name, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)[0]
        assert (found["label"], found["probability"]) == (local["label"], local["probability"])

    # A pinned name stays what it was when something else is pushed, and old files of the bundle go.
    hub.commit("someone/mine", {**files, "hf.py": b"old", "notes.txt": b"theirs"})
    again = run(hub, tmp_path / "a", "push", "cifar10", "someone/mine")
    assert again.returncode == 0, again.stderr
    newest = hub.repositories["someone/mine"][-1][1]
    assert set(newest) == {*files, "notes.txt"}
    label = json.loads(run(hub, tmp_path / "c", "predict", picture, "-m", pinned, "--json").stdout)[0]["label"]
    assert label == local["label"]
    other = json.loads(run(hub, tmp_path / "c", "predict", picture, "-m", again.stdout.strip(), "--json").stdout)[0]
    assert other["label"] in bundle.read_config(bundle.find("cifar10")).labels


def test_files_that_do_not_belong_together_are_refused(
    hub: Hub, tiny_bundle: Path, picture: Path, tmp_path: Path
) -> None:
    assert run(hub, tmp_path / "a", "push", tiny_bundle, "someone/mine").returncode == 0
    files = hub.repositories["someone/mine"][-1][1]
    without = {name: content for name, content in files.items() if name != "attention.onnx"}
    for change, message in (
        ({**files, "step.onnx": files["stem.onnx"]}, "step.onnx is not the file that was pushed"),
        (without, "is incomplete: attention.onnx is in SHA256SUMS"),
        ({**files, "extra.onnx": b"x"}, "extra.onnx is not in SHA256SUMS"),
    ):
        name = f"hf:someone/mine@{hub.commit('someone/mine', change)}"
        done = run(hub, tmp_path / "b", "predict", picture, "-m", name)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert message in done.stderr
    unchecked = {name: content for name, content in files.items() if name != SUMS}
    name = f"hf:someone/mine@{hub.commit('someone/mine', unchecked)}"
    done = run(hub, tmp_path / "b", "predict", picture, "-m", name)
    assert done.returncode == 0
    assert done.stderr.strip() == f"warning: {name} has no SHA256SUMS: its files were not checked"


def test_what_is_not_there(hub: Hub, tiny_bundle: Path, picture: Path, tmp_path: Path) -> None:
    hub.commit("someone/mine", {"README.md": b"empty"})
    bare = Path(shutil.copytree(tiny_bundle, tmp_path / "bare", ignore=shutil.ignore_patterns("step.onnx")))
    for words, code, message in (
        (["predict", picture, "-m", "hf:someone/mine@v9"], 1, "someone/mine on the Hub has no revision 'v9'"),
        (["predict", picture, "-m", "hf:someone/else"], 1, "the Hub has no model 'someone/else'"),
        (["predict", picture, "-m", "hf:mine"], 2, "'hf:mine' is not a Hub name: write hf:OWNER/MODEL"),
        (["push", tiny_bundle, "someone/mine@v1"], 2, "names a revision: a push makes a new one"),
        (["push", bare, "someone/mine"], 1, "has no step.onnx: run odevit-serve export"),
        (["push", tmp_path, "someone/mine"], 1, "is not a bundle: it has no config.json"),
    ):
        done = run(hub, tmp_path / "home", *words)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert message in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    hidden = "import sys; sys.modules['huggingface_hub'] = None; from odevit_serve.cli import main; main()"
    command = [sys.executable, "-c", hidden, "predict", str(picture), "-m", "hf:someone/mine"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'odevit-serve[hub]'" in done.stderr
    offline = {**hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "odevit_serve", "predict", str(picture), "-m", "hf:someone/other"]
    done = subprocess.run(command, capture_output=True, text=True, env=offline)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "someone/other" in done.stderr


@pytest.mark.slow
def test_remote_code_and_timm_from_the_hub(hub: Hub, tiny_bundle: Path, tmp_path: Path) -> None:
    done = run(hub, tmp_path / "a", "push", tiny_bundle, "someone/mine", "--remote-code")
    assert done.returncode == 0, done.stderr
    assert {"hf.py", "model.py"} <= set(hub.repositories["someone/mine"][-1][1])
    code = """
import torch, timm
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained("someone/mine", trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules")
import odevit_serve.train.timm_models
other = timm.create_model("hf-hub:someone/mine", pretrained=True).eval()
pinned = timm.create_model("hf-hub:someone/mine@REVISION", pretrained=True).eval()
pixels = torch.randn(2, 3, 16, 16)
assert torch.equal(pinned(pixels), other(pixels))
assert torch.equal(model(pixels).logits, other(pixels))
"""
    code = code.replace("REVISION", hub.repositories["someone/mine"][-1][0])
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=hub.environment(tmp_path / "b")
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("license", ["apache-2.0", "Licence of Our House: ask", ""])
def test_the_cards_metadata_is_what_the_library_accepts(license: str) -> None:
    read = ModelCard(card(Config(license=license), "mine"))
    assert read.data.pipeline_tag == "image-classification"
    assert "ode-vit" in read.data.tags
    expected = {"apache-2.0": "apache-2.0", "": None}.get(license, "other")
    assert read.data.license == expected
    assert read.data.get("license_name") == (license if expected == "other" else None)


@pytest.mark.parametrize("name", bundle.bundled())
def test_bundled_cards_pass_the_librarys_validation(name: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    read = ModelCard.load(bundle.find(name) / "README.md")
    read.validate()
    assert hub.cards == [str(read)]
    assert (read.data.library_name, read.data.pipeline_tag) == ("odevit-serve", "image-classification")
    assert read.data.license


def test_a_card_that_the_hub_refuses_is_told_in_one_sentence(hub: Hub, tiny_bundle: Path, tmp_path: Path) -> None:
    edited = Path(shutil.copytree(tiny_bundle, tmp_path / "mine"))
    (edited / "README.md").write_text("---\nmodel-index: [{name: x, results: [{}]}]\n---\n# Mine\n")
    done = run(hub, tmp_path / "home", "push", edited, "someone/mine")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert "the Hub could not be used for 'someone/mine': Invalid metadata in README.md" in done.stderr
    assert len(hub.repositories["someone/mine"]) == 1  # nothing was committed


def test_names() -> None:
    assert split("hf:a/b") == split("a/b") == ("a/b", None)
    assert split("hf:a/b-c.d@refs") == ("a/b-c.d", "refs")
    for wrong in ("hf:a", "hf:a/b/c", "hf:a/b@", "hf:", "hf:a b/c"):
        with pytest.raises(UsageError, match="is not a Hub name"):
            split(wrong)
