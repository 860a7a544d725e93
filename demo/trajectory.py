"""What the page shows of one picture: the answer under some settings, and the whole trajectory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from ..config import Config, Integration
from ..data import images
from ..errors import UserError
from ..runtime.dynamics import Floats, softmax
from ..runtime.exits import Depth, ExitReason
from ..runtime.model import BundleModel
from ..runtime.slots import Job, Outcome
from ..serving.engine import Engine
from .energy import cls_energy

ROWS = 16  # of a batch that is evaluated at once
SIDE = 640  # of the picture that is kept to draw on
REPEATS, PATIENCE = 5, 0.15  # to measure times: so often, as long as this many seconds have not passed


@dataclass(frozen=True)
class Choice:
    """The settings on the page; None leaves them to the bundle."""

    rule: str | None = None
    threshold: float | None = None
    max_steps: int | None = None
    solver: str | None = None
    steps: int | None = None
    adaptive: bool = True

    @property
    def asked(self) -> dict[str, Any]:
        """As settings of a request to the engine."""
        settings: dict[str, Any] = {"steps": self.steps, "max_steps": self.max_steps, "adaptive": self.adaptive}
        return {**settings, "rule": self.rule, "threshold": self.threshold} if self.adaptive else settings


@dataclass(frozen=True)
class Trajectory:
    """One image to the full horizon: numbers after each of its N steps, states and maps with the start as well."""

    times: Floats  # [N+1]
    logits: Floats  # [N,C]
    margin: Floats  # [N]
    cls_speed: Floats  # [N]
    exponent: Floats  # [N], toward the nearest decision boundary
    lyapunov_times: Floats  # [N], that have passed
    travel: Floats  # [N], NaN where nothing was measured
    score: Floats  # [N], of the rule chosen; NaN where it never stops early, and after the last step
    cls: Floats  # [N+1,D]
    maps: Floats  # [N+1,heads,grid,grid]
    temperature: float = 1.0  # of the probabilities
    energy: Floats | None = None  # [N+1,heads], of CLS as the state of a Hopfield network; None without weights

    @property
    def steps(self) -> int:
        return len(self.logits)

    @property
    def probabilities(self) -> Floats:
        return softmax(self.logits / self.temperature)


@dataclass(frozen=True)
class Inspection:
    """One picture under one choice of settings."""

    name: str  # of the model
    config: Config
    labels: tuple[str, ...]
    picture: Image.Image  # the part that the model sees
    trajectory: Trajectory
    probabilities: Floats
    steps: int
    reason: ExitReason
    sentence: str
    depth: Depth
    solver: str
    seconds: float
    full_seconds: float
    lowered_to: int | None = None
    unsure: bool | None = None

    @property
    def index(self) -> int:
        return int(self.probabilities.argmax())

    @property
    def label(self) -> str:
        return self.labels[self.index]

    @property
    def full_label(self) -> str:
        return self.labels[int(self.trajectory.logits[-1].argmax())]

    @property
    def integration(self) -> Integration:
        return replace(self.config.integration, steps=self.depth.steps, solver=self.solver)

    def macs(self, steps: int | None = None) -> float:
        return self.integration.macs(self.config.architecture, self.steps if steps is None else steps)

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(self.labels[i], float(self.probabilities[i])) for i in order]


def run(engine: Engine[BundleModel], name: str, source: Any, choice: Choice, label: str | None = None) -> Inspection:
    """The answer, by the engine where it steps by the solver chosen, and the whole trajectory beside it."""
    model = engine.model
    picture = images.read(source, label)
    shown = images.view(picture, model.config.preprocessing)
    shown.thumbnail((SIDE, SIDE))
    other = model.integrated(choice.solver)
    depth = other.depth(**choice.asked)
    whole = replace(depth, max_steps=depth.steps, threshold=math.inf, lyapunov=math.inf)  # with the score of the rule
    pixels = images.prepare(picture, model.config.preprocessing)
    lowered = None
    if other is model:
        answer = engine.submit(picture, **choice.asked).result()
        early, lowered = answer.prediction, answer.lowered_to
    else:
        early = other.predict(picture, **choice.asked)
    outcome = _follow(other, pixels, whole)
    seconds, full = early.compute_seconds, outcome.seconds
    began = time.monotonic()
    for _ in range(REPEATS):  # times of a few milliseconds jump: both are computed again in turns, the best counts
        if time.monotonic() - began > PATIENCE:
            break
        seconds = min(seconds, _follow(other, pixels, depth, plain=True).seconds)
        full = min(full, _follow(other, pixels, whole, plain=True).seconds)
    return Inspection(
        name, other.config, model.labels, shown, _trajectory(other, outcome), early.probabilities,
        early.steps, early.exit, early.sentence, depth, other.config.integration.solver, seconds, full, lowered,
        early.unsure,
    )  # fmt: skip


def _follow(model: BundleModel, pixels: np.ndarray, depth: Depth, plain: bool = False) -> Outcome:
    """One image through slots of its own."""
    slots = model.slots(1)
    slots.admit(pixels[None], [Job(0, depth, trace=not plain, keep="" if plain else "all")])
    while True:
        for outcome in slots.step():
            if not np.isfinite(outcome.logits).all():
                raise UserError(f"the trajectory produced NaN or infinity after {outcome.steps} steps")
            return outcome


def _trajectory(model: BundleModel, outcome: Outcome) -> Trajectory:
    states, trace, grid = np.stack(outcome.states), outcome.trace, model.config.architecture.grid
    maps = np.concatenate([model.graphs.maps(states[i : i + ROWS]) for i in range(0, len(states), ROWS)])
    numbers: dict[str, Any] = {
        name: np.array([getattr(step, name) for step in trace])
        for name in ("margin", "cls_speed", "exponent", "lyapunov_times", "travel", "score")
    }
    numbers["score"][-1] = math.nan  # nothing is decided there
    logits = np.stack([step.logits for step in trace])
    maps = maps.reshape(len(states), -1, grid, grid)
    known = model.config.confidence
    temperature = 1.0 if known is None else known.temperature
    energy = cls_energy(model.path, model.config.architecture, states)
    times = np.array([0.0, *(step.time for step in trace)])
    return Trajectory(times, logits, **numbers, cls=states[:, 0], maps=maps, temperature=temperature, energy=energy)
