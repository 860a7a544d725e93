"""Statistics with planted answers, and against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from odevit_serve.train.analysis.statistics import auroc, correlation, flat_from, ranks, region


def test_planted_auroc() -> None:
    """Scores of two normal distributions that lie d apart: AUROC is Phi(d / sqrt 2)."""
    random = np.random.default_rng(0)
    flags = np.arange(20_000) % 4 == 0
    found = auroc(random.normal(size=20_000) + 1.0 * flags, flags)
    wanted = stats.norm.cdf(1 / math.sqrt(2))
    assert found.value == pytest.approx(wanted, abs=0.01)
    assert found.low < wanted < found.high
    assert 0.01 < found.high - found.low < 0.03


def test_auroc_at_its_ends_and_with_ties() -> None:
    flags = [False, False, True, True]
    assert auroc([0, 1, 2, 3], flags).value == 1
    assert auroc([3, 2, 1, 0], flags).value == 0
    assert auroc([5, 5, 5, 5], flags).value == 0.5
    assert auroc([0, 1, 1, 2], flags).value == pytest.approx(0.875)
    assert auroc([-math.inf, 0, 1, math.inf], flags).value == 1
    assert math.isnan(auroc([1, 2], [True, True]).value)
    assert auroc([1, 2], [True, True]).to_dict() == {"value": None, "low": None, "high": None}


def test_auroc_is_the_rank_test() -> None:
    random = np.random.default_rng(1)
    score, flags = random.integers(0, 9, 300), random.random(300) < 0.3
    wanted = stats.mannwhitneyu(score[flags], score[~flags]).statistic / (flags.sum() * (~flags).sum())
    assert auroc(score, flags).value == pytest.approx(wanted)
    np.testing.assert_array_equal(ranks(score.astype(float)), stats.rankdata(score))


def test_known_correlation() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=5000)
    y = 0.6 * x + 0.8 * random.normal(size=5000)  # correlation 0.6
    found = correlation(x, y)
    assert found.low < 0.6 < found.high
    theirs = stats.pearsonr(x, y)
    interval = theirs.confidence_interval(0.95)
    assert found == pytest.approx((theirs.statistic, interval.low, interval.high))


def test_the_interval_holds_as_often_as_it_says() -> None:
    random = np.random.default_rng(2)
    held = 0
    for _ in range(400):
        x = random.normal(size=12)
        found = correlation(x, -0.5 * x + math.sqrt(0.75) * random.normal(size=12))
        held += found.low <= -0.5 <= found.high
    assert 0.91 < held / 400 < 0.98


def test_correlation_without_an_answer() -> None:
    assert math.isnan(correlation([1, 2, 3], [1, 2, 3]).value)
    assert math.isnan(correlation([1, 1, 1, 1], [1, 2, 3, 4]).value)
    assert correlation([1, 2, 3, 4, math.nan], [-2, -4, -6, -8, 0]).value == pytest.approx(-1)


def test_region_of_agreement() -> None:
    far = np.arange(100.0)
    assert region(far, far < 60) == 62  # 60 of 63 agree; of 64 that is less than 95%
    assert region(far, far < 60, share=1.0) == 59
    assert region(far, np.zeros(100, bool)) is None
    assert region(far, np.ones(100, bool)) == 99
    shuffled = np.random.default_rng(0).permutation(100)
    assert region(far[shuffled], (far < 60)[shuffled], share=1.0) == 59


def test_where_a_curve_is_flat() -> None:
    steps, quality = [2, 4, 6, 8, 16], [0.3, 0.697, 0.71, 0.70, 0.2]
    assert flat_from(steps, quality, 8) == 4
    assert flat_from(steps, quality, 8, slack=0.001) == 6
    assert flat_from(steps[::-1], quality[::-1], 8) == 4
    assert flat_from([4, 6, 8], [0.9, 0.1, 0.8], 8) == 8  # not flat on the way
