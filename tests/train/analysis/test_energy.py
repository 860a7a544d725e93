"""Hopfield energy: its value and gradient, and a case in which it must fall."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit_serve.config import Architecture
from odevit_serve.train.analysis.energy import energy
from odevit_serve.train.model import SelfAttention

WIDTH, HEADS = 12, 3


def tied(kind: str = "dot") -> SelfAttention:
    """Queries, keys and values are the centred state itself, symmetric projections: each head retrieves patterns."""
    attention = SelfAttention(Architecture(8, 4, WIDTH, HEADS, attention=kind)).double()
    with torch.no_grad():
        for matrix in (attention.query, attention.key, attention.value, attention.output):
            matrix.weight.copy_(torch.eye(WIDTH))
        attention.norm.weight.fill_((WIDTH - 1) / WIDTH)
    return attention.requires_grad_(False)


def centred(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Tokens whose part in every head has the mean 0, so that the norm changes nothing, before a step and after it."""
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(*shape, HEADS, WIDTH // HEADS, dtype=torch.double, generator=generator)
    return (x - x.mean(-1, keepdim=True)).flatten(-2)


def test_the_energy_of_one_query_by_hand() -> None:
    attention, x = tied(), centred(1, 3)
    q = x[0, 1, 4:8]  # token 1, head 2 of 3
    products = torch.stack([(q * x[0, j, 4:8]).sum() for j in range(3)]) / 2  # beta = 1 / sqrt(4)
    expected = -2 * products.exp().sum().log() + q.square().sum() / 2
    torch.testing.assert_close(energy(attention, x)[0, 1, 1], expected)


@pytest.mark.parametrize("kind", ["dot", "l2"])
def test_attention_less_the_query_descends_it(kind: str) -> None:
    """The gradient with respect to a query, the keys held, is what attention takes away (twice that for L2)."""
    attention, keys = tied(kind), centred(2, 5)
    x = keys.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(attention, x, keys).sum(), x)
    retrieved = attention.maps(keys) @ attention.split(keys)
    expected = keys - retrieved.transpose(1, 2).flatten(2)
    torch.testing.assert_close(gradient, expected * (2 if kind == "l2" else 1))


@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.floats(0.1, 6.0))
@settings(max_examples=40, deadline=None)
def test_with_keys_as_values_and_held_a_step_lowers_it_in_every_head(seed: int, h: float, scale: float) -> None:
    """Retrieval, x + h (attention - x), with steps of up to 1 (Ramsauer et al.): the energy of no query rises."""
    attention, x = tied(), centred(2, 6, scale=scale, seed=seed)
    following = x + h * (attention(x) - x)
    change = energy(attention, following, x) - energy(attention, x)
    assert change.max() < 1e-9
    assert change.min() < -1e-9 or scale < 0.2


def test_it_rises_where_tokens_are_pushed_away() -> None:
    attention, x = tied(), centred(2, 6)
    following = x - 0.2 * (attention(x) - x)
    assert (energy(attention, following, x) - energy(attention, x)).min() > 0
