"""Anderson acceleration on linear fields, whose resting point is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit_serve.anderson import EMPTY, anderson


def run(f, x, h, evaluations, depth=3, ridge=1e-12):  # type: ignore[no-untyped-def]
    window = EMPTY
    for _ in range(evaluations):
        x, _, window = anderson(f, x, h, window, depth, ridge)
    return x


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_linear_field_of_d_dimensions_rests_after_d_plus_one_evaluations(kind: str) -> None:
    """Where Euler at this step size runs away: Anderson is a Krylov method, and needs no contraction."""
    random = np.random.default_rng(0)
    matrix, rest = random.normal(size=(4, 4)) * 2, random.normal(size=4)
    start = random.normal(size=(3, 2, 2))

    def numbers(x):  # type: ignore[no-untyped-def]
        return (x.reshape(-1, 4) - rest) @ matrix.T

    def field(x):  # type: ignore[no-untyped-def]
        if kind == "torch":
            return torch.from_numpy(numbers(x.numpy())).reshape(x.shape)
        return numbers(x).reshape(x.shape)

    x = torch.from_numpy(start) if kind == "torch" else start
    found = np.asarray(run(field, x, 0.7, 5, depth=4)).reshape(-1, 4)
    np.testing.assert_allclose(found, np.tile(rest, (3, 1)), atol=1e-5)
    euler = np.asarray(run(field, x, 0.7, 5, depth=0)).reshape(-1, 4)
    assert np.abs(euler - rest).max() > 1


def test_fewer_evaluations_than_euler_where_both_arrive() -> None:
    random = np.random.default_rng(1)
    turn, _ = np.linalg.qr(random.normal(size=(30, 30)))
    matrix = -(turn * np.geomspace(0.05, 1.5, 30)) @ turn.T
    start = random.normal(size=(2, 30))

    def needed(depth: int) -> int:
        x, window, count = start, EMPTY, 0
        while np.linalg.norm(x, axis=1).max() > 1e-3:
            x, _, window = anderson(lambda y: y @ matrix.T, x, 1.0, window, depth)
            count += 1
        return count

    assert needed(5) < needed(0) / 2  # a window of none is Euler's method


@given(st.integers(0, 2**31), st.integers(1, 12))
@settings(max_examples=25)
def test_an_image_does_not_depend_on_its_batch_mates(seed: int, evaluations: int) -> None:
    random = np.random.default_rng(seed)
    matrix, start = random.normal(size=(5, 5)) - 2 * np.eye(5), random.normal(size=(4, 5))

    def field(x: np.ndarray) -> np.ndarray:
        return np.einsum("ij,bj->bi", matrix, np.tanh(x))

    together = run(field, start, 0.3, evaluations, ridge=1e-6)
    alone = np.concatenate([run(field, start[i : i + 1], 0.3, evaluations, ridge=1e-6) for i in range(4)])
    np.testing.assert_allclose(together, alone, rtol=1e-6, atol=1e-9)


def test_at_rest_it_stays_at_rest() -> None:
    x = np.ones((2, 3))
    np.testing.assert_array_equal(run(lambda y: 0 * y, x, 1.0, 6), x)
