"""One request to the engine: what it may ask for, what it is given, and the ways in which it can fail."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .dynamics import Floats
from .errors import UsageError, UserError
from .exits import RULES, Depth
from .line import Priority
from .model import Attention, Prediction

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
    """The deadline came before the first step."""


class NotAPicture(UserError):
    """What was sent cannot be read as a picture."""


class Diverged(UsageError):
    """The numbers of this one image grew beyond all bounds; its batch mates are not touched."""


class StepFailed(UserError):
    """The computation itself went wrong."""


@dataclass(frozen=True)
class Settings:
    """What one request asks for; None leaves it to the bundle."""

    max_steps: int | None = None
    rule: str | None = None
    threshold: float | None = None
    kappa: float | None = None  # the threshold of the contraction rules
    adaptive: bool = True
    steps: int | None = None  # cut the horizon into this many
    deadline_ms: float | None = None  # from now; the best answer so far is given then
    priority: str = Priority.INTERACTIVE
    trace: bool = False  # keep the numbers of every step
    attention: bool = False  # the map where it exits
    states: bool = False  # the state and the map at every step, the start included

    def changed(self, asked: dict[str, Any]) -> Settings:
        """These with some others in their place."""
        unknown = sorted(set(asked) - set(self.__dataclass_fields__))
        if unknown:
            raise UsageError(f"unknown setting {unknown[0]!r}")
        return dataclasses.replace(self, **asked) if asked else self

    @property
    def keep(self) -> str:
        """What `Job` is to keep."""
        return "all" if self.states else "last" if self.attention else ""


@dataclass(frozen=True)
class Limits:
    """What requests may ask for; the operator sets it."""

    rules: tuple[str, ...] | None = None  # None: any that is registered
    min_kappa: float = 0.0
    max_kappa: float | None = None
    max_steps: int | None = None  # no request goes deeper
    grid: int = 4  # `steps` may be at most this many times the bundle's own

    def check(self, settings: Settings, own_steps: int) -> None:
        rule, kappa, budget = settings.rule, settings.kappa, settings.max_steps
        if self.rules is not None and rule is not None and rule not in self.rules:
            raise UsageError(f"rule {rule!r} is not allowed here: choose one of {', '.join(self.rules)}")
        contracts = rule is None or (rule in RULES and RULES[rule].contracts)
        if kappa is None and contracts:
            kappa = settings.threshold
        if kappa is not None and kappa < self.min_kappa:
            raise UsageError(f"kappa must be at least {self.min_kappa:g} here, not {kappa:g}")
        if kappa is not None and self.max_kappa is not None and kappa > self.max_kappa:
            raise UsageError(f"kappa may be at most {self.max_kappa:g} here, not {kappa:g}")
        if budget is not None and self.max_steps is not None and budget > self.max_steps:
            raise UsageError(f"max_steps may be at most {self.max_steps} here, not {budget}")
        if settings.steps is not None and settings.steps > self.grid * own_steps:
            raise UsageError(f"steps may be at most {self.grid * own_steps} here, not {settings.steps}")
        if settings.deadline_ms is not None and not 0 < settings.deadline_ms <= 86_400_000:
            raise UsageError(f"deadline_ms must be above 0 and at most a day, not {settings.deadline_ms:g}")
        if settings.priority not in tuple(Priority):
            raise UsageError(f"priority must be one of {', '.join(Priority)}, not {settings.priority!r}")


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
    settings: Settings
    depth: Depth
    deadline: float
    accepted: float
    future: Future[Answer] = field(default_factory=Future)
    pixels: np.ndarray | None = None
    read_seconds: float = 0.0
    admitted: float = 0.0
    lowered_to: int | None = None
    settled: bool = False

    @property
    def priority(self) -> str:
        return self.settings.priority

    def lower(self, fill: float) -> None:
        """Spend less depth as the queue fills, from all of it at `RELAXED` down to `SHALLOWEST` when it is full."""
        strain = min(1.0, (fill - RELAXED) / (1 - RELAXED))
        if strain <= 0:
            return
        budget = max(1, math.ceil(self.depth.steps * (1 - (1 - SHALLOWEST) * strain)))
        if budget < self.depth.max_steps:
            self.depth = dataclasses.replace(self.depth, max_steps=budget, guaranteed=False)
            self.lowered_to = budget
