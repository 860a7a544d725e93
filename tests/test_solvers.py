"""Solvers against ODEs whose solution is known, and against psi itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.solvers import SOLVERS, SPLITTINGS, advance, evaluations, memories, order, splits
from odevit_serve.train.model import ODEViT

PAIRS = [(solver, splitting) for solver in SOLVERS for splitting in SPLITTINGS if splits(solver, splitting)]
FOLLOW = [(solver, splitting) for solver, splitting in PAIRS if SOLVERS[solver].order]  # the others go for the rest
SPIN = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.double)
SHEAR = torch.tensor([[-0.5, 0.7], [0.0, 0.2]], dtype=torch.double)  # does not commute with SPIN


def integrate(fields, x: Tensor, horizon: float, steps: int, solver: str, splitting: str) -> Tensor:
    memory: list[Tensor] = []
    for _ in range(steps):
        x, _, memory = advance(fields, x, horizon / steps, memory, solver, splitting)
    return x


def measured_order(fields, x: Tensor, exact: Tensor, solver: str, splitting: str, steps: int = 16) -> float:
    errors = [(integrate(fields, x, 1.0, n, solver, splitting) - exact).norm().item() for n in (steps, 2 * steps)]
    return math.log2(errors[0] / errors[1])


@pytest.mark.parametrize(("solver", "splitting"), FOLLOW)
def test_order_on_a_linear_ode(solver: str, splitting: str) -> None:
    """x' = (A + B) x with A, B that do not commute: the solution is a matrix exponential."""
    x = torch.tensor([[1.0, 0.3]], dtype=torch.double)
    fields = (lambda y: y @ SPIN.T, lambda y: y @ SHEAR.T)
    exact = x @ torch.linalg.matrix_exp(SPIN + SHEAR).T
    assert measured_order(fields, x, exact, solver, splitting) == pytest.approx(order(solver, splitting), abs=0.25)


@pytest.mark.parametrize("solver", [name for name, own in SOLVERS.items() if own.order])
def test_order_on_the_logistic_equation(solver: str) -> None:
    x = torch.tensor([[0.1], [0.4]], dtype=torch.double)
    exact = 1 / (1 + (1 / x - 1) * math.exp(-1.0))
    fields = (lambda y: y * (1 - y), torch.zeros_like)
    assert measured_order(fields, x, exact, solver, "parallel") == pytest.approx(SOLVERS[solver].order, abs=0.25)


@pytest.fixture(scope="module")
def small() -> ODEViT:
    torch.manual_seed(0)
    shape = Architecture(image_size=8, patch_size=4, width=12, heads=3, classes=3, registers=1, convolution=3)
    return ODEViT(Config(shape, Integration(2.0, 4), Preprocessing((3, 8, 8)))).double().eval()


