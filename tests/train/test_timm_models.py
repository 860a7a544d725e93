"""Bundles in timm: the real create_model, with names, folders and features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import tiny_model
from PIL import Image

import odevit_serve.train.timm_models  # noqa: F401  (registers the models)
from odevit_serve import bundle
from odevit_serve.data import images
from odevit_serve.errors import UserError
from odevit_serve.train.model import ODEViT

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "demo" / "examples").glob("*.jpg"))


@pytest.mark.parametrize("name", bundle.bundled())
@torch.no_grad()
def test_bundled_models_have_names(name: str) -> None:
    assert f"ode_vit_{name}" in timm.list_models("ode_vit*", pretrained=True)
    own = ODEViT.from_pretrained(name)
    model = timm.create_model(f"ode_vit_{name}", pretrained=True).eval()
    pixels = torch.randn(2, *own.config.preprocessing.input_size)
    assert torch.equal(model(pixels), own(pixels))
    assert model.pretrained_cfg["label_names"] == own.config.labels
    fresh = timm.create_model(f"ode_vit_{name}").eval()
    assert not torch.equal(fresh(pixels), own(pixels))


@pytest.mark.parametrize("settings", [{}, {"attention": "l2"}, {"stem": "convolutions"}])
@torch.no_grad()
def test_folders(settings: dict[str, str], tmp_path: Path) -> None:
    tiny_model(**settings).save_pretrained(tmp_path, half=True)
    own = ODEViT.from_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 16, 16)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(model(pixels), own(pixels))
    state = list(own.trajectory(own.stem(pixels)))[-1].state
    assert torch.equal(model.forward_features(pixels), state)
    assert torch.equal(model.forward_head(state, pre_logits=True), state[:, 0])
    features = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=0).eval()
    assert features(pixels).shape == (2, features.num_features)
    assert torch.equal(features(pixels), state[:, 0])


def test_other_classes_train_and_become_a_bundle(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3)
    own = ODEViT.from_pretrained(tmp_path)
    assert torch.equal(model.psi.mlp.up.weight, own.psi.mlp.up.weight)
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    assert model.get_classifier().weight.grad.abs().sum() > 0
    model.save_pretrained(tmp_path / "new")
    config = ODEViT.from_pretrained(tmp_path / "new").config
    assert (config.architecture.classes, config.labels, config.exit.travel) == (3, (), ())


def test_timms_own_transform_gives_our_pixels() -> None:
    model = timm.create_model("ode_vit_photos")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    words = bundle.read_config(bundle.find("photos")).preprocessing
    for path in EXAMPLES:
        own = images.prepare(images.read(path), words)
        assert np.abs(transform(Image.open(path).convert("RGB")).numpy() - own).max() < 1e-6


def test_other_folders_are_timms_own_affair(tmp_path: Path) -> None:
    import json

    cfg = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "pretrained_cfg": {"num_classes": 3}}
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    assert type(timm.create_model(f"local-dir:{tmp_path}")).__name__ == "VisionTransformer"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_chans": 1}, "in_chans is 3 in this bundle, not 1"),
        ({"img_size": 96}, "img_size is 64 in this bundle, not 96"),
        ({"drop_rate": 0.5}, "has no dropout"),
        ({"depth": 3}, "has no setting 'depth'"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        timm.create_model("ode_vit_photos", **settings)


def test_the_bare_name_says_what_to_write() -> None:
    with pytest.raises(UserError, match="write local-dir:FOLDER"):
        timm.create_model("ode_vit")
