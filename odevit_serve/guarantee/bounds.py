"""Exact bounds on the chance behind a count of errors."""

from __future__ import annotations

import math

import numpy as np


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """P(Binomial(trials, chance) <= successes)."""
    if successes >= trials or chance <= 0:
        return 1.0
    if successes < 0 or chance >= 1:
        return 0.0
    counts = np.arange(1, successes + 1)
    choose = np.concatenate([[0.0], np.cumsum(np.log((trials - counts + 1) / counts))])  # ln C(trials, i)
    terms = (
        choose
        + np.arange(successes + 1) * math.log(chance)
        + np.arange(trials, trials - successes - 1, -1) * (math.log1p(-chance))
    )
    largest = float(terms.max())
    return min(1.0, math.exp(largest) * float(np.exp(terms - largest).sum()))


def upper_bound(successes: int, trials: int, delta: float) -> float:
    """Clopper-Pearson: the largest chance under which so few successes still have probability delta or more."""
    if successes >= trials:
        return 1.0
    low, high = successes / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(successes, trials, middle) > delta else (low, middle)
    return high
