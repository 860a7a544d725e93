"""The tests that may be looked at after every image: no more false alarms than promised, and alarms when due."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from odevit_serve.guarantee.audit import (
    BETS,
    RELEASE,
    RESERVE,
    Bets,
    Betting,
    ThresholdSearch,
    candidates,
    confidence_sequence,
    reserve,
)


def alarms(
    rate: float, epsilon: float, delta: float, streams: int, length: int, quiet: int = 0, before: float = 0.0
) -> np.ndarray:
    """The image at which each stream raises the alarm, or infinity; up to image `quiet` they differ at rate `before`.

    By gaps between differences, as evidence can only rise at one: 2,000 streams of 100,000 images in seconds.
    """
    rng, bets = np.random.default_rng(0), Bets.against(epsilon)
    stakes, at, first = bets.start((streams,)), np.zeros(streams), np.full(streams, np.inf)
    for difference in itertools.count(1):
        end = at + (rng.geometric(before, streams) if quiet else np.zeros(streams))
        late = end > quiet if quiet else np.ones(streams, bool)
        end = np.where(late, np.maximum(at, quiet) + rng.geometric(rate, streams), end)
        stakes, evidence = bets.differ(stakes, end - at - 1, difference)
        at = end
        hit = (evidence * delta >= 1) & (at <= length)
        first = np.where(hit, np.minimum(first, at), first)
        if (at > length).all():
            return first
    raise AssertionError


def test_false_alarms_in_2000_streams_of_100000_images() -> None:
    """At disagreement of exactly epsilon, where the claim is only just true."""
    false = int(np.isfinite(alarms(0.01, 0.01, 0.05, 2000, 100_000)).sum())
    assert false <= stats.binom.ppf(0.999, 2000, 0.05)  # 131: what chance exceeds once in 1,000 such tests at rate 0.05
    assert false > 20  # and the test is not idle: this is where it is hardest


def test_an_alarm_comes_soon_after_a_late_change() -> None:
    """After 10,000 images at 0.7 epsilon, the rate rises to 5 epsilon: 300 images at the median, 750 in 99 of 100."""
    delay = alarms(0.05, 0.01, 0.05, 500, 14_000, quiet=10_000, before=0.007) - 10_000
    in_time = delay[delay > 0]
    assert len(in_time) > 480
    assert np.median(in_time) <= 300
    assert np.quantile(in_time, 0.99) <= 750


def evidence_of(stream: tuple[bool, ...], epsilon: float) -> float:
    """By the definition: every part of the money on its own, image by image."""
    rates = np.geomspace(1.25 * epsilon, (1 + epsilon) / 2, BETS)
    odds = (rates - epsilon) / (epsilon * (1 - epsilon))
    stakes, differences = np.full(BETS, 0.5 / BETS), 0
    for differs in stream:
        stakes = stakes * (1 + odds * (differs - epsilon))
        if differs:
            stakes = stakes + (reserve(differences) - reserve(differences + 1)) / BETS
            differences += 1
    return float(stakes.sum()) + reserve(differences)


@settings(max_examples=50, deadline=None)
@given(stream=st.lists(st.booleans(), max_size=60), epsilon=st.sampled_from([0.001, 0.01, 0.2]))
def test_evidence_is_the_money_of_the_bets(stream: list[bool], epsilon: float) -> None:
    test, peak = Betting(epsilon, 0.05), 1.0
    for count, differs in enumerate(stream, 1):
        test.add(differs)
        wanted = evidence_of(tuple(stream[:count]), epsilon)
        assert test.evidence == pytest.approx(wanted, rel=1e-9)
        peak = max(peak, wanted)
    assert test.rejected == (peak >= 20)
    assert (test.images, test.differences) == (len(stream), sum(stream))


@pytest.mark.parametrize("rate", [0.2, 0.1, 0.0])
def test_evidence_is_worth_at_most_1_while_the_claim_is_true(rate: float) -> None:
    """Over all streams of 10 images: exactly 1 at epsilon, less below."""
    worth = 0.0
    for stream in itertools.product((False, True), repeat=10):
        worth += rate ** sum(stream) * (1 - rate) ** (10 - sum(stream)) * evidence_of(stream, 0.2)
    assert worth == pytest.approx(1.0) if rate == 0.2 else worth < 1


def test_the_mean_evidence_of_replicas_is_evidence() -> None:
    """300 times four replicas at a disagreement of exactly epsilon, looked at after each of 2,000 rounds of images.

    The mean reaches 1/delta as seldom as allowed. A test of the largest of the four would be wrong more often.
    """
    epsilon, delta, rng = 0.05, 0.1, np.random.default_rng(0)
    bets = Bets.against(epsilon)
    stakes, differences = bets.start((300, 4)), np.zeros((300, 4))
    mean, largest = np.zeros(300, bool), np.zeros(300, bool)
    for _ in range(2000):
        differs = rng.random((300, 4)) < epsilon
        stakes = stakes * np.where(differs[..., None], bets.gain, np.exp(bets.loss))
        before = RESERVE * (1 + differences) ** -RELEASE
        differences = differences + differs
        after = RESERVE * (1 + differences) ** -RELEASE
        stakes = stakes + ((before - after) / BETS)[..., None]
        evidence = after + stakes.sum(-1)
        mean |= evidence.mean(1) >= 1 / delta
        largest |= evidence.max(1) >= 1 / delta
    assert mean.sum() <= stats.binom.ppf(0.999, 300, delta)
    assert largest.sum() > stats.binom.ppf(0.999, 300, delta)


@settings(max_examples=100, deadline=None)
@given(images=st.integers(0, 5000), share=st.floats(0, 1), delta=st.sampled_from([0.01, 0.05, 0.3]))
def test_a_confidence_sequence_has_the_rates_that_stand(images: int, share: float, delta: float) -> None:
    differences = round(share * images)
    low, high = confidence_sequence(differences, images, delta)
    assert 0 <= low <= (differences / images if images else 0) <= high <= 1
    for rate in (low, high):
        if 0 < rate < 1:
            mixture = stats.betabinom.logpmf(differences, images, 0.5, 0.5)  # both have the same number of orders
            assert mixture - stats.binom.logpmf(differences, images, rate) == pytest.approx(-math.log(delta), abs=1e-5)


def test_a_confidence_sequence_holds_at_all_times_together() -> None:
    rng, broken = np.random.default_rng(0), 0
    for _ in range(60):
        counts = np.cumsum(rng.random(1500) < 0.03)
        looks = np.unique(np.geomspace(1, 1500, 40).astype(int))
        bounds = [confidence_sequence(int(counts[n - 1]), int(n), 0.1) for n in looks]
        broken += any(not low <= 0.03 <= high for low, high in bounds)
    assert broken <= stats.binom.ppf(0.999, 60, 0.1)


def recordings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [n,6] that rise, and answers that change the less the higher the score."""
    rng = np.random.default_rng(seed)
    scores = np.cumsum(rng.gamma(1.0, 1.0, (count, 6)), 1)
    answers = (rng.random((count, 6)) < 0.5 * np.exp(-0.7 * scores)).astype(int)
    answers[:, -1] = 0
    return scores, answers


