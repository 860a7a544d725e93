"""The numbers an exit rule looks at, as pure functions of numpy arrays.

psi does not depend on time, so the velocity v = psi(x) itself solves dv/dt = J(x) v along the trajectory: its growth is
a finite-time Lyapunov exponent in the direction of the flow, and costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating]
TINY = 1e-30


def softmax(logits: Floats) -> Floats:
    """Probabilities along the last axis."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def divergence(p: Floats, q: Floats) -> Floats:
    """Kullback-Leibler divergence of q from p along the last axis, in nats."""
    return (p * (np.log(np.maximum(p, TINY)) - np.log(np.maximum(q, TINY)))).sum(-1)


def margin(logits: Floats, head_weight: Floats) -> Floats:
    """Distance of the CLS state to the nearest decision boundary of a linear head: min_j (z_i - z_j) / |w_i - w_j|.

    `step.onnx` computes the same inside the graph; this is what it is tested against. Classes with equal weights
    have no boundary between them, and a single class has none at all: infinitely far.
    """
    top = logits.argmax(-1)
    rows = np.arange(len(logits))
    gap = logits[rows, top][:, None] - logits  # [B,C]
    apart = np.linalg.norm(head_weight[top][:, None] - head_weight[None], axis=-1)  # [B,C]
    distance = np.divide(gap, apart, out=np.full(gap.shape, np.inf), where=apart > 0)
    return distance.min(-1)


def exponent(speed: ArrayLike, first: ArrayLike, elapsed: ArrayLike) -> Floats:
    """Finite-time Lyapunov exponent ln(speed / first) / elapsed; NaN where no time has passed."""
    speed, first, elapsed = np.asarray(speed, float), np.asarray(first, float), np.asarray(elapsed, float)
    growth = np.log(np.maximum(speed, TINY) / np.maximum(first, TINY))
    return np.divide(growth, elapsed, out=np.full(np.broadcast(growth, elapsed).shape, np.nan), where=elapsed > 0)


def lyapunov_time(exponents: ArrayLike) -> Floats:
    """1 / exponent where it is positive; elsewhere the trajectory can be trusted for ever."""
    values = np.asarray(exponents, float)
    return np.divide(1.0, values, out=np.full(values.shape, np.inf), where=values > 0)


def extrapolated_travel(speed: ArrayLike, exponents: ArrayLike, start: ArrayLike, end: ArrayLike) -> Floats:
    """Length of the path from `start` to `end` (times since `speed` was taken) if speed goes on as exp(exponent t)."""
    rate = np.nan_to_num(np.asarray(exponents, float))
    start, end = np.asarray(start, float), np.asarray(end, float)
    steady = np.abs(rate) < 1e-9
    safe = np.where(steady, 1.0, rate)
    with np.errstate(over="ignore"):
        grown = (np.expm1(safe * end) - np.expm1(safe * start)) / safe
    return np.asarray(speed, float) * np.where(steady, end - start, grown)


def travel_to_end(states: Floats) -> Floats:
    """Distance from each state of a trajectory [steps + 1, D] to its last."""
    return np.linalg.norm(states[-1] - states, axis=-1)
