"""What `predict`, the engine and the server give: an answer for one image, or why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import Confidence, Config
from . import dynamics
from .dynamics import Floats
from .exits import RULES, ExitReason

if TYPE_CHECKING:
    from .slots import Outcome


@dataclass(frozen=True)
class Attention:
    """Attention of CLS over the patches: one map per head and their mean; each sums to the share of the patches."""

    step: int
    heads: Floats  # [heads, grid, grid]

    @property
    def mean(self) -> Floats:
        return self.heads.mean(0)


@dataclass(frozen=True)
class TraceStep:
    """One step of an image's trajectory."""

    step: int
    time: float
    speed: float
    growth: float | None  # rate at which the velocity has grown since the first step
    exponent: float  # toward the nearest decision boundary
    lyapunov_times: float  # that have passed
    travel: float | None
    margin: float
    label: str
    probability: float  # of the label the image ended with
    score: float | None = None  # of the rule in force; None where it has none
    step_size: float = 0.0
    error: float | None = None  # estimated, where steps choose their size


@dataclass(frozen=True)
class Prediction:
    """The answer for one image and how it came about."""

    label: str
    index: int
    probabilities: Floats = field(repr=False)
    labels: tuple[str, ...] = field(repr=False)
    steps: int
    full_steps: int
    exit: ExitReason
    rule: str  # that was in force
    margin: float | None  # distance of the CLS state to the nearest decision boundary
    exponent: float | None  # how fast a perturbation toward that boundary grows; below 0 it shrinks
    guaranteed: bool  # the settings are those the bundle's guarantee was calibrated for
    source: str
    read_seconds: float
    compute_seconds: float
    trace: tuple[TraceStep, ...] = field(default=(), repr=False)
    attention: Attention | None = field(default=None, repr=False)
    unsure: bool | None = None  # below the confidence that was proven; None where none was
    threshold: float | None = None  # of that rule; None where it never stops early
    evaluations: int = 0  # of psi: the steps taken, times what the solver needs for one

    @property
    def probability(self) -> float:
        return float(self.probabilities[self.index])

    @property
    def sentence(self) -> str:
        """Why it ended where it did."""
        return RULES[self.rule].sentence if self.exit is ExitReason.EARLY and self.rule in RULES else str(self.exit)

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The likeliest labels with their probabilities."""
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(self.labels[i], float(self.probabilities[i])) for i in order]

    def to_dict(self, top: int = 5) -> dict[str, Any]:
        """Plain data, as printed by `predict --json`."""
        answer: dict[str, Any] = {
            "source": self.source,
            "label": self.label,
            "probability": self.probability,
            "unsure": self.unsure,
            "top": [{"label": label, "probability": value} for label, value in self.top(top)],
            "steps": self.steps,
            "full_steps": self.full_steps,
            "evaluations": self.evaluations,
            "exit": self.exit.short,
            "exit_sentence": self.sentence,
            "rule": self.rule,
            "margin": self.margin,
            "exponent": self.exponent,
            "guaranteed": self.guaranteed,
            "milliseconds": {"read": 1000 * self.read_seconds, "compute": 1000 * self.compute_seconds},
        }
        if self.trace:
            answer["threshold"] = self.threshold
            answer["trace"] = [vars(step) for step in self.trace]
        return answer


@dataclass(frozen=True)
class Failure:
    """An input that could not be answered, and why."""

    source: str
    message: str


Result = Prediction | Failure


def label_names(config: Config) -> tuple[str, ...]:
    """The names of the classes; their numbers where the model has no names."""
    return tuple(config.labels or (str(i) for i in range(config.architecture.classes)))


def conclude(
    labels: tuple[str, ...],
    outcome: Outcome,
    source: str,
    read_seconds: float,
    attention: Attention | None = None,
    confidence: Confidence | None = None,
) -> Result:
    """The result of an image that has ended, whatever computed it."""
    known = confidence or Confidence()
    if not np.isfinite(outcome.logits).all():
        return Failure(source, f"{source}: the trajectory produced NaN or infinity after {outcome.steps} steps")
    probabilities = dynamics.softmax(outcome.logits.astype(np.float64) / known.temperature)
    index, depth = int(probabilities.argmax()), outcome.job.depth
    return Prediction(
        labels[index],
        index,
        probabilities,
        labels,
        outcome.steps,
        depth.steps,
        outcome.reason,
        depth.rule.name,
        None if math.isnan(outcome.margin) else outcome.margin,
        _number(outcome.exponent),
        depth.guaranteed and outcome.job.deadline == math.inf,
        source,
        read_seconds,
        outcome.seconds,
        _trace(labels, outcome, index, known.temperature),
        attention,
        None if known.unsure is None else bool(probabilities[index] < known.unsure.threshold),
        None if depth.rule.name == "fixed" else _number(depth.threshold),
        outcome.steps * depth.evaluations,
    )


def _trace(labels: tuple[str, ...], outcome: Outcome, index: int, temperature: float) -> tuple[TraceStep, ...]:
    return tuple(
        TraceStep(
            s.step,
            s.time,
            s.speed,
            _number(s.growth),
            s.exponent,
            s.lyapunov_times,
            _number(s.travel),
            s.margin,
            labels[int(s.logits.argmax())],
            float(dynamics.softmax(s.logits / temperature)[index]),
            _number(s.score),
            s.step_size,
            _number(s.error),
        )
        for s in outcome.trace
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
