"""Probabilities that mean something: a temperature, and a threshold below which an answer is marked as unsure.

Both read the logits at which images exit, and their labels. The temperature is fitted on the measuring images. The
threshold is proven on the others by the same fixed-sequence test as the exit threshold: from the strictest on, "of the
answers that are not marked, more than alpha are wrong" is tested at level delta on the images that are not marked.
"""

from __future__ import annotations

import math

import numpy as np

from ..config import Confidence, Unsure
from ..errors import UserError
from ..runtime.dynamics import Floats, softmax
from .bounds import binomial_tail, upper_bound

BINS = 15  # of the expected calibration error
HOTTEST = 20.0  # temperatures are looked for from its inverse to it
LINES = 64  # thresholds on confidence that are tried
GOLDEN = (math.sqrt(5) - 1) / 2


class NoMark(UserError):
    """No threshold on confidence passed its test."""


def negative_log_likelihood(logits: Floats, labels: np.ndarray, temperature: float = 1.0) -> float:
    scaled = logits.astype(float) / temperature
    top = scaled.max(-1, keepdims=True)
    total = np.log(np.exp(scaled - top).sum(-1)) + top[:, 0]
    return float((total - scaled[np.arange(len(labels)), labels]).mean())


def fit_temperature(logits: Floats, labels: np.ndarray) -> float:
    """The temperature of the largest likelihood, by golden section: the loss has one valley in 1/temperature."""
    low, high = -math.log(HOTTEST), math.log(HOTTEST)
    loss = lambda power: negative_log_likelihood(logits, labels, math.exp(-power))  # noqa: E731
    for _ in range(40):
        width = GOLDEN * (high - low)
        if loss(high - width) <= loss(low + width):
            high = low + width
        else:
            low = high - width
    return math.exp(-(low + high) / 2)


def calibration_error(logits: Floats, labels: np.ndarray, temperature: float = 1.0) -> float:
    """Expected calibration error: the mean distance, over bins of confidence, between it and accuracy."""
    sure, right = confidences(logits, temperature), logits.argmax(-1) == labels
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs(float((sure[bins == b] - right[bins == b]).sum())) for b in range(BINS)]
    return sum(gaps) / len(labels)


def confidences(logits: Floats, temperature: float = 1.0) -> Floats:
    """Probability of the answer; that of a trajectory without numbers is below any threshold."""
    with np.errstate(invalid="ignore"):
        found = softmax(logits.astype(float) / temperature).max(-1)
    return np.where(np.isfinite(found), found, -np.inf)


def unsure_thresholds(sure: Floats, right: np.ndarray, tests: int, alpha: float) -> Floats:
    """Thresholds to test, strictest first, from the confidences and answers of the measuring images.

    The first is the one that looks easiest to prove on `tests` images like these: stricter ones leave too few unmarked.
    """
    finite = sure[np.isfinite(sure)]
    if not len(finite):
        return np.array([])
    values = np.unique([0.0, *np.quantile(finite, np.linspace(0, 1, LINES))])[::-1]

    def chance(threshold: float) -> float:
        left = sure >= threshold
        count = int(left.sum())
        rate = ((left & ~right).sum() + 0.5) / (count + 1)
        expected = round(count * tests / len(sure))
        return binomial_tail(round(rate * expected), expected, alpha)

    return values[int(np.argmin([chance(value) for value in values])) :]


def choose_unsure(sure: Floats, right: np.ndarray, thresholds: Floats, alpha: float, delta: float) -> Unsure | None:
    """The lowest threshold of the sequence that passes, with all before it."""
    chosen = None
    for threshold in thresholds:
        left = sure >= threshold
        count, wrong = int(left.sum()), int((left & ~right).sum())
        if not count or binomial_tail(wrong, count, alpha) > delta:
            break
        bound, marked = upper_bound(wrong, count, delta), 1 - count / len(sure)
        chosen = Unsure(float(threshold), alpha, delta, count, marked, wrong / count, bound)
    return chosen


def measure_confidence(
    measured: tuple[Floats, np.ndarray], tested: tuple[Floats, np.ndarray], alpha: float | None, delta: float
) -> Confidence:
    """From logits at the exit and labels, of the measuring and of the testing images."""
    logits, labels = measured
    good = np.isfinite(logits).all(-1)
    temperature = fit_temperature(logits[good], labels[good]) if good.any() else 1.0
    others, truth = tested
    whole = np.isfinite(others).all(-1)
    before, after = (calibration_error(others[whole], truth[whole], t) for t in (1.0, temperature))
    unsure = None
    if alpha is not None:
        right = logits.argmax(-1) == labels
        grid = unsure_thresholds(confidences(logits, temperature), right, len(truth), alpha)
        unsure = choose_unsure(confidences(others, temperature), others.argmax(-1) == truth, grid, alpha, delta)
        if unsure is None:
            raise NoMark(
                f"no threshold on the probability could be proven to leave at most {alpha:g} wrong among the answers "
                f"that are not marked, with confidence {1 - delta:g}: allow more, or give more images; "
                "nothing was changed"
            )
    return Confidence(temperature, int(good.sum()), before, after, unsure)
