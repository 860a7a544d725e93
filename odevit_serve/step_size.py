"""The size of the next step, chosen for each image by an estimate of the error that the step would make.

Euler's step and that of Adams-Bashforth from the same two velocities differ by h^2 / (2 h') |v - v'|, with h' and v'
the size and the velocity of the step before (for equal sizes: h / 2 |v - v'|). To leading order this is the error of
Euler's step, it costs no evaluation beside the one that the step makes anyway, and it is known before the step is
taken. So no step is ever rejected: the size is the largest one whose estimate is within the tolerance.

Sizes are whole numbers of steps of a grid. The grid's own step is the smallest, which bounds the number of evaluations
by that of the grid, and the first, since nothing is known before it. A tolerance of 0 is the grid itself.

Numbers are one an image: numpy arrays, or values of a graph under construction with `ops` to match.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .solvers import Value

TINY = 1e-30


def allowed(change: Value, before: Value, tolerance: Value, ops: Any = np) -> Value:
    """The size at which the estimate is the tolerance. `change` is |v - v'|; `before` is h', 0 at the first step."""
    return ops.sqrt(2.0 * tolerance * before / ops.maximum(change, TINY))


def choose(change: Value, before: Value, tolerance: Value, grid: Value, left: Value, ops: Any = np) -> Value:
    """The size of a step: as many steps of size `grid` as are allowed, one at least, and no more than are `left`."""
    whole = grid * ops.floor(allowed(change, before, tolerance, ops) / grid)
    return ops.minimum(ops.maximum(whole, grid), left)


def estimate(change: Any, size: Any, before: Any) -> Any:
    """The error of Euler's step of this size; NaN at the first step."""
    before = np.asarray(before, float)
    known = before > 0
    return np.where(known, 0.5 * np.square(size) / np.where(known, before, 1.0) * np.asarray(change, float), np.nan)
