"""What the page does: its models, what each handler answers, and where a control's values make sense."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import gradio as gr

from .. import bundle
from ..config import Config
from ..errors import UsageError, UserError
from ..runtime import exits
from ..runtime.dynamics import Floats
from ..runtime.model import BundleModel, load_bundle
from ..serving.engine import Answer, Engine
from ..solvers import SOLVERS, splits
from . import html as cards
from . import plots, trajectory, weights
from .trajectory import Choice, Inspection

MAX_BATCH = 200  # pictures at once in the third tab
FRAME, PAUSE = 0.3, 1.2  # seconds that a map is shown while they are played, and that at the exit
EMPTY = '<div class="empty">Drop a picture, take one with the camera, or choose an example.</div>'
T = TypeVar("T")


class Models:
    """The models on offer by name; each gets its engine when it is first asked for."""

    def __init__(self, given: list[str], device: str = "cpu", threads: int | None = None):
        names = {name: name for name in bundle.bundled()}
        for source in given:
            path = bundle.find(source)
            if path.is_file():
                raise UserError(f"{path} is a single file and shows no steps: give the bundle it was exported from")
            names[source if source in names else path.name] = source
        if not names:
            raise UsageError("there is no model to show: give one with --model")
        first = given[0] if given else (bundle.DEFAULT if bundle.DEFAULT in names else next(iter(names)))
        self.default = next(name for name, source in names.items() if source == first)
        self._sources, self._device, self._threads = names, device, threads
        self._engines: dict[str, Engine[BundleModel]] = {}
        self._heads: dict[str, tuple[Floats, Floats] | None] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    def engine(self, name: str) -> Engine[BundleModel]:
        with self._lock:
            if name not in self._sources:
                raise UsageError(f"no model {name!r} on this page: choose one of {', '.join(self._sources)}")
            if name not in self._engines:
                model = load_bundle(self._sources[name], self._device, self._threads)
                self._heads[name] = weights.head(model.path)
                self._engines[name] = Engine(model, slots=16, queue=2 * MAX_BATCH).start()
            return self._engines[name]

    def config(self, name: str) -> Config:
        return self.engine(name).model.config

    def head(self, name: str) -> tuple[Floats, Floats] | None:
        self.engine(name)
        return self._heads[name]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close(grace=2.0)


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    step: float
    usual: float


def threshold_range(config: Config, rule: str, steps: int) -> Range:
    """Where the threshold of a rule makes sense; the bundle's own value stands as it is."""
    policy = config.exit
    reach = max(policy.travel, default=4.0)
    found = {
        "margin": Range(0, 2 * reach, reach / 200, reach / 4),
        "contraction": Range(-1, 1, 0.005, 0),
        "confidence": Range(0, 1, 0.01, 0.9),
        "patience": Range(1, max(2, steps), 1, min(3, steps)),
        "kl": Range(-0.2, 0, 0.0005, -0.001),
        "latent-diff": Range(-50, 0, 0.05, -1),
    }.get(rule, Range(0, 2, 0.005, 1))
    if rule == policy.rule and exits.calibrated(config):
        own = policy.threshold
        high = max(found.high, 2 * own) if rule in ("travel", "drift", "margin") else found.high
        return Range(min(found.low, own), high, found.step, own)
    return found


def rules(config: Config) -> list[str]:
    return [name for name, rule in exits.RULES.items() if bool(config.exit.travel) or not rule.needs_travel]


@dataclass(frozen=True)
class Controls(Generic[T]):
    """What makes a `Choice`, in order: the inputs themselves, or their values."""

    model: T
    adaptive: T
    rule: T
    threshold: T
    max_steps: T
    solver: T
    steps: T

    @property
    def settings(self) -> list[T]:
        return list(vars(self).values())


