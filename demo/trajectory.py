"""What the page shows of one picture: the answer under some settings, and the whole trajectory."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .. import exits, images
from ..bundle import SOLVERS, WEIGHTS, Config, Integration
from ..dynamics import Floats, softmax
from ..engine import Engine
from ..errors import UserError
from ..exits import REASONS, Depth, ExitReason, Measured, Readings
from ..model import BundleModel

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

    def depth(self, config: Config) -> Depth:
        depth = exits.resolve(config, **self.asked)
        own = self.solver in (None, config.integration.solver)
        return depth if own else replace(depth, guaranteed=depth.guaranteed and depth.rule.name == "fixed")


@dataclass(frozen=True)
class Way:
    """A trajectory to the full horizon: numbers after each of its N steps, states and maps with the start as well."""

    step_size: float
    logits: Floats  # [N,C]
    margin: Floats  # [N]
    speed: Floats  # [N]
    cls_speed: Floats  # [N]
    exponent: Floats  # [N], NaN at the first
    travel: Floats  # [N], NaN where nothing was measured
    cls: Floats  # [N+1,D]
    maps: Floats  # [N+1,heads,grid,grid]

    @property
    def steps(self) -> int:
        return len(self.logits)

    @property
    def probabilities(self) -> Floats:
        return softmax(self.logits)


@dataclass(frozen=True)
class Run:
    """One picture under one choice of settings."""

    name: str  # of the model
    config: Config
    labels: tuple[str, ...]
    picture: Image.Image  # the part that the model sees
    way: Way
    probabilities: Floats
    steps: int
    reason: ExitReason
    depth: Depth
    solver: str
    seconds: float
    full_seconds: float
    lowered_to: int | None = None

    @property
    def index(self) -> int:
        return int(self.probabilities.argmax())

    @property
    def label(self) -> str:
        return self.labels[self.index]

    @property
    def full_label(self) -> str:
        return self.labels[int(self.way.logits[-1].argmax())]

    @property
    def integration(self) -> Integration:
        return replace(self.config.integration, steps=self.depth.steps, solver=self.solver)

    def macs(self, steps: int | None = None) -> float:
        return self.integration.macs(self.config.architecture, self.steps if steps is None else steps)

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(self.labels[i], float(self.probabilities[i])) for i in order]


def solvers(config: Config) -> list[str]:
    """The bundle's own solver, and the others where a step of its graph is x + h psi(x): from that psi can be had."""
    own = config.integration
    if own.solver != "euler" or own.splitting != "parallel":
        return [own.solver]
    return list(SOLVERS)


def run(engine: Engine, name: str, source: Any, choice: Choice, label: str | None = None) -> Run:
    """The answer, by the engine; with a solver that the graph does not have, by steps made here."""
    model = engine.model
    assert isinstance(model, BundleModel)
    picture = images.read(source, label)
    shown = images.view(picture, model.config.preprocessing)
    shown.thumbnail((SIDE, SIDE))
    depth, own = choice.depth(model.config), model.config.integration.solver
    solver = choice.solver or own
    if solver not in solvers(model.config):
        raise UserError(f"this bundle steps by {own} alone, not by {solver}")
    if solver != own:
        return _by_hand(model, name, picture, shown, depth, solver)
    early = engine.submit(picture, **choice.asked).result()
    whole = engine.submit(picture, adaptive=False, steps=choice.steps, trace=True, states=True).result()
    seconds, full = early.prediction.compute_seconds, whole.prediction.compute_seconds
    began = time.monotonic()
    for _ in range(REPEATS):  # times of a few milliseconds jump: both ways are gone again in turns, the best counts
        if time.monotonic() - began > PATIENCE:
            break
        seconds = min(seconds, engine.submit(picture, **choice.asked).result().prediction.compute_seconds)
        whole_again = engine.submit(picture, adaptive=False, steps=choice.steps).result()
        full = min(full, whole_again.prediction.compute_seconds)
    states = np.stack(whole.states)
    numbers = _evaluate(model, states[:-1], np.full(len(states) - 1, depth.step_size, np.float32))
    trace = whole.prediction.trace
    way = Way(
        depth.step_size, numbers["logits"], numbers["margin"], numbers["speed"], numbers["cls_speed"],
        _numbers([step.exponent for step in trace]), _numbers([step.travel for step in trace]),
        states[:, 0], np.stack([map.heads for map in whole.attention]),
    )  # fmt: skip
    answer = early.prediction
    return Run(
        name, model.config, model.labels, shown, way, answer.probabilities, answer.steps, answer.exit, depth, solver,
        seconds, full, early.lowered_to,
    )  # fmt: skip


def _numbers(values: list[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values])


def _evaluate(model: BundleModel, states: Floats, sizes: Floats) -> dict[str, Floats]:
    """What the step graph says of many states at once."""
    names = ["next_state", "logits", "margin", "speed", "cls_speed"]
    parts = [
        model.graphs.step.run(names, {"state": states[i : i + ROWS], "step_size": sizes[i : i + ROWS]})
        for i in range(0, len(states), ROWS)
    ]
    return {name: np.concatenate(values) for name, values in zip(names, zip(*parts))}


