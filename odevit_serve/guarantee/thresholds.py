"""Thresholds of an exit rule: which to try, what each would give on recorded trajectories, and which is proven.

What is measured and what is tested must be different images; calibrate.py says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..runtime.dynamics import Floats
from .bounds import binomial_tail, upper_bound
from .recording import Followed

MEASURED = 0.2  # part of the images that measures; the rest tests
LYAPUNOV_SHARE = 0.25  # of epsilon, that the limit on Lyapunov times may spend on the measuring images


def images_needed(epsilon: float, delta: float) -> int:
    """How many images must be there for a threshold that never errs on them to be proven."""
    tests = math.ceil(math.log(delta) / math.log1p(-epsilon) - 1e-9)
    count = math.floor(tests / (1 - MEASURED))
    while count - measuring(count) < tests:
        count += 1
    return count


def measuring(count: int) -> int:
    """How many of `count` images measure rather than test."""
    return round(MEASURED * count)


def grid(recording: Followed, scores: Floats, lines: int = 512) -> Floats:
    """Thresholds to test, strictest first: ranks of the scores, and of those at which an answer was still to change."""
    before = scores[:, :-1]
    wrong = recording.answers[:, :-1] != recording.answers[:, -1:]
    still = np.where(wrong, before, -np.inf).max(1, initial=-np.inf)
    finite = before[np.isfinite(before)]
    if not len(finite):
        return np.array([])
    ranks = np.linspace(0, 1, lines)
    values: list[Floats] = [np.quantile(finite, ranks)]
    if np.isfinite(still).any():
        values.append(np.quantile(still[np.isfinite(still)], ranks))
    return np.unique(np.concatenate(values))[::-1]


def lyapunov_limit(recording: Followed, epsilon: float, target: str = "agreement") -> float | None:
    """The smallest limit on the Lyapunov times that, by itself, is expected to spend at most its share of epsilon.

    Expected by the median of what these images leave possible, so that few images set no limit. None as well where no
    trajectory grows before its last step: nothing would ever reach a limit.
    """
    never = np.full(recording.answers.shape, -np.inf)
    times = recording.lyapunov_times[:, :-1]
    limit = None
    for candidate in np.unique(times[times > 0])[::-1]:
        steps = recording.exit_steps(never, np.inf, float(candidate))
        wrong = int((recording.errors(steps, target) & recording.finite).sum())
        if upper_bound(wrong, len(recording), 0.5) > LYAPUNOV_SHARE * epsilon:
            break
        limit = float(candidate)
    return limit


def fewest_steps(
    recording: Followed, scores: Floats, epsilon: float, target: str = "agreement", lyapunov: float | None = None
) -> tuple[float, float]:
    """Mean steps and errors at the lowest threshold that errs on at most epsilon of these images (an estimate)."""
    best = (float(recording.steps), float((~recording.finite).mean()))
    for threshold in grid(recording, scores):
        steps = recording.exit_steps(scores, float(threshold), lyapunov)
        wrong = float(recording.errors(steps, target).mean())
        if wrong > epsilon:
            break
        best = (float(steps.mean()), wrong)
    return best


def choose(
    recording: Followed,
    scores: Floats,
    thresholds: Sequence[float] | Floats,
    epsilon: float,
    delta: float,
    target: str = "agreement",
    lyapunov: float | None = None,
) -> float | None:
    """Fixed-sequence test from the first threshold (the strictest) on; the last that passes, or None."""
    chosen = None
    for threshold in thresholds:
        wrong = int(recording.errors(recording.exit_steps(scores, float(threshold), lyapunov), target).sum())
        if binomial_tail(wrong, len(recording), epsilon) > delta:
            break
        chosen = float(threshold)
    return chosen


def table_rows(thresholds: Floats, chosen: float, lines: int = 12) -> list[float]:
    """A readable choice of the thresholds, the chosen one among them, with some below it."""
    at = int(np.flatnonzero(thresholds == chosen)[0])
    end = min(len(thresholds), at + 1 + max(3, (at + 1) // 2))
    picks = {at, *np.unique(np.linspace(0, end - 1, lines).astype(int)).tolist()}
    return [float(thresholds[i]) for i in sorted(picks)]
