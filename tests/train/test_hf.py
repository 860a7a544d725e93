"""A bundle in transformers: the real Auto classes, pipeline and Trainer."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_model
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    pipeline,
)
from transformers.dynamic_module_utils import get_imports

from odevit_serve import bundle
from odevit_serve.config import Calibration, ExitPolicy, Preprocessing, Setting
from odevit_serve.data import images
from odevit_serve.errors import UserError
from odevit_serve.train.hf import ODEViTForImageClassification, ODEViTImageProcessor, write_remote_code
from odevit_serve.train.model import ODEViT

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "demo" / "examples").glob("*.jpg"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model()
    proof = Calibration(0.02, 0.1, 1234, "00", Setting(8, 4.0))
    model.config = model.config.replace(
        exit=dataclasses.replace(model.config.exit, calibration=proof), metrics={"test_accuracy": 0.5}
    )
    model.save_pretrained(tmp_path / "bundle", half=True)
    return tmp_path / "bundle"


@pytest.mark.parametrize("settings", [{}, {"attention": "l2", "solver": "ab2"}, {"stem": "convolutions"}])
def test_auto_classes_load_it_and_write_it_back(settings: dict[str, str], tmp_path: Path) -> None:
    tiny_model(**settings).save_pretrained(tmp_path, half=True)
    own = ODEViT.from_pretrained(tmp_path)
    model, info = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    pixels = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model(pixels).logits, own(pixels))
        assert torch.equal(model(pixels, steps=5).logits, own(pixels, steps=5))
    model.save_pretrained(tmp_path / "back")
    back = ODEViT.from_pretrained(tmp_path / "back")
    assert back.config == own.config
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in own.state_dict().items())


@torch.no_grad()
def test_the_trajectory(folder: Path) -> None:
    own = ODEViT.from_pretrained(folder)
    pixels = torch.randn(2, 3, 16, 16)
    model = AutoModel.from_pretrained(folder)
    output = model(pixels, output_hidden_states=True, output_attentions=True)
    states = [own.stem(pixels), *(point.state for point in own.trajectory(own.stem(pixels)))]
    assert len(output.hidden_states) == len(states) == 9
    assert all(map(torch.equal, output.hidden_states, states))
    assert torch.equal(output.pooler_output, states[-1][:, 0])
    assert len(output.attentions) == 8
    patches = own.config.architecture.patches
    for state, maps in zip(states, output.attentions):
        assert torch.allclose(maps.sum(-1), torch.ones(2, 3, 19))
        assert torch.allclose(maps[:, :, 0, 1 : 1 + patches], own.cls_attention(state), atol=1e-6)
    bare = model(pixels)
    assert (bare.hidden_states, bare.attentions) == (None, None)
    assert isinstance(model(pixels, return_dict=False), tuple)


@pytest.mark.parametrize("name", bundle.bundled())
def test_the_processor_gives_the_pixels_that_are_served(name: str) -> None:
    words = bundle.read_config(bundle.find(name)).preprocessing
    processor = AutoImageProcessor.from_pretrained(bundle.find(name))
    assert isinstance(processor, ODEViTImageProcessor)
    pictures = [Image.open(path) for path in EXAMPLES]
    assert len(pictures) >= 4
    given = processor(pictures, return_tensors="pt")["pixel_values"].numpy()
    assert np.array_equal(given, np.stack([images.prepare(images.read(path), words) for path in EXAMPLES]))
    first = np.asarray(pictures[0].convert("RGB"))
    for other in (first, torch.from_numpy(first.copy()).permute(2, 0, 1)):
        assert np.array_equal(processor(other, return_tensors="np")["pixel_values"], given[:1])


def test_the_processor_is_written_back(tmp_path: Path) -> None:
    words = Preprocessing((3, 24, 24), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear", 0.9, "squash")
    ODEViTImageProcessor(**dataclasses.asdict(words)).save_pretrained(tmp_path)
    again = ODEViTImageProcessor.from_pretrained(tmp_path)
    assert again.preprocessing == words
    assert (again.size, again.image_mean) == ({"height": 24, "width": 24}, [0.1, 0.2, 0.3])


def test_a_pipeline_answers_as_the_runtime_does() -> None:
    from odevit_serve import load

    folder = bundle.find("photos")
    classify = pipeline("image-classification", model=str(folder), top_k=3)
    for found, path in zip(classify([str(path) for path in EXAMPLES]), EXAMPLES, strict=True):
        expected = load(folder).predict(path, adaptive=False).top(3)
        assert [row["label"] for row in found] == [label for label, _ in expected]
        assert [row["score"] for row in found] == pytest.approx([value for _, value in expected], abs=2e-3)


class Colours(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Three kinds of pictures that are told apart by their colour."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        label = index % 3
        pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)) * 0.3
        pixels[label] += 1
        return {"pixel_values": pixels, "labels": torch.tensor(label)}


def test_trainer_fine_tunes_it_for_other_classes(folder: Path, tmp_path: Path) -> None:
    names = {0: "red", 1: "green", 2: "blue"}
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_pretrained(
        folder, num_labels=3, id2label=names, label2id={v: k for k, v in names.items()}, ignore_mismatched_sizes=True
    )
    assert 0.01 < model.net.head.weight.std() < 0.03  # drawn anew, not left as memory was
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=24, per_device_train_batch_size=16, learning_rate=3e-3, report_to=[],
        use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Colours(), eval_dataset=Colours())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    trainer.save_model(str(tmp_path / "tuned"))
    tuned = ODEViT.from_pretrained(tmp_path / "tuned")
    assert tuned.config.labels == ("red", "green", "blue")
    assert tuned.config.exit == ExitPolicy()  # nothing is guaranteed for weights that nobody has calibrated
    assert tuned.config.metrics == {}
    assert tuned.config.provenance["started_from"] == "random"
    pixels = torch.stack([item["pixel_values"] for item in (Colours()[i] for i in range(8))])
    with torch.no_grad():
        assert torch.equal(tuned(pixels), model.eval()(pixels).logits)


def test_changed_weights_lose_what_was_measured(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(folder)
    model.save_pretrained(tmp_path / "same")
    assert bundle.read_config(tmp_path / "same").exit.calibration is not None
    AutoModelForImageClassification.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "rounded")
    assert bundle.read_config(tmp_path / "rounded").exit.calibration is None
    with torch.no_grad():
        model.net.head.bias[0] += 1
    model.save_pretrained(tmp_path / "other")
    other = bundle.read_config(tmp_path / "other")
    assert (other.exit.calibration, other.metrics) == (None, {})
    assert other.labels == model.config.bundle.labels


REMOTE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "odevit_serve":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification
folder, picture, target = sys.argv[1:]
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
pixels = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)(
    __import__("PIL.Image").Image.open(picture), return_tensors="pt"
)
print(model(**pixels).logits.tolist())
model.save_pretrained(target)
"""


