"""Exact bounds, against scipy."""

from __future__ import annotations

import pytest
from scipy import stats

from odevit_serve.guarantee.bounds import binomial_tail, upper_bound


def test_binomial_against_scipy() -> None:
    for n in (1, 2, 30, 299, 5000, 100_000):
        for k in {0, 1, n // 100, n // 10, n // 2, n - 1, n}:
            for p in (0.0, 1e-6, 0.01, 0.05, 0.5, 0.99, 1.0):
                assert binomial_tail(k, n, p) == pytest.approx(stats.binom.cdf(k, n, p), rel=1e-8, abs=1e-300)
    assert binomial_tail(-1, 5, 0.5) == 0.0


def test_upper_bound_against_scipy() -> None:
    for n in (10, 299, 4000):
        for k in (0, 1, n // 50, n // 2, n - 1):
            for delta in (0.001, 0.05, 0.3):
                assert upper_bound(k, n, delta) == pytest.approx(stats.beta.ppf(1 - delta, k + 1, n - k), rel=1e-9)
    assert upper_bound(7, 7, 0.05) == 1.0
