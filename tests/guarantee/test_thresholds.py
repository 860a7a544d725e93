"""The sequence of tests, and 200 splits that count how often the guarantee fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from odevit_serve.guarantee.bounds import binomial_tail, upper_bound
from odevit_serve.guarantee.recording import Recording
from odevit_serve.guarantee.thresholds import choose, grid, images_needed, lyapunov_limit, measuring
from odevit_serve.runtime import exits


def test_images_needed() -> None:
    tested = images_needed(0.01, 0.05) - measuring(images_needed(0.01, 0.05))
    assert tested == 299
    for epsilon, delta in ((0.01, 0.05), (0.05, 0.1), (0.001, 0.01)):
        count = images_needed(epsilon, delta)
        assert binomial_tail(0, count - measuring(count), epsilon) <= delta
        assert binomial_tail(0, count - 2 - measuring(count - 2), epsilon) > delta


SCORE = exits.RULES["margin"]


def synthetic(count: int, steps: int, rng: np.random.Generator) -> Recording:
    """Margins that rise unevenly; the chance that an answer still changes falls with them."""
    margin = np.cumsum(rng.gamma(1.0, 1.0, (count, steps)), 1)
    final = rng.integers(0, 10, count)
    wrong = rng.random((count, steps)) < 0.5 * np.exp(-0.7 * margin)
    wrong[:, -1] = False
    answers = np.where(wrong, (final[:, None] + 1) % 10, final[:, None])
    zeros = np.zeros((count, steps))
    logits = np.eye(10, dtype=np.float32)[answers]
    return Recording(1.0, logits, margin, zeros, zeros, zeros, zeros, np.zeros((count, steps + 1)))


def violations(population: Recording, count: int, epsilon: float, delta: float, splits: int = 200) -> tuple[int, int]:
    """Calibrate on `count` images drawn at random from a population; count the splits in which the truth is above."""
    failed = chosen = 0
    truth = population.scores(SCORE)
    for split in range(splits):
        rows = np.random.default_rng(split).choice(
            len(population), count
        )  # with replacement: the population is the law
        first = measuring(count)
        measured, tested = population.subset(rows[:first]), population.subset(rows[first:])
        thresholds = grid(measured, measured.scores(SCORE), lines=64)
        threshold = choose(tested, tested.scores(SCORE), thresholds, epsilon, delta)
        if threshold is not None:
            chosen += 1
            failed += float(population.errors(population.exit_steps(truth, threshold)).mean()) > epsilon
    return failed, chosen


def allowed(delta: float, splits: int = 200) -> int:
    """Violations that chance alone exceeds once in a thousand repetitions of this test, at a true rate of delta."""
    return int(stats.binom.ppf(0.999, splits, delta))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.05, 0.1), (0.1, 0.2)])
def test_guarantee_on_synthetic_scores(epsilon: float, delta: float) -> None:
    population = synthetic(40_000, 10, np.random.default_rng(0))
    failed, chosen = violations(population, 600, epsilon, delta)
    assert chosen == 200
    assert failed <= allowed(delta)  # 35 and 57 of 200
    assert failed > 0  # and the bound is not idle: it is tight enough to be hit


def test_the_test_can_fail() -> None:
    """Without the bound (taking the observed rate for the true one) half of the splits break the promise."""
    population = synthetic(40_000, 10, np.random.default_rng(0))
    broken, truth = 0, population.scores(SCORE)
    for split in range(100):
        rows = np.random.default_rng(split).choice(len(population), 600)
        measured, tested = population.subset(rows[:120]), population.subset(rows[120:])
        scores, best = tested.scores(SCORE), None
        for threshold in grid(measured, measured.scores(SCORE), lines=64):
            if tested.errors(tested.exit_steps(scores, threshold)).mean() > 0.05:
                break
            best = threshold
        assert best is not None
        broken += float(population.errors(population.exit_steps(truth, best)).mean()) > 0.05
    assert broken > allowed(0.1, 100)


def test_a_trajectory_without_numbers_is_an_error_at_every_threshold() -> None:
    recording = synthetic(400, 5, np.random.default_rng(1))
    recording.logits[7, 2:] = np.nan
    for threshold in (-np.inf, 0.5, np.inf):
        assert recording.errors(recording.exit_steps(recording.scores(SCORE), threshold))[7]
    recording.logits[:40] = np.nan
    thresholds = grid(recording, recording.scores(SCORE))
    assert choose(recording, recording.scores(SCORE), thresholds, 0.05, 0.1) is None


def test_guarantee_on_real_scores(real: Recording) -> None:
    failed, chosen = violations(real, 500, 0.05, 0.1)
    assert chosen == 200
    assert failed <= allowed(0.1)


def test_the_lyapunov_limit_is_the_smallest_that_spends_its_share(real: Recording) -> None:
    never = np.full(real.answers.shape, -np.inf)
    limit = lyapunov_limit(real, 0.2)
    assert limit is not None
    wrong = int(real.errors(real.exit_steps(never, np.inf, limit)).sum())
    assert upper_bound(wrong, len(real), 0.5) <= 0.25 * 0.2
    assert (real.exit_steps(never, np.inf, limit) < 8).any()  # it decides
    smaller = max(t for t in np.unique(real.lyapunov_times[:, :-1]) if t < limit)
    wrong = int(real.errors(real.exit_steps(never, np.inf, float(smaller))).sum())
    assert upper_bound(wrong, len(real), 0.5) > 0.25 * 0.2
    assert lyapunov_limit(real.subset(np.arange(200)), 0.01) is None  # too few to know
    calm = replace(real, exponent=-np.abs(real.exponent), _scores={})
    assert lyapunov_limit(calm, 0.2) is None
