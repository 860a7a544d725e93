"""Exponents, steepness and error bounds on systems whose answers are known."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import tiny_model
from torch import Tensor

from odevit_serve.runtime import dynamics
from odevit_serve.solvers import advance, memories
from odevit_serve.train.analysis import lyapunov
from odevit_serve.train.analysis.lyapunov import exponents, lipschitz, log10_bound


def linear_step(matrix: Tensor, h: float, solver: str) -> lyapunov.Step:
    """One step of x' = A x; the second field is zero."""

    def step(x: Tensor, *memory: Tensor) -> list[Tensor]:
        fields = (lambda y: y @ matrix.T, torch.zeros_like)
        x, _, kept = advance(fields, x, h, memory, solver)
        return [x, *kept]

    return step


@pytest.mark.parametrize("solver", ["euler", "ab2", "rk4"])
def test_exponents_of_a_linear_system_are_its_real_eigenvalues(solver: str) -> None:
    rates = torch.tensor([0.8, 0.1, -0.5, -1.0], dtype=torch.double)
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.double))[0]
    step = linear_step(basis @ rates.diag() @ basis.T, 0.1, solver)
    x = torch.randn(3, 1, 4, dtype=torch.double)
    found = exponents(step, x, 300, 0.1, count=4, remembered=memories(solver, "parallel"))
    assert found.shape == (3, 4)
    wanted = torch.log1p(0.1 * rates) / 0.1 if solver == "euler" else rates  # Euler's own exponents, exactly
    torch.testing.assert_close(found, wanted.expand(3, 4), atol=0.03, rtol=0)


def test_a_rotation_neither_spreads_nor_contracts() -> None:
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.double)
    found = exponents(linear_step(turn, 0.01, "rk4"), torch.ones(1, 1, 2, dtype=torch.double), 100, 0.01, count=2)
    torch.testing.assert_close(found, torch.zeros(1, 2, dtype=torch.double), atol=1e-6, rtol=0)


def test_velocity_as_tangent_gives_the_free_exponent() -> None:
    """psi is autonomous, so its velocity is carried by the same derivative: what design claims costs nothing."""
    rates = torch.tensor([0.3, -0.4], dtype=torch.double)
    field, h = rates.diag(), 0.01
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.double)
    speeds = []
    step = linear_step(field, h, "rk4")
    at = x
    for _ in range(201):
        speeds.append(float((at @ field.T).norm()))
        (at,) = step(at)
    free = dynamics.exponent(speeds[-1], speeds[0], 200 * h)
    assert float(free) == pytest.approx(0.3, abs=1e-6)


def test_exponents_through_the_models_own_integrator() -> None:
    """Against finite differences of the whole map, whose stretch a single direction's exponent must be."""
    for settings in ({"solver": "euler"}, {"solver": "ab2", "splitting": "strang"}):
        model = tiny_model(**settings).double()
        own = model.config.integration
        x = model.stem(torch.randn(2, 3, 16, 16, dtype=torch.double))
        step, remembered = lyapunov.own_step(model)
        assert remembered == memories(own.solver, own.splitting)
        found = exponents(step, x, own.steps, own.step_size, remembered=remembered)[:, 0]
        generator = torch.Generator().manual_seed(0)
        u = torch.linalg.qr(torch.randn(x[0].numel(), 1, generator=generator, dtype=torch.double))[0].view(
            1, *x.shape[1:]
        )
        with torch.no_grad():
            ends = [list(model.trajectory(x + e * u))[-1].state for e in (1e-5, -1e-5)]
        stretch = lyapunov.norm(ends[0] - ends[1]) / 2e-5
        torch.testing.assert_close(found, stretch.log() / own.horizon, atol=1e-5, rtol=1e-4)


def test_more_exponents_than_the_state_has_numbers() -> None:
    with pytest.raises(ValueError, match="5 exponents of a state of 4"):
        exponents(lambda x: (x,), torch.zeros(1, 2, 2), 1, 1.0, count=5)