def test_a_search_claims_a_threshold_falsely_in_at_most_delta_of_streams() -> None:
    grid = np.linspace(6, 0, 25)

    def rates(scores: np.ndarray, answers: np.ndarray) -> np.ndarray:
        ends = scores[:, None, :] >= grid[:, None]
        ends[..., -1] = True
        return answers[np.arange(len(answers))[:, None], ends.argmax(-1)].mean(0)

    truth = rates(*recordings(100_000, 1))
    false, found = 0, []
    for seed in range(60):
        search = ThresholdSearch(grid.tolist(), 0.05, 0.1)
        worst = math.inf
        for scores, answers in zip(*recordings(400, seed + 2)):
            search.add(scores, answers)
            worst = min(worst, search.proven or math.inf)  # at any time
        found.append(worst)
        false += worst < math.inf and truth[np.flatnonzero(grid == worst)[0]] > 0.05
    assert false <= stats.binom.ppf(0.999, 60, 0.1)
    assert np.isfinite(found).all()  # and it does find one


def test_a_search_needs_every_stricter_threshold_and_counts_nan_as_an_error() -> None:
    search = ThresholdSearch([3.0, 2.0, 1.0], 0.05, 0.05)
    for _ in range(200):  # errs between 2 and 3, never elsewhere
        search.add(np.array([1.5, 2.5, 9.0]), np.array([0, 1, 0]))
    assert search.proven == 3.0
    search = ThresholdSearch([3.0], 0.05, 0.05)
    for _ in range(200):
        search.add(np.array([4.0, 4.0]), np.array([0, 0]), finite=False)
    assert search.proven is None


def test_candidates_go_from_strict_to_the_least() -> None:
    assert candidates([], 0.3) == [0.3]
    found = candidates([np.array([0.1, 0.5, np.nan, 9.0]), np.array([0.7, np.inf, 9.0])], 0.3)
    assert found[0] == 0.7
    assert found[-1] == 0.3
    assert found == sorted(found, reverse=True)
