"""When to stop: rules that score how settled an answer is, and the five ways an image can end.

A rule is a function from `Readings` to one score per image; an image exits when its score reaches the threshold. That
one form is what calibration needs, so any rule registered here can be calibrated:

    @odevit_serve.rule("gap")
    def gap(readings):
        best = np.sort(readings.probabilities)
        return best[:, -1] - best[:, -2]
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..config import Config, Setting
from ..errors import UsageError
from . import dynamics
from .dynamics import Floats


class ExitReason(enum.IntEnum):
    """Why an image ended. The text is the sentence shown to the user; a rule may have its own."""

    sentence: str
    EARLY = 0, "stopped early: the score of the exit rule reached its threshold"
    LYAPUNOV = 1, "Lyapunov time: the growth of perturbations toward the decision boundary reached its limit"
    DEADLINE = 2, "deadline: the best answer so far"
    BUDGET = 3, "depth budget: stopped at the number of steps allowed"
    HORIZON = 4, "full depth: integrated to the horizon"

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
    """The mean remaining travel of CLS that calibration measured, over time."""

    times: Floats
    travel: Floats
    _tables: dict[int, Floats] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: Config) -> Measured | None:
        """None where nothing was measured, or over another horizon: travel is not stretched."""
        policy, horizon = config.exit, config.integration.horizon
        if not policy.travel or policy.horizon != horizon:
            return None
        return cls(np.linspace(0.0, horizon, len(policy.travel)), np.array(policy.travel))

    def table(self, steps: int) -> Floats:
        """Travel after step 0, 1, ..., N of a grid of N steps; kept, since images mostly share one."""
        known = self._tables.get(steps)
        if known is None:
            known = self._tables[steps] = self.at(np.arange(steps + 1) * (self.times[-1] / steps))
        return known

    def at(self, time: Floats) -> Floats:
        return np.interp(time, self.times, self.travel)


@dataclass(eq=False)  # made at every step: freezing it would cost more than all the rest of it
class Readings:
    """What is known of each image after its latest step; every array has one row per image.

    `step` counts the steps taken, `position` the steps of the grid that they cover; without `position` both are the
    same, and `step_size` is that of the grid. `speed` and `cls_speed` belong to the start of the latest step; `logits`,
    `margin`, `gain` (what the step added to the margin) and `exponent` (toward the nearest decision boundary) to its
    end. At the first step `previous_logits` holds values of another image: mask it by `step > 1`.
    """

    step: NDArray[np.integer]
    steps: NDArray[np.integer]  # of the full horizon
    step_size: Floats  # of that step
    logits: Floats  # [B,C]
    previous_logits: Floats  # [B,C]
    margin: Floats
    gain: Floats
    exponent: Floats
    lyapunov_times: Floats  # that have passed: the sum of step_size * max(exponent, 0) so far
    speed: Floats
    cls_speed: Floats
    first_speed: Floats
    unchanged: NDArray[np.integer]  # steps in a row with the same answer as now
    measured: Measured | None = None
    position: NDArray[np.integer] | None = None  # in steps of the grid
    grid_size: Floats | None = None

    def rows(self, chosen: NDArray[np.integer]) -> Readings:
        """The same for some of the images."""
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "measured"}
        own = {name: None if array is None else array[chosen] for name, array in arrays.items()}
        return Readings(**own, measured=self.measured)  # type: ignore[arg-type]

    @property
    def place(self) -> NDArray[np.integer]:
        """Where on its grid an image is."""
        return self.step if self.position is None else self.position

    @cached_property
    def time(self) -> Floats:
        return self.place * (self.step_size if self.grid_size is None else self.grid_size)

    @cached_property
    def growth(self) -> Floats:
        """Growth rate of the velocity of all tokens since the start, a finite-time exponent; NaN at the first step."""
        return dynamics.exponent(self.speed, self.first_speed, self.time - self.step_size)

    @cached_property
    def probabilities(self) -> Floats:
        return dynamics.softmax(self.logits)

    @cached_property
    def confidence(self) -> Floats:
        """Probability of the top class."""
        return self.probabilities.max(-1)

    @cached_property
    def travel(self) -> Floats:
        """The distance that CLS is still expected to move: the mean that calibration measured."""
        if self.measured is None:
            return np.full(len(self.step), np.nan)
        steps = self.steps[0]
        if (self.steps == steps).all():
            return np.maximum(self.measured.table(int(steps))[self.place], dynamics.TINY)
        return np.maximum(self.measured.at(self.time), dynamics.TINY)


Score = Callable[[Readings], Floats]


@dataclass(frozen=True)
class Rule:
    name: str
    score: Score
    sentence: str  # why an image ended by it
    needs_travel: bool = False  # works only with what calibration has measured
    exports: bool = False  # plain arithmetic on readings, so that it can be written into a graph


RULES: dict[str, Rule] = {}


def rule(name: str, sentence: str = "", needs_travel: bool = False, exports: bool = False) -> Callable[[Score], Score]:
    """Register a score under a name, for `predict`, the engine, `calibrate` and, if it `exports`, for graphs."""

    def register(score: Score) -> Score:
        own = sentence or f"stopped early: the score of the rule {name!r} reached its threshold"
        RULES[name] = Rule(name, score, own, needs_travel, exports)
        return score

    return register


def find(name: str) -> Rule:
    if name not in RULES:
        raise UsageError(f"unknown rule {name!r}: choose one of {', '.join(RULES)}, or register it first")
    return RULES[name]


@rule(
    "travel",
    "stopped early: the margin reached the calibrated multiple of the expected remaining travel",
    needs_travel=True,
    exports=True,
)
def travel(readings: Readings) -> Floats:
    """Distance to the nearest decision boundary, as a multiple of the expected remaining travel."""
    return readings.margin / readings.travel


@rule(
    "drift",
    "stopped early: the margin and its last change reached the calibrated multiple of the expected remaining travel",
    needs_travel=True,
    exports=True,
)
def drift(readings: Readings) -> Floats:
    """The same with what the last step added to the margin counted once more."""
    return (readings.margin + readings.gain) / readings.travel


@rule(
    "contraction",
    "stopped early: perturbations toward the nearest decision boundary shrink at the calibrated rate",
    exports=True,
)
def contraction(readings: Readings) -> Floats:
    """Minus the exponent toward the nearest decision boundary: above 0 is the contraction region."""
    return -1.0 * readings.exponent


@rule("margin", exports=True)
def margin(readings: Readings) -> Floats:
    """Distance to the nearest decision boundary alone."""
    return readings.margin


@rule("confidence", exports=True)
def confidence(readings: Readings) -> Floats:
    """Probability of the top class."""
    return readings.confidence


@rule("patience")
def patience(readings: Readings) -> Floats:
    """Steps in a row that have given the same answer."""
    return readings.unchanged.astype(float)


@rule("kl")
def kl(readings: Readings) -> Floats:
    """Minus the divergence of the last two answers, in nats (a threshold of -0.001 stops once they are that close)."""
    change = dynamics.divergence(readings.probabilities, dynamics.softmax(readings.previous_logits))
    return np.where(readings.step > 1, -change, -np.inf)


@rule("latent-diff", exports=True)
def latent_diff(readings: Readings) -> Floats:
    """Minus the distance that the state moved in the last step."""
    return -1.0 * (readings.speed * readings.step_size)


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
    tolerance: float = 0.0  # of a step's estimated error; 0: every step of the grid
    evaluations: int = 1  # of psi in one step


def calibrated(config: Config) -> bool:
    """Whether the bundle's own rule can run as it stands."""
    own = RULES.get(config.exit.rule)
    if own is None or own.name == "fixed":
        return own is not None
    return Measured.of(config) is not None if own.needs_travel else config.exit.calibration is not None