def test_lipschitz_of_a_known_map() -> None:
    matrix = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.5]])
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(
        lipschitz(lambda y: y @ (turn @ matrix), x, 60), torch.full((5,), 3.0), atol=1e-3, rtol=0
    )
    # sin has slope cos: the steepest of its numbers
    x = torch.tensor([[[0.0, 1.0]], [[1.0, 1.4]]])
    torch.testing.assert_close(lipschitz(torch.sin, x, 200), torch.tensor([1.0, math.cos(1.0)]), atol=1e-4, rtol=0)


def test_lipschitz_of_psi_against_its_jacobian() -> None:
    model = tiny_model()
    x = model.stem(torch.randn(1, 3, 16, 16))
    with lyapunov.differentiable():
        jacobian = torch.autograd.functional.jacobian(model.psi, x).reshape(x.numel(), x.numel())
    wanted = torch.linalg.matrix_norm(jacobian, 2)
    assert float(lipschitz(model.psi, x, 100)[0]) == pytest.approx(float(wanted), rel=1e-3)


def test_acceleration_is_the_second_derivative() -> None:
    x = torch.tensor([[[2.0, -1.0]]])
    assert float(lyapunov.acceleration(lambda y: y**2, x)[0]) == pytest.approx(math.hypot(16, -2))  # x'' = 2 x^3


def test_the_bound_holds_for_an_ode_with_a_closed_form_and_is_close() -> None:
    """x' = x from 1 over [0, 2]: L = 1, the largest second derivative is e^2, Euler's error is known exactly."""
    for steps in (4, 16, 64):
        h = 2 / steps
        error = math.exp(2) - (1 + h) ** steps
        bound = 10 ** log10_bound(1.0, math.exp(2), h, 2.0)
        assert error < bound < 8 * error
        assert bound == pytest.approx((math.exp(2) - 1) / 2 * math.exp(2) * h)
    assert log10_bound(100.0, 1.0, 0.1, 12.0) == pytest.approx((1200 + math.log(0.1 / 200)) / math.log(10))
    assert log10_bound(0.0, 3.0, 0.5, 2.0) == pytest.approx(math.log10(1.5))
    assert log10_bound(1e-9, 3.0, 0.5, 2.0) == pytest.approx(math.log10(1.5), abs=1e-6)
    assert log10_bound(1.0, 0.0, 0.5, 2.0) == -math.inf


def test_discretisation_error_falls_with_the_step_as_the_order_says() -> None:
    x = tiny_model().double().stem(torch.randn(2, 3, 16, 16, dtype=torch.double))
    ends = {}
    for steps in (16, 32):
        model = tiny_model(steps=steps).double()
        whole, cls = lyapunov.discretisation_error(model, x, 40)
        assert whole.shape == cls.shape == (2, steps)
        assert (cls <= whole).all()
        ends[steps] = float(whole[:, -1].mean())
    assert ends[16] / ends[32] == pytest.approx(2, abs=0.25)


def test_spectral_norms() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.psi.mlp.down.weight.zero_()
        model.psi.mlp.down.weight[0, 0] = 7.0
    found = lyapunov.spectral_norms(model.psi)
    assert found["MLP down"] == {"alone": pytest.approx(7.0)}
    assert found["query"]["alone"] == pytest.approx(1.0, abs=1e-4)  # as initialised
    assert found["query"]["with norm"] != pytest.approx(1.0, abs=1e-3)
    assert found["convolution"]["alone"] == pytest.approx(1.0)  # starts as the identity
    assert "convolution" not in lyapunov.spectral_norms(tiny_model(convolution=0).psi)


def test_gain_of_a_convolution() -> None:
    kernel = torch.zeros(2, 3, 3)
    kernel[0] = 1.0  # a sum of nine: gain 9 for a flat picture
    kernel[1, 1, 1] = 2.0
    assert lyapunov.convolution_norm(kernel) == pytest.approx(9.0)
    assert lyapunov.convolution_norm(kernel[1:]) == pytest.approx(2.0)
