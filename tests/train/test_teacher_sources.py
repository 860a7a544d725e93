"""Teachers from files, timm and transformers, and other picture and patch sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from odevit_serve.config import Architecture
from odevit_serve.errors import UsageError, UserError
from odevit_serve.train.recipe import Teaching
from odevit_serve.train.teacher_sources import load_teacher, to_timm_names

SHAPE = Architecture(16, 4, 64, 1, 2.0, 7)  # of the teacher in conftest.py


@torch.no_grad()
def test_other_picture_and_patch_sizes_are_resampled(teacher_weights: Path) -> None:
    shape = Architecture(24, 8, 64, 1, 2.0, 7)
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), shape)
    assert teacher(torch.randn(1, 3, 24, 24)).shape == (1, 7)
    assert teacher.vit.pos_embed.shape == (1, 10, 64)


@torch.no_grad()
def test_a_teacher_can_keep_patches_of_its_own_size(teacher_weights: Path) -> None:
    teacher = load_teacher(
        Teaching(weights=str(teacher_weights), image_size=24, patch_size=4), Architecture(16, 8, 64, 1)
    )
    assert teacher.vit.patch_embed.proj.weight.shape == (64, 3, 4, 4)
    assert teacher.vit.pos_embed.shape == (1, 37, 64)


def test_files_that_are_no_teacher(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_teacher(Teaching(weights=str(tmp_path / "none.safetensors")), SHAPE)
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"not a safetensors file at all")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_teacher(Teaching(weights=str(junk)), SHAPE)
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="plain ViT in timm's names"):
        load_teacher(Teaching(weights=str(tmp_path / "other.safetensors")), SHAPE)
    with pytest.raises(UsageError, match="timm:NAME or hf:NAME"):
        load_teacher(Teaching(source="vit_tiny"), SHAPE)
    with pytest.raises(UserError, match="timm could not load"):
        load_teacher(Teaching(source="timm:no_such_model"), SHAPE)


@torch.no_grad()
def test_transformers_weights_give_the_same_answers_under_timms_names(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-12,
    )  # fmt: skip
    original = ViTForImageClassification(config).eval()
    for parameter in original.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    original.save_pretrained(tmp_path / "hf")
    shape = Architecture(16, 4, 64, 2, 2.0, 5)
    teacher = load_teacher(Teaching(source=f"hf:{tmp_path / 'hf'}"), shape).eval()
    pixels = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(teacher(pixels), original(pixels).logits, atol=1e-5, rtol=1e-4)
    assert teacher.facts.heads == 2


def test_the_older_names_of_transformers_are_read_too() -> None:
    state = {
        "embeddings.cls_token": torch.zeros(1, 1, 4),
        "embeddings.position_embeddings": torch.zeros(1, 2, 4),
        "layernorm.weight": torch.ones(4),
        "layernorm.bias": torch.zeros(4),
    }
    for kind, size in (("weight", (4, 4)), ("bias", (4,))):
        state[f"embeddings.patch_embeddings.projection.{kind}"] = torch.zeros(size)
        for name in ("attention.attention.query", "attention.attention.key", "attention.attention.value"):
            state[f"encoder.layer.0.{name}.{kind}"] = torch.full(size, float(len(name)))
        for name in (
            "attention.output.dense",
            "intermediate.dense",
            "output.dense",
            "layernorm_before",
            "layernorm_after",
        ):
            state[f"encoder.layer.0.{name}.{kind}"] = torch.zeros(size)
    named = to_timm_names(state, 1)
    assert named["blocks.0.attn.qkv.bias"].tolist() == [25.0] * 4 + [23.0] * 4 + [25.0] * 4
    del state["layernorm.bias"]
    with pytest.raises(UserError, match=r"no tensor layernorm\.bias"):
        to_timm_names(state, 1)


@torch.no_grad()
def test_the_real_teacher(real_data: Path) -> None:
    spec = Teaching(weights=str(real_data / "vit_tiny_patch16_224.safetensors"))
    teacher = load_teacher(spec, Architecture(224, 16, 192, 3)).eval()
    assert sum(p.numel() for p in teacher.parameters()) == 5_717_416
    small = load_teacher(spec, Architecture(32, 4, 192, 3))
    assert small.vit.patch_embed.proj.weight.shape == (192, 3, 4, 4)
