"""Whether a guarantee still holds, watched image by image: tests that may be looked at after each of them.

The claim under test: an audited answer differs from the full-depth answer with probability at most epsilon, whatever
came before. Evidence against it is the money of somebody who starts with 1 and bets on differences at odds that are
fair when the probability is epsilon: while the claim is true, that money reaches 1/delta with probability at most delta
at any time at all (Ville's inequality), so it may be watched for ever and the test stopped whenever one likes.

`Betting` spreads the money over several bets, each made for one rate of disagreement. Half of it is held back and put
on the bets little by little, one part after each difference, so that a change that comes late, after the early bets
have lost all they had, still meets fresh money. `ThresholdSearch` bets the other way round, on agreement, at each of
a fixed sequence of thresholds. Nothing here knows of servers or models.

Of several streams, such as those of replicas, the mean of the evidence is evidence again: one who spreads the money
over all of them. Counts of different streams are not added, since which stream is looked at when may depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..runtime.dynamics import Floats

BETS = 12  # rates of disagreement that money is put on
RESERVE = 0.5  # of the money that is held back at first
RELEASE = 0.5  # what is left of the reserve after j differences is RESERVE * (1 + j) ** -RELEASE
LARGEST = 1e290  # money stops growing there
LOWER_RATES = (1e-3, 0.1, 0.25, 0.5, 0.75)  # of epsilon: rates that a search for a threshold bets on


@dataclass(frozen=True)
class Bets:
    """What each bet gains by a difference and loses by an agreement, as factors of what was put on it."""

    epsilon: float
    gain: Floats
    loss: Floats  # logarithms: agreements come in long rows

    @classmethod
    def against(cls, epsilon: float) -> Bets:
        """Rates from a little above epsilon to half way to 1. At rate epsilon, each bet is worth 1 on average."""
        rates = np.geomspace(min(1.25 * epsilon, (1 + epsilon) / 2), (1 + epsilon) / 2, BETS)
        return cls(epsilon, rates / epsilon, np.log((1 - rates) / (1 - epsilon)))

    def start(self, streams: tuple[int, ...] = ()) -> Floats:
        """The stakes [..., bets] of streams that begin."""
        return np.full((*streams, BETS), (1 - RESERVE) / BETS)

    def differ(self, stakes: Floats, agreements: Floats | int, differences: int) -> tuple[Floats, Floats]:
        """After a row of agreements, one more difference, the `differences`-th: new stakes, and all money just then.

        Money is at its peak right after a difference, so that this is where an alarm can come.
        """
        row = np.asarray(agreements, float)[..., None]
        stakes = np.minimum(stakes * np.exp(row * self.loss) * self.gain, LARGEST)
        money = reserve(differences - 1) + stakes.sum(-1)
        released = reserve(differences - 1) - reserve(differences)
        return stakes + released / BETS, money


def reserve(differences: int) -> float:
    """The money that is held back after so many differences."""
    return RESERVE * (1 + differences) ** -RELEASE


class Betting:
    """The test of one stream. `evidence` is an e-value at any time: below 1/delta, the claim stands."""

    def __init__(self, epsilon: float, delta: float):
        self.epsilon, self.delta = epsilon, delta
        self.images = self.differences = 0
        self.peak = 1.0
        self._bets = Bets.against(epsilon)
        self._stakes = self._bets.start()
        self._agreements = 0  # in a row, so far

    def add(self, differs: bool) -> None:
        self.images += 1
        if not differs:
            self._agreements += 1
            return
        self.differences += 1
        self._stakes, money = self._bets.differ(self._stakes, self._agreements, self.differences)
        self._agreements = 0
        self.peak = max(self.peak, float(money))

    @property
    def evidence(self) -> float:
        left = self._stakes * np.exp(self._agreements * self._bets.loss)
        return reserve(self.differences) + float(left.sum())

    @property
    def rejected(self) -> bool:
        """Whether the evidence has ever reached 1/delta."""
        return self.peak * self.delta >= 1

    def interval(self) -> tuple[float, float]:
        return confidence_sequence(self.differences, self.images, self.delta)


def confidence_sequence(differences: int, images: int, delta: float) -> tuple[float, float]:
    """Bounds on a constant rate that hold at all times together with probability 1 - delta.

    Those rates against which a mixture of all rates (Jeffreys' prior) has not gained 1/delta.
    """
    if not images:
        return 0.0, 1.0
    same = images - differences
    mixture = _log_beta(differences + 0.5, same + 0.5) - _log_beta(0.5, 0.5)

    def stands(rate: float) -> bool:
        against = (differences * math.log(rate) if differences else 0.0) + (same * math.log1p(-rate) if same else 0.0)
        return mixture - against < -math.log(delta)

    observed = differences / images
    low = 0.0 if not differences else _border(stands, observed, 0.0)
    high = 1.0 if not same else _border(stands, observed, 1.0)
    return low, high


def _border(stands: Callable[[float], bool], inside: float, outside: float) -> float:
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if stands(middle) else (inside, middle)
    return outside


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class ThresholdSearch:
    """The lowest of a sequence of thresholds, fixed beforehand and strictest first, that images have proven so far.

    At each threshold, money is bet on "it errs on fewer than epsilon of the images"; 1/delta of it rejects "at least
    epsilon" for good. As in calibration, a threshold counts when all before it in the sequence do, which keeps the
    chance of any false claim, at any time, below delta.
    """

    def __init__(self, thresholds: Sequence[float], epsilon: float, delta: float):
        self.thresholds = np.array(thresholds, float)
        self.images = 0
        self._errors = np.zeros(len(self.thresholds), int)
        self._shown = np.zeros(len(self.thresholds), bool)
        self._needed = -math.log(delta)
        rates = epsilon * np.array(LOWER_RATES)
        self._error, self._right = np.log(rates / epsilon), np.log((1 - rates) / (1 - epsilon))

    def add(self, scores: Floats, answers: np.ndarray, finite: bool = True) -> None:
        """One image: the scores after each of its steps, and the answers; the last is that of full depth.

        One that is not `finite`, whose trajectory has produced NaN, is an error at every threshold.
        """
        self.images += 1
        ends = scores[None, :] >= self.thresholds[:, None]
        ends[:, -1] = True
        self._errors += (answers[ends.argmax(1)] != answers[-1]) | (not finite)
        money = self._errors[:, None] * self._error + (self.images - self._errors)[:, None] * self._right
        self._shown |= np.logaddexp.reduce(money, 1) - math.log(len(LOWER_RATES)) >= self._needed

    @property
    def proven(self) -> float | None:
        passed = int(np.logical_and.accumulate(self._shown).sum())
        return float(self.thresholds[passed - 1]) if passed else None


def candidates(scores: Sequence[Floats], least: float, lines: int = 32) -> list[float]:
    """Thresholds for a search, from scores seen before it begins: from the strictest down to `least`."""
    seen = np.concatenate([values[:-1] for values in scores]) if scores else np.array([])
    above = seen[np.isfinite(seen) & (seen > least)]
    ranks = np.linspace(0, 1, lines)
    found = np.unique(np.quantile(above, ranks)) if len(above) else np.array([])
    return [*found[::-1].tolist(), least]
