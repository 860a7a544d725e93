"""What a finished training says of itself: intervals, what its images can prove, and the worst pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from odevit_serve.guarantee.thresholds import images_needed
from odevit_serve.train.finish import Confusion, interval, smallest_epsilon, worst_pair


@given(st.integers(0, 60), st.integers(1, 60))
def test_the_interval_is_clopper_pearsons(right: int, count: int) -> None:
    right = min(right, count)
    expected = binomtest(right, count).proportion_ci(method="exact")
    assert interval(right, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


@given(st.integers(2, 3000), st.sampled_from([0.01, 0.05, 0.2]))
def test_the_smallest_epsilon_is_what_so_many_images_can_prove(count: int, delta: float) -> None:
    epsilon = smallest_epsilon(count, delta)
    if epsilon < 1:
        assert images_needed(epsilon, delta) <= count
    if 0.001 < epsilon < 1:
        assert images_needed(epsilon - 0.00101, delta) > count


def test_the_worst_pair() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    answers = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    assert worst_pair(answers, labels, ("a", "b", "c")) == Confusion("a", "b", 2, 5)
    assert worst_pair(labels, labels, ("a", "b", "c")) is None
