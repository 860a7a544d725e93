"""The model: shapes, CenterNorm, initialisation, attention maps, saving."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.errors import UserError
from odevit_serve.train.model import CenterNorm, ODEViT, SelfAttention, normalised, spread


def make(seed: int = 0, **changes: object) -> ODEViT:
    torch.manual_seed(seed)
    shape = Architecture(16, 4, 24, 3, 2.0, 5, 2, **changes)  # type: ignore[arg-type]
    return ODEViT(Config(shape, Integration(3.0, 3), Preprocessing((3, 16, 16)))).eval()


@settings(max_examples=25, deadline=None)
@given(width=st.integers(2, 40), outputs=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_folding_center_norm_changes_nothing(width: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm = CenterNorm(width).double()
    norm.weight.data = torch.randn(width, generator=generator, dtype=torch.double)
    norm.bias.data = torch.randn(width, generator=generator, dtype=torch.double)
    matrix = torch.randn(outputs, width, generator=generator, dtype=torch.double)
    x = 10 * torch.randn(4, width, generator=generator, dtype=torch.double)
    weight, bias = norm.fold(matrix)
    torch.testing.assert_close(x @ weight.T + bias, norm(x) @ matrix.T)


def test_center_norm_by_hand() -> None:
    """D/(D-1) (x - mean): for x = (1, 2, 6), mean 3, factor 1.5."""
    torch.testing.assert_close(CenterNorm(3)(torch.tensor([1.0, 2.0, 6.0])), torch.tensor([-3.0, -1.5, 4.5]))


@pytest.mark.parametrize("kind", ["dot", "l2"])
def test_every_projection_starts_with_spectral_norm_one(kind: str) -> None:
    model = make(attention=kind)
    attention, mlp = model.psi.attention, model.psi.mlp
    matrices = [attention.query, attention.key, attention.value, attention.output, mlp.up, mlp.down, model.patch]
    for module in matrices:
        norm = torch.linalg.matrix_norm(module.weight.flatten(1), 2)
        assert norm.item() == pytest.approx(1.0, abs=1e-5)
    assert all(m.bias is None for m in matrices[:-1])


@pytest.mark.parametrize("kind", ["dot", "l2"])
@torch.no_grad()
def test_attention_is_its_maps_times_the_values(kind: str) -> None:
    attention = SelfAttention(Architecture(16, 4, 24, 3, attention=kind))
    for matrix in (attention.query, attention.key, attention.value):
        matrix.weight.mul_(3)
    x = torch.randn(2, 17, 24)
    maps = attention.maps(x)
    assert maps.shape == (2, 3, 17, 17)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 17))
    mixed = maps @ attention.split(attention.value(attention.norm(x)))
    torch.testing.assert_close(attention(x), attention.output(mixed.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_l2_attention_by_brute_force() -> None:
    attention = SelfAttention(Architecture(16, 4, 24, 3, attention="l2"))
    attention.query.weight.mul_(4)
    x = torch.randn(1, 5, 24)
    q = attention.split(attention.query(attention.norm(x)))
    distance = (q.unsqueeze(-2) - q.unsqueeze(-3)).square().sum(-1)
    torch.testing.assert_close(attention.maps(x), (-distance / 8**0.5).softmax(-1), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_cls_attention_looks_at_patches_only() -> None:
    model = make()
    x = model.stem(torch.randn(2, 3, 16, 16))
    maps = model.cls_attention(x)
    assert maps.shape == (2, 3, 16)
    torch.testing.assert_close(maps, model.psi.attention.maps(x)[:, :, 0, 1:17])


@torch.no_grad()
def test_the_stem_orders_tokens_and_gives_registers_no_position() -> None:
    model = make()
    x = model.stem(torch.randn(1, 3, 16, 16))
    assert x.shape == (1, 19, 24)
    torch.testing.assert_close(x[0, 0], model.cls[0, 0] + model.position[0, 0])
    torch.testing.assert_close(x[:, 17:], model.registers)


@torch.no_grad()
def test_the_convolution_mixes_neighbours_and_leaves_cls_and_registers_alone() -> None:
    mlp = make(convolution=3).psi.mlp
    assert isinstance(mlp.mix, nn.Conv2d)
    x = torch.randn(1, 19, 48)
    torch.testing.assert_close(spread(x, mlp.mix, 4), x)  # starts as the identity
    mlp.mix.weight.normal_()
    y = spread(x, mlp.mix, 4)
    torch.testing.assert_close(y[:, [0, 17, 18]], x[:, [0, 17, 18]])
    moved = x.clone()
    moved[0, 1 + 5] += 1  # the patch in row 1, column 1 of a 4 x 4 grid
    changed = (spread(moved, mlp.mix, 4) - y).abs().sum(-1)[0] > 1e-6
    assert changed.nonzero().flatten().tolist() == [1 + 4 * r + c for r in range(3) for c in range(3)]


@pytest.mark.parametrize("kind", ["dot", "l2"])
@torch.no_grad()
def test_save_and_load_is_the_identity(tmp_path: Path, kind: str) -> None:
    model = make(attention=kind)
    model.save_pretrained(tmp_path / "a")
    again = ODEViT.from_pretrained(tmp_path / "a")
    assert again.config == model.config
    pixels = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(again(pixels), model(pixels), rtol=0, atol=0)
    model.save_pretrained(tmp_path / "b", half=True)
    rounded = ODEViT.from_pretrained(tmp_path / "b")
    torch.testing.assert_close(rounded(pixels), model(pixels), rtol=0, atol=0.01)
    assert (tmp_path / "b" / "model.safetensors").stat().st_size < 0.7 * (
        tmp_path / "a" / "model.safetensors"
    ).stat().st_size


def test_damaged_bundles_are_told_in_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = make()
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        ODEViT.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        ODEViT.from_pretrained(folder)
    weights.write_bytes(whole)
    data = json.loads((folder / "config.json").read_text())
    data["architecture"]["mlp_ratio"] = 3.0
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"shape \[48, 24\], config.json says \[72, 24\]|\[24, 48\].*\[24, 72\]"):
        ODEViT.from_pretrained(folder)


def test_only_psi_and_registers_are_left_trainable() -> None:
    model = make()
    model.freeze_copied()
    assert {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {"psi", "registers"}


def test_settings_at_call_time_override_the_bundles(tmp_path: Path) -> None:
    model = make()
    pixels = torch.randn(1, 3, 16, 16)
    own = dataclasses.replace(model.config.integration, steps=7, horizon=2.0, solver="heun", splitting="strang")
    with torch.no_grad():
        asked = model(pixels, steps=7, horizon=2.0, solver="heun", splitting="strang")
        model.config = model.config.replace(integration=own)
        torch.testing.assert_close(model(pixels), asked, rtol=0, atol=0)


@pytest.mark.parametrize("stem", ["convolutions", "deep"])
@torch.no_grad()
def test_batch_norms_of_a_stem_are_folded_when_it_is_saved(stem: str, tmp_path: Path) -> None:
    model = make(stem=stem)
    images = torch.randn(8, 3, 16, 16)
    assert isinstance(model.patch, nn.Sequential)
    model.patch = normalised(model.patch).train()
    model.stem(3 * images + 1)  # so that the norms have seen something
    model.eval().save_pretrained(tmp_path)
    again = ODEViT.from_pretrained(tmp_path)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in again.modules())
    torch.testing.assert_close(again(images), model(images), atol=1e-5, rtol=1e-4)
