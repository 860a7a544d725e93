"""How well one number goes with another: correlation and AUROC, each with its confidence interval."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ...runtime.dynamics import Floats


class Estimate(NamedTuple):
    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        return {k: v if math.isfinite(v) else None for k, v in self._asdict().items()}


NONE = Estimate(math.nan, math.nan, math.nan)


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def correlation(x: ArrayLike, y: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Pearson's correlation with Fisher's interval; NaN where one of them does not vary or pairs are fewer than 4."""
    a, b = np.asarray(x, float), np.asarray(y, float)
    kept = np.isfinite(a) & np.isfinite(b)
    a, b = a[kept], b[kept]
    if len(a) < 4 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return NONE
    value = float(np.clip(np.corrcoef(a, b)[0, 1], -1, 1))
    if abs(value) >= 1:
        return Estimate(value, value, value)
    middle, reach = math.atanh(value), _quantile(confidence) / math.sqrt(len(a) - 3)
    return Estimate(value, math.tanh(middle - reach), math.tanh(middle + reach))


def ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[inverse]


def auroc(score: ArrayLike, positive: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Chance that a positive case scores higher than a negative one, ties counting half; with Hanley's interval."""
    values, flags = np.asarray(score, float), np.asarray(positive, bool)
    kept = ~np.isnan(values)
    values, flags = values[kept], flags[kept]
    yes, no = int(flags.sum()), int((~flags).sum())
    if not yes or not no:
        return NONE
    area = float((ranks(values)[flags].sum() - yes * (yes + 1) / 2) / (yes * no))
    both, twice = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (yes - 1) * (both - area**2) + (no - 1) * (twice - area**2)) / (yes * no)
    reach = _quantile(confidence) * math.sqrt(max(variance, 0.0))
    return Estimate(area, max(0.0, area - reach), min(1.0, area + reach))


def region(distance: ArrayLike, agrees: ArrayLike, share: float = 0.95, least: int = 20) -> float | None:
    """The largest distance within which at least `share` of the images agree; None if there is none of `least`."""
    far, good = np.asarray(distance, float), np.asarray(agrees, bool)
    order = np.argsort(far, kind="stable")
    within = np.cumsum(good[order]) / np.arange(1, len(far) + 1)
    enough = np.flatnonzero((within >= share) & (np.arange(1, len(far) + 1) >= min(least, len(far))))
    return float(far[order][enough[-1]]) if len(enough) else None


def flat_from(steps: list[int], quality: list[float], own: int, slack: float = 0.005) -> int:
    """The fewest steps from which on, up to the model's own, quality stays within `slack` of what it is there."""
    curve = sorted(zip(steps, quality))
    target = dict(curve)[own] - slack
    best = own
    for count, value in reversed([pair for pair in curve if pair[0] <= own]):
        if value < target:
            break
        best = count
    return best