def proven(config: Config, setting: Setting, rule: str, threshold: float, lyapunov: float) -> bool:
    """Whether the guarantee covers this: full depth as the bundle has it, or exactly what was calibrated.

    The one place where that is decided, for bundles, single files, the engine and HTTP.
    """
    own, policy = config.exported_from or config.integration, config.exit
    if rule == "fixed":
        return own.setting() == replace(setting, stem="", step="")
    limit = math.inf if policy.lyapunov is None else policy.lyapunov
    return (
        policy.calibration is not None
        and policy.calibration.setting == setting
        and (policy.rule, policy.threshold, limit) == (rule, threshold, lyapunov)
    )


def resolve(
    config: Config,
    setting: Setting | None = None,
    steps: int | None = None,
    max_steps: int | None = None,
    rule: str | None = None,
    threshold: float | None = None,
    adaptive: bool = True,
    tolerance: float | None = None,
) -> Depth:
    """The checked settings of one request over those of the bundle. An uncalibrated bundle runs at full depth.

    `setting` is what the graphs at hand compute by; None: nothing is guaranteed.
    """
    own, policy = config.integration, config.exit
    tolerance = own.tolerance if tolerance is None else tolerance
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
    elif math.isnan(threshold):
        raise UsageError("threshold must be a number, not NaN")
    unlimited = chosen.name == "fixed" or threshold == math.inf  # either asks for full depth
    limit = math.inf if policy.lyapunov is None or unlimited else policy.lyapunov
    guaranteed = (
        setting is not None
        and budget == steps
        and proven(config, replace(setting, steps=steps, tolerance=tolerance), chosen.name, threshold, limit)
    )
    each = (own if setting is None else setting.integration).evaluations
    return Depth(steps, own.horizon / steps, budget, chosen, threshold, limit, guaranteed, tolerance, each)


def _choose(config: Config, rule: str | None, threshold: float | None, adaptive: bool) -> Rule:
    if not adaptive:
        if rule not in (None, "fixed") or threshold is not None:
            raise UsageError("rule and threshold need adaptive depth: leave them out, or ask for adaptive depth")
        return RULES["fixed"]
    if rule is None and threshold is None and not calibrated(config):
        find(config.exit.rule)
        return RULES["fixed"]
    chosen = find(config.exit.rule if rule is None else rule)
    if chosen.needs_travel and Measured.of(config) is None:
        raise UsageError(
            f"rule {chosen.name!r} needs a bundle that is calibrated for a horizon of {config.integration.horizon:g}: "
            "run odevit-serve calibrate on it first"
        )
    return chosen


def decide(
    readings: Readings,
    score: Floats,
    threshold: Floats,
    lyapunov: Floats | None,
    late: NDArray[np.bool_] | None,
    max_steps: NDArray[np.integer],
) -> NDArray[np.integer] | None:
    """The code of the reason each image ends for, or -1 where it goes on; None when all go on.

    Of several reasons the rule's own comes first, then the order of the codes. At the last step it is the full
    horizon. `lyapunov` and `late` may be None where no image has such a limit. Budgets never exceed the full number of
    steps.
    """
    settles, spent = score >= threshold, readings.step >= max_steps
    if readings.position is not None:  # the end of the grid may come before so many steps
        spent = spent | (readings.position >= readings.steps)
    ended = settles | spent
    past = None if lyapunov is None else readings.lyapunov_times >= lyapunov
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
    code[settles] = ExitReason.EARLY
    return np.where(readings.place >= readings.steps, ExitReason.HORIZON, code)
