"""When to stop: rules that score how safe it is, and the five ways an image can end.

A rule is a function from `Readings` to one score an image; larger is safer, and an image exits when its score reaches
the threshold. That one form is what calibration needs, so any rule registered here can be calibrated:

    @odevit_serve.rule("gap")
    def gap(readings):
        best = np.sort(readings.probabilities)
        return best[:, -1] - best[:, -2]
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from . import dynamics
from .bundle import Config
from .dynamics import Floats
from .errors import UsageError


class ExitReason(enum.IntEnum):
    """How an answer ended. The text is the sentence shown to the user."""

    sentence: str
    CONTRACTED = 0, "contracted: what is left to travel cannot change the answer"
    LYAPUNOV = 1, "Lyapunov time reached: the trajectory cannot be trusted further"
    DEADLINE = 2, "deadline: the best answer so far"
    BUDGET = 3, "depth budget: stopped at the number of steps allowed"
    HORIZON = 4, "full horizon: integrated to the end"
    SETTLED = 5, "settled: the score of the exit rule has reached its threshold"

    def __new__(cls, code: int, sentence: str) -> ExitReason:
        member = int.__new__(cls, code)
        member._value_ = code
        member.sentence = sentence
        return member

    def __str__(self) -> str:
        return self.sentence

    @property
    def short(self) -> str:
        return self.sentence.partition(":")[0]


REASONS = tuple(ExitReason)  # by code


@dataclass(frozen=True)
class Measured:
    """What calibration measured, as arrays over time: remaining CLS travel, and mean CLS speed to scale it by."""

    times: Floats
    travel: Floats
    cls_speed: Floats
    _tables: dict[int, tuple[Floats, Floats | None]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: Config) -> Measured | None:
        policy = config.exit
        if not policy.travel:
            return None
        times = np.linspace(0.0, config.integration.horizon, len(policy.travel))
        return cls(times, np.array(policy.travel), np.array(policy.cls_speed))

    def table(self, steps: int) -> tuple[Floats, Floats | None]:
        """Travel and mean speed after step 0, 1, ..., N of a grid of N steps; kept, since images mostly share one."""
        known = self._tables.get(steps)
        if known is None:
            known = self._tables[steps] = self.at(np.arange(steps + 1) * (self.times[-1] / steps))
        return known

    def at(self, time: Floats) -> tuple[Floats, Floats | None]:
        """Travel, and mean speed if it is to be scaled, at any times."""
        mean = np.interp(time, self.times[1:], self.cls_speed) if len(self.cls_speed) else None
        return np.interp(time, self.times, self.travel), mean


@dataclass(eq=False)  # made at every step: freezing it would cost more than all the rest of it
class Readings:
    """What is known of each image after its latest step; every array has one row an image.

    `speed` and `cls_speed` belong to the start of that step, `logits` and `margin` to its end. At the first step the
    `previous_*` arrays hold what they held before this image: mask by `step > 1`.
    """

    step: NDArray[np.integer]
    steps: NDArray[np.integer]  # of the full horizon
    step_size: Floats
    logits: Floats  # [B,C]
    previous_logits: Floats  # [B,C]
    margin: Floats
    speed: Floats
    cls_speed: Floats
    first_speed: Floats
    previous_cls_speed: Floats
    unchanged: NDArray[np.integer]  # steps in a row with the same answer as now
    measured: Measured | None = None

    def rows(self, chosen: NDArray[np.integer]) -> Readings:
        """The same for some of the images."""
        own = {name: getattr(self, name)[chosen] for name in self.__dataclass_fields__ if name != "measured"}
        return Readings(**own, measured=self.measured)

    @cached_property
    def time(self) -> Floats:
        return self.step * self.step_size

    @cached_property
    def exponent(self) -> Floats:
        """Finite-time Lyapunov exponent since the start; NaN at the first step."""
        return dynamics.exponent(self.speed, self.first_speed, (self.step - 1) * self.step_size)

    @cached_property
    def probabilities(self) -> Floats:
        return dynamics.softmax(self.logits)

    @cached_property
    def travel(self) -> Floats:
        """Measured distance that is left for the CLS state, scaled by the image's own speed where that was measured."""
        if self.measured is None:
            return np.full(len(self.step), np.nan)
        steps = self.steps[0]
        if (self.steps == steps).all():
            travel, speed = self.measured.table(int(steps))
            left, mean = travel[self.step], None if speed is None else speed[self.step]
        else:
            left, mean = self.measured.at(self.time)
        return left if mean is None else left * (self.cls_speed / np.maximum(mean, dynamics.TINY))

    @cached_property
    def extrapolated_travel(self) -> Floats:
        """The same by growth of the CLS speed over the last step, with nothing measured beforehand."""
        rate = dynamics.exponent(self.cls_speed, self.previous_cls_speed, self.step_size)
        rate = np.where(self.step > 1, rate, 0.0)
        return dynamics.extrapolated_travel(
            self.cls_speed, rate, self.step_size, (self.steps - self.step + 1) * self.step_size
        )