def test_remote_code_needs_nothing_but_transformers(folder: Path, tmp_path: Path) -> None:
    files = write_remote_code(folder)
    assert {path.name for path in files} >= {"hf.py", "model.py", "bundle.py", "config.json"}
    needed = set().union(*(get_imports(path) for path in files if path.suffix == ".py"))
    known = {"PIL", "huggingface_hub", "numpy", "safetensors", "torch", "transformers"}  # transformers brings them
    assert needed - set(sys.stdlib_module_names) == known
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", REMOTE, str(folder), str(EXAMPLES[0]), str(tmp_path / "again")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    own = ODEViT.from_pretrained(folder)
    pixels = images.prepare(images.read(EXAMPLES[0]), own.config.preprocessing)
    with torch.no_grad():
        expected = own(torch.from_numpy(pixels)[None])
    assert torch.allclose(torch.tensor(json.loads(done.stdout.splitlines()[-1])), expected, atol=1e-6)
    for path in files:
        assert (tmp_path / "again" / path.name).read_text() == path.read_text()
    # With odevit-serve installed, the same folder is read by the installed classes, with no code of its own.
    assert type(AutoModelForImageClassification.from_pretrained(folder)) is ODEViTForImageClassification


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    ViTConfig(hidden_size=24, num_attention_heads=3, num_hidden_layers=1).save_pretrained(tmp_path / "vit")
    for call in (
        lambda: ODEViTForImageClassification.from_pretrained(tmp_path / "vit"),
        lambda: ODEViT.from_pretrained(tmp_path / "vit"),
    ):
        with pytest.raises(UserError, match=r"not the configuration of an ODE-ViT but of a 'vit'") as caught:
            call()
        assert "\n" not in str(caught.value)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "schema_version": 9}))
    with pytest.raises(UserError, match="is of schema version 9, and this version reads 2"):
        AutoConfig.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(text))
    model = AutoModelForImageClassification.from_pretrained(folder)
    with pytest.raises(UserError, match=r"must have shape \['batch', 3, 16, 16\], not \[1, 3, 8, 8\]"):
        model(torch.zeros(1, 3, 8, 8))