class Page:
    """The handlers. Each gives a message in the place of its answer when something is wrong."""

    def __init__(self, models: Models):
        self.models = models

    def choice(
        self, model: str, adaptive: bool, rule: str, threshold: float, max_steps: float, solver: str, steps: float
    ) -> Choice:
        config = self.models.config(model)
        own, policy = config.integration, config.exit
        count = own.steps if not steps else int(steps)
        known = rule if rule in rules(config) else None
        # A slider moves in steps, the calibrated threshold lies between them: what looks the same is the same.
        grain = threshold_range(config, known or policy.rule, count).step
        if known == policy.rule and abs(threshold - policy.threshold) < grain / 2:
            threshold = policy.threshold
        return Choice(
            known if adaptive else None,
            float(threshold) if adaptive and known not in (None, "fixed") else None,
            None if not max_steps or max_steps >= count else int(max_steps),
            solver if solver in SOLVERS else None,
            None if count == own.steps else count,
            adaptive,
        )

    def run(self, picture: str | None, model: str, *settings: Any) -> Inspection:
        if picture is None:
            raise UsageError("there is no picture yet")
        name = Path(picture).name
        return trajectory.run(self.models.engine(model), model, picture, self.choice(model, *settings), name)

    def analyze(self, picture: str | None, head: str, opacity: float, *settings: Any) -> list[Any]:
        """Everything about one picture."""
        if picture is None:
            return [None, EMPTY, "", "", gr.skip(), gr.skip()]
        try:
            run = self.run(picture, *settings)
        except UserError as error:
            return [None, cards.message(str(error)), "", "", gr.skip(), gr.skip()]
        heads = ["mean", *(f"head {n + 1}" for n in range(run.trajectory.maps.shape[1]))]
        head = head if head in heads else "mean"
        return [
            run,
            cards.answer(run),
            cards.attention(run, run.steps, head, opacity),
            plots.trajectory(run, self.models.head(run.name)),
            gr.update(maximum=run.trajectory.steps, value=run.steps),
            gr.update(choices=heads, value=head),
        ]

    def map(self, run: Inspection | None, step: float, head: str, opacity: float) -> str:
        return "" if run is None else cards.attention(run, int(step), head, opacity)

    def play(self, run: Inspection | None, head: str, opacity: float) -> Iterator[list[Any]]:
        """The maps one after another, from the start to the full horizon, with a rest where the picture exits."""
        if run is None:
            yield [gr.skip(), ""]
            return
        for step in range(run.trajectory.steps + 1):
            yield [step, cards.attention(run, step, head, opacity)]
            time.sleep(PAUSE if step == run.steps else FRAME)

    def compare(self, picture: str | None, *settings: Any) -> list[str]:
        """Two settings on one picture."""
        half = len(settings) // 2
        if picture is None:
            return [EMPTY, EMPTY]
        found = []
        for part in (settings[:half], settings[half:]):
            try:
                run = self.run(picture, *part)
                extra = plots.decision(run) + plots.probabilities(run)
                found.append(f'{cards.answer(run)}<div class="plots">{extra}</div>')
            except UserError as error:
                found.append(cards.message(str(error)))
        return found

    def many(self, files: list[str] | None, model: str, *settings: Any) -> list[Any]:
        """Many pictures: a row each, and how deep they went."""
        if not files:
            return [[], "", "Choose some pictures."]
        try:
            rows = self._many(files, model, *settings)
        except UserError as error:
            return [[], "", f"**{error}**"]
        depths = [row["steps"] for row in rows if "steps" in row]
        full = next((row["full_steps"] for row in rows if "steps" in row), 1)
        table = [
            [row["picture"], row["label"], f"{row['probability']:.1%}", row["steps"], row["exit"]]
            if "steps" in row
            else [row["picture"], "", "", None, row["error"]]
            for row in rows
        ]
        words = f"{len(depths)} answered"
        if depths:
            words += f", {sum(depths) / len(depths):.2f} of {full} steps on average"
        wrong = len(rows) - len(depths)
        return [table, plots.histogram(depths, full), words + (f", {wrong} could not be read." if wrong else ".")]

    def _many(self, files: list[str], model: str, *settings: Any) -> list[dict[str, Any]]:
        if len(files) > MAX_BATCH:
            raise UsageError(f"{len(files)} pictures are more than the {MAX_BATCH} that this page takes at once")
        engine, choice = self.models.engine(model), self.choice(model, *settings)
        own = engine.model.config.integration.solver
        if choice.solver not in (None, own):
            raise UsageError(f"many pictures at once need the bundle's own solver, {own}: choose it in the first tab")
        names = [Path(path).name for path in files]
        futures: list[Future[Answer]] = engine.submit_many(files, names=names, **choice.asked)
        rows: list[dict[str, Any]] = []
        for name, future in zip(names, futures):
            try:
                answer = future.result().prediction
            except UserError as error:
                rows.append({"picture": name, "error": str(error)})
                continue
            rows.append(
                {
                    "picture": name,
                    "label": answer.label,
                    "probability": answer.probability,
                    "unsure": answer.unsure,
                    "steps": answer.steps,
                    "full_steps": answer.full_steps,
                    "exit": answer.exit.short,
                }
            )
        return rows

    # -- for programs ---------------------------------------------------------------------------------------------

    def api_predict(
        self,
        picture: str | None,
        model: str,
        adaptive: bool,
        rule: str,
        threshold: float,
        max_steps: float,
        solver: str,
        steps: float,
    ) -> dict[str, Any]:
        run = _shown(self.run)(picture, model, adaptive, rule, threshold, max_steps, solver, steps)
        return {
            "label": run.label,
            "top": [{"label": label, "probability": p} for label, p in run.top()],
            "steps": run.steps,
            "full_steps": run.depth.steps,
            "exit": run.reason.short,
            "sentence": cards.sentence(run),
            "guaranteed": run.depth.guaranteed,
            "unsure": run.unsure,
            "full_label": run.full_label,
            "milliseconds": 1000 * run.seconds,
            "macs": run.macs(),
        }

    def api_attention(
        self,
        picture: str | None,
        step: float,
        model: str,
        adaptive: bool,
        rule: str,
        threshold: float,
        max_steps: float,
        solver: str,
        steps: float,
    ) -> dict[str, Any]:
        run = _shown(self.run)(picture, model, adaptive, rule, threshold, max_steps, solver, steps)
        at = run.steps if step < 0 else min(int(step), run.trajectory.steps)
        return {"step": at, "heads": run.trajectory.maps[at].tolist()}

    def api_batch(
        self,
        files: list[str] | None,
        model: str,
        adaptive: bool,
        rule: str,
        threshold: float,
        max_steps: float,
        solver: str,
        steps: float,
    ) -> list[dict[str, Any]]:
        return _shown(self._many)(files or [], model, adaptive, rule, threshold, max_steps, solver, steps)

    # -- controls -------------------------------------------------------------------------------------------------

    def defaults(self, model: str) -> Controls[dict[str, Any]]:
        """The controls as they are for a model that was just chosen."""
        config = self.models.config(model)
        steps, known = config.integration.steps, rules(config)
        calibrated = exits.calibrated(config)
        rule = config.exit.rule if calibrated and config.exit.rule in known else "confidence"
        return Controls(
            {"choices": self.models.names, "value": model},
            {"value": calibrated},
            {"choices": known, "value": rule},
            _threshold(rule, threshold_range(config, rule, steps)),
            {"maximum": steps, "value": steps},
            {
                "choices": [name for name in SOLVERS if splits(name, config.integration.splitting)],
                "value": config.integration.solver,
            },
            {"maximum": max([3 * steps, *_measured(config)]), "value": steps},
        )

    def for_model(self, model: str) -> list[Any]:
        return [gr.update(**values) for values in self.defaults(model).settings[1:]]

    def for_rule(self, model: str, rule: str, steps: float) -> Any:
        return gr.update(**_threshold(rule, threshold_range(self.models.config(model), rule, int(steps))))

    def for_steps(self, steps: float) -> Any:
        return gr.update(maximum=int(steps), value=int(steps))

    def words(self, model: str, *settings: Any) -> str:
        own, choice = self.models.engine(model).model, self.choice(model, *settings)
        return cards.guarantee(own, choice) + cards.accuracy(own.config, choice)


def _measured(config: Config) -> list[int]:
    """The numbers of steps that the card has an accuracy for."""
    return [int(steps) for steps in config.metrics.get("accuracy_by_steps") or {}]


def _threshold(rule: str, bounds: Range) -> dict[str, Any]:
    return {
        "minimum": bounds.low,
        "maximum": bounds.high,
        "value": bounds.usual,
        "step": bounds.step,
        "label": "threshold",
        "visible": rule != "fixed",
    }


def _shown(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with what is wrong told to the program that called."""

    @functools.wraps(call)
    def wrapped(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None

    return wrapped