Score = Callable[[Readings], Floats]


@dataclass(frozen=True)
class Rule:
    name: str
    score: Score
    contracts: bool = False  # compares margin with travel: stops at the Lyapunov time too, and its threshold is a kappa
    needs_travel: bool = False  # works only with what calibration has measured

    @property
    def reason(self) -> ExitReason:
        return ExitReason.CONTRACTED if self.contracts else ExitReason.SETTLED


RULES: dict[str, Rule] = {}


def rule(name: str, contracts: bool = False, needs_travel: bool = False) -> Callable[[Score], Score]:
    """Register a score under a name, for `predict`, the engine and `calibrate` alike."""

    def register(score: Score) -> Score:
        RULES[name] = Rule(name, score, contracts, needs_travel)
        return score

    return register


def find(name: str) -> Rule:
    if name not in RULES:
        raise UsageError(f"unknown rule {name!r}: choose one of {', '.join(RULES)}, or register it first")
    return RULES[name]


@rule("contraction", contracts=True, needs_travel=True)
def contraction(readings: Readings) -> Floats:
    """Distance to the boundary against the distance left to travel; the threshold is kappa."""
    return readings.margin / np.maximum(readings.travel, dynamics.TINY)


@rule("contraction-extrapolated", contracts=True)
def contraction_extrapolated(readings: Readings) -> Floats:
    """The same with travel extrapolated from the local exponent."""
    return readings.margin / np.maximum(readings.extrapolated_travel, dynamics.TINY)


@rule("margin")
def margin(readings: Readings) -> Floats:
    """Distance to the boundary alone."""
    return readings.margin


@rule("confidence")
def confidence(readings: Readings) -> Floats:
    """Probability of the top class."""
    return readings.probabilities.max(-1)


@rule("patience")
def patience(readings: Readings) -> Floats:
    """Steps in a row that have given the same answer."""
    return readings.unchanged.astype(float)


@rule("kl")
def kl(readings: Readings) -> Floats:
    """Less the divergence of the last two answers, in nats (a threshold of -0.001 stops once they are that close)."""
    change = dynamics.divergence(readings.probabilities, dynamics.softmax(readings.previous_logits))
    return np.where(readings.step > 1, -change, -np.inf)


@rule("latent-diff")
def latent_diff(readings: Readings) -> Floats:
    """Less the distance that the state moved in the last step."""
    return -(readings.speed * readings.step_size)


@rule("fixed")
def fixed(readings: Readings) -> Floats:
    """Never stops early."""
    return np.full(len(readings.step), -np.inf)


@dataclass(frozen=True)
class Depth:
    """How far an image goes: its grid, its budget, and the rule that may end it earlier. Made by `resolve`."""

    steps: int
    step_size: float
    max_steps: int
    rule: Rule
    threshold: float
    lyapunov: float = math.inf
    guaranteed: bool = False  # the very settings that were calibrated


