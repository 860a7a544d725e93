"""Folding changes nothing; margins are distances."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit_serve.export.graph import TABULATED, Folded

SEEDS = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("attention", ["dot", "l2"])
@pytest.mark.parametrize("quantisable", [False, True])
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_folding_center_norm_changes_nothing(attention: str, quantisable: bool, seed: int) -> None:
    model = tiny_model(attention=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for norm in (model.psi.attention.norm, model.psi.mlp.norm):
            norm.weight.copy_(torch.randn(24, generator=generator))
            norm.bias.copy_(torch.randn(24, generator=generator))
        folded = Folded(model, quantisable=quantisable)
        x = torch.randn(2, 19, 24, generator=generator)
        torch.testing.assert_close(folded.mix(x), model.psi.attention(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(folded.transform(x), model.psi.mlp(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(folded.cls_attention(x), model.cls_attention(x), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, scale=st.floats(0.1, 10))
def test_margin_is_a_distance(seed: int, scale: float) -> None:
    """Moved by its margin towards the nearest boundary the state is on it, and scaling the head changes nothing."""
    model = tiny_model()
    folded = Folded(model)
    model.head.double()
    with torch.no_grad():
        cls = torch.randn(1, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        logits = model.head(cls)
        margin = folded.margin(logits)
        model.head.weight.mul_(scale)
        model.head.bias.mul_(scale)
        torch.testing.assert_close(Folded(model).margin(model.head(cls)), margin, rtol=1e-3, atol=1e-5)
        weight, top = model.head.weight, int(logits.argmax())
        steps = [weight[j] - weight[top] for j in range(5) if j != top]
        moved = [model.head(cls + margin * (1 + 1e-3) * step / step.norm()).argmax() != top for step in steps]
        kept = [model.head(cls + margin * (1 - 1e-3) * step / step.norm()).argmax() == top for step in steps]
    assert any(moved)
    assert all(kept)


@pytest.mark.parametrize("classes", [2, 5, TABULATED, TABULATED + 1])
@torch.no_grad()
def test_margin_by_brute_force_with_and_without_the_table(classes: int) -> None:
    model = tiny_model(classes=classes)
    logits, weight = model.head(torch.randn(3, 24)), model.head.weight
    expected = []
    for row in logits:
        top = int(row.argmax())
        expected.append(min((row[top] - row[j]) / (weight[top] - weight[j]).norm() for j in range(classes) if j != top))
    torch.testing.assert_close(Folded(model).margin(logits), torch.stack(expected), rtol=1e-3, atol=1e-5)


def test_equal_rows_of_the_head_have_no_boundary_between_them() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.weight[1] = model.head.weight[0]
        margin = Folded(model).margin(torch.tensor([[2.0, 1.0, -90.0, -90.0, -90.0]]))
    assert torch.isfinite(margin).all()
    assert margin > 1


def test_half_precision_keeps_states_in_full() -> None:
    model = tiny_model()
    folded = Folded(model, half=True)
    with torch.no_grad():
        state = folded.begin(torch.randn(2, 3, 16, 16))
        after, velocity = folded.advance(state, 0.5)
        exact, _ = Folded(model).advance(state, 0.5)
    assert after.dtype == velocity.dtype == torch.float32
    assert 0 < (after - exact).abs().max() < 1e-2
