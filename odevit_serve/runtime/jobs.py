"""An image on its way through a `Compute`: what is asked for it, the numbers of its steps, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .dynamics import Floats
from .exits import Depth, ExitReason


@dataclass(frozen=True)
class Job:
    """One image's request: any key to know it by, how deep it goes, and what to keep of its way."""

    key: Any
    depth: Depth
    deadline: float = math.inf  # on the clock of the slots, time.monotonic unless told otherwise
    trace: bool = False  # keep the numbers of every step
    keep: str = ""  # "last": the final state; "all": the state at every step and at the start; "cls": its first row
    park: bool = False  # have the outcome hold what it takes to go on from there (`Compute.resume`)


@dataclass(frozen=True)
class Step:
    """The numbers of one step of one image."""

    step: int
    time: float
    speed: float
    cls_speed: float
    growth: float  # NaN at the first step
    exponent: float
    lyapunov_times: float
    travel: float
    margin: float
    gain: float
    score: float
    logits: Floats  # [C]
    step_size: float
    error: float = math.nan  # as estimated, where steps choose their size; NaN at the first step


@dataclass(frozen=True)
class Outcome:
    """How an image ended."""

    job: Job
    steps: int
    reason: ExitReason
    logits: Floats  # [C]
    margin: float
    exponent: float
    lyapunov_times: float
    seconds: float  # since it was admitted
    trace: tuple[Step, ...] = ()
    states: tuple[Floats, ...] = ()  # [S*,D] each, or [D] when only CLS was kept
    parked: Any = None  # with `park`: for `Compute.resume`


@dataclass(frozen=True)
class Parked:
    """A row of the slots, taken out where it exited."""

    state: Floats
    logits: Floats
    numbers: tuple[Any, ...]
    trace: tuple[Step, ...]
