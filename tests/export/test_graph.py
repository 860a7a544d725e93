"""Folding changes nothing; margins are distances."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.export.graph import TABULATED, Folded
from odevit_serve.train.model import ODEViT

SEEDS = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("attention", ["dot", "l2"])
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_folding_center_norm_changes_nothing(attention: str, seed: int) -> None:
    model = tiny_model(attention=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for norm in (model.psi.attention.norm, model.psi.mlp.norm):
            norm.weight.copy_(torch.randn(24, generator=generator))
            norm.bias.copy_(torch.randn(24, generator=generator))
        folded = Folded(model)
        x = torch.randn(2, 19, 24, generator=generator)
        torch.testing.assert_close(folded.attention(x)[0], model.psi.attention(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(folded.mlp(x), model.psi.mlp(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(folded.cls_attention(x), model.cls_attention(x), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, scale=st.floats(0.1, 10))
def test_margin_is_a_distance(seed: int, scale: float) -> None:
    """Moved by its margin towards the nearest boundary the state is on it, and scaling the head changes nothing."""
    model = tiny_model()
    folded = Folded(model)
    with torch.no_grad():
        cls = torch.randn(1, 24, generator=torch.Generator().manual_seed(seed))
        logits = model.head(cls)
        margin = folded.boundary.nearest(logits)[0]
        model.head.weight.mul_(scale)
        model.head.bias.mul_(scale)
        torch.testing.assert_close(Folded(model).boundary.nearest(model.head(cls))[0], margin, rtol=2e-3, atol=1e-4)
        head = copy.deepcopy(model.head).double()
        weight, top = head.weight, int(logits.argmax())
        steps = [weight[j] - weight[top] for j in range(5) if j != top]
        near, far = margin * (1 - 1e-3) - 1e-4, margin * (1 + 1e-3) + 1e-4
        moved = [head(cls.double() + far * step / step.norm()).argmax() != top for step in steps]
        kept = [head(cls.double() + near * step / step.norm()).argmax() == top for step in steps]
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
    torch.testing.assert_close(Folded(model).boundary.nearest(logits)[0], torch.stack(expected), rtol=1e-3, atol=1e-5)


def test_equal_rows_of_the_head_have_no_boundary_between_them() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.head.weight[1] = model.head.weight[0]
        margin = Folded(model).boundary.nearest(torch.tensor([[2.0, 1.0, -90.0, -90.0, -90.0]]))[0]
    assert torch.isfinite(margin).all()
    assert margin > 1


def direction(model: ODEViT, logits: torch.Tensor) -> torch.Tensor:
    """The unit vector away from the nearest decision boundary, from the definition."""
    weight, top = model.head.weight, int(logits.argmax())
    rivals = [j for j in range(len(weight)) if j != top]
    nearest = min(rivals, key=lambda j: float((logits[top] - logits[j]) / (weight[top] - weight[j]).norm()))
    return torch.nn.functional.normalize(weight[top] - weight[nearest], dim=0)


@pytest.mark.parametrize("attention", ["dot", "l2"])
@pytest.mark.parametrize("classes", [5, TABULATED + 1])
@torch.no_grad()
def test_the_exponent_is_a_jacobian_vector_product_of_psi(attention: str, classes: int) -> None:
    model = tiny_model(attention=attention, classes=classes)
    before = torch.randn(6, 19, 24, generator=torch.Generator().manual_seed(3))
    after = before + 0.3 * model.psi(before)
    logits = model.answer(after)
    _, gain, exponent = Folded(model).boundary(before, after, logits)
    for row in range(6):
        e = direction(model, logits[row])

        def cls_velocity(cls: torch.Tensor, row: int = row) -> torch.Tensor:
            state = torch.cat([cls[None, None], after[row : row + 1, 1:]], 1)
            return model.psi(state)[0, 0]

        with sdpa_kernel(SDPBackend.MATH):
            _, moved = torch.func.jvp(cls_velocity, (after[row, 0],), (e,))
        torch.testing.assert_close(exponent[row], e @ moved, rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(gain[row], e @ (after[row, 0] - before[row, 0]), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_exponent_of_a_linear_system_is_its_eigenvalue() -> None:
    """One token that only looks at itself: attention gives x W_V W_O, and psi is a matrix with known eigenvalues."""
    shape = Architecture(4, 4, 6, 1, 1.0, 2)
    model = ODEViT(Config(shape, Integration(1.0, 1), Preprocessing((3, 4, 4)))).eval()
    centre = torch.eye(6) - 1 / 6  # what CenterNorm does, up to its factor
    basis = torch.linalg.qr(torch.cat([torch.ones(6, 1), torch.randn(6, 5)], 1))[0]
    rates = torch.tensor([0.0, -0.7, 0.4, 0.1, -0.2, 0.9])
    wanted = basis @ torch.diag(rates) @ basis.T  # acts within what CenterNorm leaves
    model.psi.mlp.down.weight.zero_()
    model.psi.attention.query.weight.zero_()  # attention is even: a mean over both tokens, CLS's share one half
    model.psi.attention.value.weight.copy_(2 * (5 / 6) * wanted @ centre)
    model.psi.attention.output.weight.copy_(torch.eye(6))
    for place in range(1, 6):
        e = basis[:, place]
        model.head.weight.copy_(torch.stack([e, -e]))
        state = torch.randn(2, 2, 6)
        _, _, exponent = Folded(model).boundary(state, state, model.answer(state))
        torch.testing.assert_close(exponent, rates[place].expand(2), rtol=2e-3, atol=1e-3)