@pytest.mark.parametrize(("solver", "splitting"), FOLLOW)
@torch.no_grad()
def test_order_on_psi(small: ODEViT, solver: str, splitting: str) -> None:
    x = 2 * torch.randn(2, 6, 12, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    exact = integrate(small.psi.fields, x, 1.0, 512, "rk4", "parallel")
    found = measured_order(small.psi.fields, x, exact, solver, splitting, steps=8 if solver == "rk4" else 32)
    assert found == pytest.approx(order(solver, splitting), abs=0.35)


@torch.no_grad()
def test_trajectory_uses_any_steps_and_horizon(small: ODEViT) -> None:
    x = torch.randn(2, 6, 12, dtype=torch.double)
    points = list(small.trajectory(x, steps=5, horizon=1.5))
    assert [p.step for p in points] == [1, 2, 3, 4, 5]
    by_hand = x
    for _ in range(5):
        by_hand = by_hand + 0.3 * small.psi(by_hand)
    torch.testing.assert_close(points[-1].state, by_hand)
    torch.testing.assert_close(points[0].velocity, small.psi(x))


def test_every_solver_but_one_follows_time() -> None:
    """So that no solver leaves the tests of orders by mistake."""
    assert [name for name, own in SOLVERS.items() if not own.order] == ["anderson"]
    assert set(itertools.product(SOLVERS, SPLITTINGS)) - set(PAIRS) == {("anderson", "lie"), ("anderson", "strang")}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_anderson_finds_the_rest_of_one_active_direction_in_two_evaluations(kind: str) -> None:
    """x' = A (x - c) with A = -s u u': whatever the rate s, the second step ends where u x = u c."""
    random = np.random.default_rng(0)
    u, c, start = (random.normal(size=shape) for shape in ((6,), (6,), (3, 2, 3)))
    u /= np.linalg.norm(u)
    rates = np.array([0.1, 0.9, 1.7])[:, None]  # one an image
    count = 0

    def field(x):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        flat = np.asarray(x).reshape(-1, 6)
        found = (-rates * ((flat - c) @ u)[:, None] * u).reshape(3, 2, 3)
        return torch.from_numpy(found) if kind == "torch" else found

    x, memory = torch.from_numpy(start) if kind == "torch" else start, []
    for _ in range(2):
        x, _, memory = advance((field, lambda y: 0 * y), x, 0.7, memory, "anderson")
    flat = start.reshape(-1, 6)
    rest = flat - ((flat - c) @ u)[:, None] * u
    assert count == 2
    np.testing.assert_allclose(np.asarray(x).reshape(-1, 6), rest, atol=1e-5)  # the ridge is a millionth
    euler = (
        integrate((field, lambda y: 0 * y), torch.from_numpy(start), 1.4, 2, "euler", "parallel")
        if (kind == "torch")
        else None
    )
    assert euler is None or np.abs(np.asarray(euler).reshape(-1, 6) - rest).max() > 0.1


@pytest.mark.parametrize("solver", [name for name, own in SOLVERS.items() if own.remembers])
def test_images_that_have_made_no_step_are_told_apart(solver: str) -> None:
    x = torch.randn(3, 4, 2, dtype=torch.double)
    fields = (torch.sin, torch.cos)
    first, _, kept = advance(fields, x, 0.1, [], solver)
    known = torch.tensor([0.0, 1.0, 1.0], dtype=torch.double).view(-1, 1, 1)
    x_next, _, _ = advance(fields, x, 0.1, [2 * value for value in kept], solver, known=known)
    second, _, _ = advance(fields, x, 0.1, [2 * value for value in kept], solver)
    torch.testing.assert_close(x_next[0], first[0])
    torch.testing.assert_close(x_next[1:], second[1:])
    assert not torch.allclose(second[0], first[0])


@pytest.mark.parametrize(("solver", "splitting"), PAIRS)
def test_arrays_and_tensors_give_the_same(solver: str, splitting: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    memory = [np.cos(x) for _ in range(memories(solver, splitting))]
    ours = advance((np.sin, np.cos), x, 0.3, memory, solver, splitting)
    tensors = [torch.from_numpy(m) for m in memory]
    theirs = advance((torch.sin, torch.cos), torch.from_numpy(x), 0.3, tensors, solver, splitting)
    np.testing.assert_allclose(ours[0], theirs[0].numpy())
    np.testing.assert_allclose(ours[1], theirs[1].numpy())


def test_step_size_can_differ_by_image() -> None:
    x, h = torch.randn(2, 3, 2), torch.tensor([0.1, 0.4]).view(-1, 1, 1)
    for solver, splitting in PAIRS:
        together, _, _ = advance((torch.sin, torch.cos), x, h, [], solver, splitting)
        for i in range(2):
            alone, _, _ = advance((torch.sin, torch.cos), x[i : i + 1], float(h[i]), [], solver, splitting)
            torch.testing.assert_close(together[i : i + 1], alone)


@pytest.mark.parametrize(("solver", "splitting"), PAIRS)
def test_the_table_says_how_often_each_field_is_evaluated(solver: str, splitting: str) -> None:
    calls = [0, 0]

    def counted(which: int) -> Callable[[Tensor], Tensor]:
        def field(x: Tensor) -> Tensor:
            calls[which] += 1
            return x

        return field

    advance((counted(0), counted(1)), torch.ones(1, 1, 1), 0.1, [], solver, splitting)
    assert tuple(calls) == evaluations(solver, splitting)


@pytest.mark.parametrize(("solver", "splitting"), PAIRS)
def test_memories_are_as_many_as_said(solver: str, splitting: str) -> None:
    _, _, kept = advance((torch.sin, torch.cos), torch.ones(1, 2, 2), 0.1, [], solver, splitting)
    assert len(kept) == memories(solver, splitting)
