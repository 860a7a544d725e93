"""One request to the engine: what it may ask for, what it is given, and the ways in which it can fail."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data.images import SERVED_PIXELS
from ..errors import UsageError, UserError
from ..runtime.dynamics import Floats
from ..runtime.exits import Depth
from ..runtime.options import RequestOptions
from ..runtime.results import Attention, Prediction

RELAXED = 0.25  # fill of the queue up to which nobody's depth is lowered
SHALLOWEST = 1 / 3  # of the full depth: what is left of it when the queue is full


class Overloaded(UserError):
    """The queue is full; nothing was accepted."""

    def __init__(self, waiting: int, queue: int, retry_after: float):
        super().__init__(f"the queue is full ({waiting} of {queue} places taken): try again in {retry_after:.1f} s")
        self.retry_after = retry_after


class Unavailable(UserError):
    """The engine is not ready, shutting down or broken."""


class DeadlineExceeded(UserError):
    """The deadline came before there was an answer."""


class NotAPicture(UserError):
    """What was sent cannot be read as a picture."""


class Diverged(UsageError):
    """The numbers of this one image grew beyond all bounds; its batch mates are not touched."""


class StepFailed(UserError):
    """The computation itself went wrong."""


@dataclass(frozen=True)
class Limits:
    """What requests may ask for; the operator sets it."""

    rules: tuple[str, ...] | None = None  # None: any that is registered
    min_threshold: float | None = None
    max_threshold: float | None = None
    max_steps: int | None = None  # no request goes deeper
    max_pixels: int = SERVED_PIXELS  # of a picture, decoded
    grid: int = 4  # `steps` may be at most this many times the bundle's own

    def check(self, options: RequestOptions, own_steps: int) -> None:
        rule, threshold, budget = options.rule, options.threshold, options.max_steps
        if self.rules is not None and rule is not None and rule not in self.rules:
            raise UsageError(f"rule {rule!r} is not allowed here: choose one of {', '.join(self.rules)}")
        if threshold is not None and self.min_threshold is not None and threshold < self.min_threshold:
            raise UsageError(f"threshold must be at least {self.min_threshold:g} here, not {threshold:g}")
        if threshold is not None and self.max_threshold is not None and threshold > self.max_threshold:
            raise UsageError(f"threshold may be at most {self.max_threshold:g} here, not {threshold:g}")
        if budget is not None and self.max_steps is not None and budget > self.max_steps:
            raise UsageError(f"max_steps may be at most {self.max_steps} here, not {budget}")
        if options.steps is not None and options.steps > self.grid * own_steps:
            raise UsageError(f"steps may be at most {self.grid * own_steps} here, not {options.steps}")


@dataclass(frozen=True)
class Answer:
    """A prediction and what the engine did with the request."""

    prediction: Prediction
    queue_seconds: float  # from submission to its slot, decoding included
    lowered_to: int | None = None  # the depth budget that overload set; None: it was not lowered
    attention: tuple[Attention, ...] = field(default=(), repr=False)  # at steps 0, 1, ... with `states`
    states: tuple[Floats, ...] = field(default=(), repr=False)  # the same for the states [S*,D]

    def to_dict(self, top: int = 5) -> dict[str, Any]:
        data = _finite(self.prediction.to_dict(top))
        if "trace" in data:
            data["trace"] = [_finite(step) for step in data["trace"]]
        data["milliseconds"]["queue"] = 1000 * self.queue_seconds
        return {**data, "depth_lowered_to": self.lowered_to}


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """None for what JSON has no word for, such as the margin of a head with one class."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


@dataclass(eq=False)
class Request:
    """An accepted image on its way. Compared by identity, so that it can be its own key."""

    image: Any
    source: str
    options: RequestOptions
    depth: Depth
    deadline: float
    accepted: float
    future: Future[Answer] = field(default_factory=Future)
    pixels: np.ndarray | None = None
    read_began: float = 0.0
    read_seconds: float = 0.0
    admitted: float = 0.0
    stem_seconds: float = 0.0  # with all that were admitted together
    context: Any = None  # of the caller's trace
    lowered_to: int | None = None
    settled: bool = False
    holder: Any = None  # in whose slots it is (`pending.Holder`)
    interruptible: bool = False  # in a slot from which the deadline gets the best answer so far

    @property
    def priority(self) -> str:
        return self.options.priority

    def lower(self, fill: float, least: int = 1) -> None:
        """Spend less depth as the queue fills, from all of it at `RELAXED` down to `SHALLOWEST` when it is full."""
        strain = min(1.0, (fill - RELAXED) / (1 - RELAXED))
        if strain <= 0:
            return
        budget = max(least, math.ceil(self.depth.steps * (1 - (1 - SHALLOWEST) * strain)))
        if budget < self.depth.max_steps:
            self.depth = dataclasses.replace(self.depth, max_steps=budget, guaranteed=False)
            self.lowered_to = budget