def calibrated(config: Config) -> bool:
    """Whether the bundle's own rule can run as it stands."""
    own = RULES.get(config.exit.rule)
    if own is None or own.name == "fixed":
        return own is not None
    return bool(config.exit.travel) if own.needs_travel else config.exit.calibration is not None


def resolve(
    config: Config,
    steps: int | None = None,
    max_steps: int | None = None,
    rule: str | None = None,
    threshold: float | None = None,
    adaptive: bool = True,
) -> Depth:
    """The checked settings of one request over those of the bundle. An uncalibrated bundle runs at full depth."""
    own, policy = config.integration, config.exit
    steps = own.steps if steps is None else steps
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    budget = steps if max_steps is None else min(steps, max_steps)
    chosen = _choose(config, rule, threshold, adaptive)
    if threshold is None:
        if chosen.name not in (policy.rule, "fixed"):
            raise UsageError(f"rule {chosen.name!r} needs a threshold: the bundle has one for {policy.rule!r} only")
        threshold = policy.threshold
    elif math.isnan(threshold) or (chosen.contracts and threshold < 0):
        raise UsageError(f"kappa must be 0 or more, not {threshold}")
    limit = policy.lyapunov if chosen.contracts and policy.lyapunov is not None else math.inf
    proof = policy.calibration
    proven = proof is not None and (proof.steps, proof.horizon, policy.rule) == (steps, own.horizon, chosen.name)
    guaranteed = budget == steps and (chosen.name == "fixed" or (proven and threshold == policy.threshold))
    return Depth(steps, own.horizon / steps, budget, chosen, threshold, limit, guaranteed)


def _choose(config: Config, rule: str | None, threshold: float | None, adaptive: bool) -> Rule:
    if not adaptive:
        if rule not in (None, "fixed") or threshold is not None:
            raise UsageError("a rule or threshold makes no sense together with no adaptive depth")
        return RULES["fixed"]
    if rule is None and threshold is None and not calibrated(config):
        find(config.exit.rule)
        return RULES["fixed"]
    chosen = find(config.exit.rule if rule is None else rule)
    if chosen.needs_travel and not config.exit.travel:
        raise UsageError(f"rule {chosen.name!r} needs a calibrated bundle: run odevit-serve calibrate on it first")
    return chosen


def decide(
    readings: Readings,
    score: Floats,
    threshold: Floats,
    lyapunov: Floats | None,
    late: NDArray[np.bool_] | None,
    max_steps: NDArray[np.integer],
    settled: NDArray[np.integer],
) -> NDArray[np.integer] | None:
    """The code of the reason each image ends for, or -1 where it goes on; None when all go on.

    Of several reasons the rule's own comes first, then the order of the codes. At the last step it is the full
    horizon: nothing is left to travel there, so every image would count as contracted. `lyapunov` and `late` may be
    None where no image has such a limit. Budgets never exceed the full number of steps.
    """
    settles, spent = score >= threshold, readings.step >= max_steps
    ended = settles | spent
    past = None if lyapunov is None else _past(readings, lyapunov)
    for other in (past, late):
        if other is not None:
            ended |= other
    if not np.count_nonzero(ended):  # 0.4 microseconds, any() 2.2: made at every step
        return None
    code = np.where(spent, ExitReason.BUDGET, -1)
    if late is not None:
        code[late] = ExitReason.DEADLINE
    if past is not None:
        code[past] = ExitReason.LYAPUNOV
    code = np.where(settles, settled, code)
    return np.where(readings.step >= readings.steps, ExitReason.HORIZON, code)


def _past(readings: Readings, lyapunov: Floats) -> NDArray[np.bool_]:
    """Whether time times exponent, ln(v_n / v_1) n / (n - 1), has reached the limit; never at the first step."""
    growth = np.log(np.maximum(readings.speed, dynamics.TINY) / np.maximum(readings.first_speed, dynamics.TINY))
    reached = growth * (readings.step / np.maximum(readings.step - 1, 0.5)) >= np.maximum(lyapunov, dynamics.TINY)
    return reached & (readings.step > 1)
