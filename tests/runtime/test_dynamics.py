"""The free numbers against exact ones: linear ODEs with known spectra, psi itself by JVPs, brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import tiny_model
from scipy.linalg import expm

from odevit_serve.runtime import dynamics

RNG = np.random.default_rng(0)


def test_margin_is_the_distance_to_the_nearest_boundary() -> None:
    weight, bias = RNG.normal(size=(7, 5)), RNG.normal(size=7)
    x = RNG.normal(size=(40, 5))
    margin = dynamics.margin(x @ weight.T + bias, weight)
    for point, distance in zip(x, margin):
        top = int((weight @ point + bias).argmax())
        directions = RNG.normal(size=(4000, 5))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        inside = point + 0.999 * distance * directions
        assert ((inside @ weight.T + bias).argmax(1) == top).all()  # nowhere nearer does the answer change ...
        across = weight - weight[top]
        across = np.delete(across, top, 0)
        across /= np.linalg.norm(across, axis=1, keepdims=True)
        outside = point + 1.001 * distance * across
        assert ((outside @ weight.T + bias).argmax(1) != top).any()  # ... and just past it, somewhere it does


def test_margin_of_twins_and_of_one_class() -> None:
    weight = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    logits = np.array([[2.0, 1.0, 0.5]])
    assert dynamics.margin(logits, weight)[0] == pytest.approx(1.5 / math.sqrt(2))
    assert np.isinf(dynamics.margin(np.array([[3.0]]), np.ones((1, 2)))[0])


@pytest.mark.parametrize("rates", [(-2.0, -0.5, -0.1), (0.3, -1.0, -3.0), (0.0, 0.0, 0.0)])
def test_exponent_of_linear_odes(rates: tuple[float, ...]) -> None:
    """x' = Ax: the velocity is Ax, and grows exactly as exp(At) says."""
    basis = np.linalg.qr(RNG.normal(size=(3, 3)))[0]
    matrix = basis @ np.diag(rates) @ basis.T
    for i, rate in enumerate(rates):  # along an eigenvector the free exponent is the eigenvalue at any time
        speeds = [np.linalg.norm(matrix @ expm(matrix * t) @ basis[:, i]) for t in (0.0, 0.7, 4.0)]
        if rate:
            assert dynamics.exponent(speeds[1:], speeds[0], [0.7, 4.0]) == pytest.approx([rate, rate])
    if any(rates):  # from anywhere else it tends to the largest that is not nought
        x = basis.sum(1)
        first, late = np.linalg.norm(matrix @ x), np.linalg.norm(matrix @ expm(matrix * 200) @ x)
        assert dynamics.exponent(late, first, 200.0) == pytest.approx(max(rates), abs=0.02)


def test_exponent_edges() -> None:
    assert np.isnan(dynamics.exponent(1.0, 1.0, 0.0))
    assert np.isfinite(dynamics.exponent(0.0, 1.0, 1.0))
    assert dynamics.lyapunov_time([0.5, 0.0, -2.0]).tolist() == [2.0, math.inf, math.inf]


def test_free_exponent_of_psi_equals_the_tangent_one() -> None:
    """Carry v(0) by JVPs along the trajectory (the exact finite-time exponent in that direction) and compare."""
    import torch

    model = (
        tiny_model(attention="l2", convolution=0).double().requires_grad_(False)
    )  # torch has no JVP of its fused dot attention
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    errors = []
    for steps in (40, 80):
        h, horizon = 4.0 / steps, 4.0
        x = model.stem(images)
        first = tangent = model.psi(x)
        for _ in range(steps):
            velocity, change = torch.func.jvp(model.psi, (x,), (tangent,))
            x, tangent = x + h * velocity, tangent + h * change
        size = lambda v: v.flatten(1).norm(dim=1).detach().numpy()  # noqa: E731
        exact = dynamics.exponent(size(tangent), size(first), horizon)
        free = dynamics.exponent(size(model.psi(x)), size(first), horizon)
        assert np.abs(exact).max() > 0.03  # there is something to measure
        errors.append(np.abs(free - exact).max())
    assert errors[0] < 6e-3
    assert errors[1] < 0.6 * errors[0]  # they differ by the step only: half the step, half the error


@pytest.mark.parametrize("rate", [-3.0, -0.4, 0.0, 0.2])
def test_extrapolated_travel_is_exact_for_exponential_motion(rate: float) -> None:
    """x' = rate (x - centre) along a line: the path left is known at every time."""
    start, horizon = 2.0, 5.0
    for step in range(1, 10):
        h = horizon / 10
        before, now = (step - 1) * h, step * h  # speed is taken at the start of the step
        speed = start * abs(rate) * math.exp(rate * before) if rate else start
        left = start * abs(math.exp(rate * horizon) - math.exp(rate * now)) if rate else start * (horizon - now)
        assert dynamics.extrapolated_travel(speed, rate, h, horizon - before) == pytest.approx(left)


def test_extrapolated_travel_bounds_the_distance_in_a_contracting_ode() -> None:
    """A contracting linear ODE in many directions: path by the local exponent of the last step, against the truth."""
    rates = -np.array([0.2, 0.5, 1.0, 2.0])
    x0, horizon, steps = np.ones(4), 6.0, 60
    h = horizon / steps
    state = lambda t: x0 * np.exp(rates * t)  # noqa: E731
    for step in (20, 40, 55):
        t = step * h
        speeds = [np.linalg.norm(rates * state(t - k * h)) for k in (2, 1)]
        local = dynamics.exponent(speeds[1], speeds[0], h)
        guess = dynamics.extrapolated_travel(speeds[1], local, h, horizon - t + h)
        true = np.linalg.norm(state(horizon) - state(t))
        assert true <= guess * 1.5
        assert guess == pytest.approx(true, rel=0.35)


def test_travel_to_end_and_softmax_and_divergence() -> None:
    states = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 0.0]])
    assert dynamics.travel_to_end(states).tolist() == [3.0, 4.0, 0.0]
    p, q = dynamics.softmax(np.array([[0.0, 0.0], [1000.0, 0.0]]))
    assert p.tolist() == [0.5, 0.5]
    assert q.tolist() == [1.0, 0.0]
    assert dynamics.divergence(p, p) == 0
    assert dynamics.divergence(q, p) == pytest.approx(math.log(2))