class _Psi:
    """The right-hand side, read off a graph whose step is x + h psi(x)."""

    def __init__(self, model: BundleModel):
        self.model = model

    def __call__(self, state: Floats) -> dict[str, Floats]:
        """Velocity and speeds from a step of size 1; the answer at this very state from a step of size 0."""
        both = _evaluate(self.model, np.stack([state, state]), np.array([1, 0], np.float32))
        return {
            "velocity": both["next_state"][0] - state, "speed": both["speed"][0], "cls_speed": both["cls_speed"][0],
            "logits": both["logits"][1], "margin": both["margin"][1],
        }  # fmt: skip

    def step(self, solver: str, state: Floats, here: dict[str, Floats], before: Floats | None, h: float) -> Floats:
        """The next state; `before` is the velocity one step earlier."""
        size, first = np.float32(h), here["velocity"]

        def slope(at: Floats) -> Floats:
            return self(at)["velocity"]

        if solver == "euler" or (solver == "ab2" and before is None):
            return state + size * first
        if solver == "ab2":
            assert before is not None
            return state + size * (np.float32(1.5) * first - np.float32(0.5) * before)
        if solver == "midpoint":
            return state + size * slope(state + size / 2 * first)
        if solver == "heun":
            return state + size / 2 * (first + slope(state + size * first))
        second = slope(state + size / 2 * first)
        third = slope(state + size / 2 * second)
        fourth = slope(state + size * third)
        return state + size / 6 * (first + 2 * second + 2 * third + fourth)


def _by_hand(model: BundleModel, name: str, picture: Image.Image, shown: Image.Image, depth: Depth, solver: str) -> Run:
    psi = _Psi(model)
    pixels = images.prepare(picture, model.config.preprocessing)[None]
    began = time.monotonic()
    state: Floats = model.graphs.stem.run(["state"], {"pixel_values": pixels})[0][0]
    states, seen, clock = [state], [psi(state)], []
    before = None
    for _ in range(depth.steps):
        here = seen[-1]
        state, before = psi.step(solver, state, here, before, depth.step_size), here["velocity"]
        states.append(state)
        seen.append(psi(state))
        clock.append(time.monotonic() - began)
    logits, margin = (np.stack([at[key] for at in seen[1:]]) for key in ("logits", "margin"))
    speed, cls_speed = (np.stack([at[key] for at in seen[:-1]]) for key in ("speed", "cls_speed"))
    if not np.isfinite(logits).all():
        raise UserError(f"the trajectory left the finite numbers: {depth.steps} steps of {solver} are too few")
    readings = _readings(model, depth, logits, margin, speed, cls_speed)
    steps, reason = _exit(readings, depth)
    grid = model.config.architecture.grid
    maps = np.concatenate([model.graphs.maps(np.stack(states[i : i + ROWS])) for i in range(0, len(states), ROWS)])
    way = Way(
        depth.step_size, logits, margin, speed, cls_speed, readings.exponent, readings.travel,
        np.stack([s[0] for s in states]), maps.reshape(len(states), -1, grid, grid),
    )  # fmt: skip
    probabilities = softmax(logits[steps - 1].astype(np.float64))
    return Run(
        name, model.config, model.labels, shown, way, probabilities, steps, reason, depth, solver,
        clock[steps - 1], clock[-1],
    )  # fmt: skip


def _readings(
    model: BundleModel, depth: Depth, logits: Floats, margin: Floats, speed: Floats, cls_speed: Floats
) -> Readings:
    """The steps of one image as rows, so that a rule scores them all at once."""
    count = len(logits)
    top, unchanged = logits.argmax(1), np.zeros(count, int)
    for n in range(1, count):
        unchanged[n] = unchanged[n - 1] + 1 if top[n] == top[n - 1] else 0
    return Readings(
        np.arange(1, count + 1), np.full(count, count), np.full(count, depth.step_size), logits,
        np.concatenate([logits[:1], logits[:-1]]), margin, speed, cls_speed, np.full(count, speed[0]),
        np.concatenate([cls_speed[:1], cls_speed[:-1]]), unchanged, Measured.of(model.config),
    )  # fmt: skip


def _exit(readings: Readings, depth: Depth) -> tuple[int, ExitReason]:
    count = len(readings.step)
    codes = exits.decide(
        readings, depth.rule.score(readings), np.full(count, depth.threshold), np.full(count, depth.lyapunov), None,
        np.full(count, depth.max_steps), np.full(count, int(depth.rule.reason)),
    )  # fmt: skip
    assert codes is not None  # the last step ends every image
    first = int(np.flatnonzero(codes >= 0)[0])
    return first + 1, REASONS[codes[first]]


def head(folder: Path) -> tuple[Floats, Floats] | None:
    """Weight [C,D] and bias [C] of the linear head, from the weights of the bundle where they are there."""
    path = folder / WEIGHTS
    if not path.is_file():
        return None
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        found = []
        for name in ("head.weight", "head.bias"):
            entry = header.get(name)
            kind = None if entry is None else {"F16": np.float16, "F32": np.float32}.get(entry["dtype"])
            if kind is None:
                return None
            first, last = entry["data_offsets"]
            file.seek(start + first)
            found.append(np.frombuffer(file.read(last - first), kind).reshape(entry["shape"]).astype(np.float32))
    return found[0], found[1]
