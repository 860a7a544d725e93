"""A loaded model: `load`, `predict`, `attention`, and the typed results they give."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from . import bundle, dynamics, exits, images
from .bundle import Calibration, Config
from .dynamics import Floats
from .errors import UsageError, UserError
from .exits import REASONS, Depth, ExitReason
from .session import Graphs, open_session, properties, read_metadata
from .slots import Job, Outcome, Slots

CAPACITY = 32  # images on their way at once; more gains nothing on a CPU


@dataclass(frozen=True)
class Attention:
    """Where CLS looks in the picture: one map a head and their mean, each summing to what CLS gives to patches."""

    step: int
    heads: Floats  # [heads, grid, grid]

    @property
    def mean(self) -> Floats:
        return self.heads.mean(0)


@dataclass(frozen=True)
class TraceStep:
    """One step of an image's way."""

    step: int
    time: float
    speed: float
    exponent: float | None
    travel: float | None
    margin: float
    label: str
    probability: float  # of the label the image ended with


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
    margin: float | None  # distance of the CLS state to the nearest decision boundary
    exponent: float | None  # finite-time Lyapunov exponent
    guaranteed: bool  # the settings are those the bundle's guarantee was calibrated for
    source: str
    read_seconds: float
    compute_seconds: float
    trace: tuple[TraceStep, ...] = field(default=(), repr=False)
    attention: Attention | None = field(default=None, repr=False)

    @property
    def probability(self) -> float:
        return float(self.probabilities[self.index])

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
            "top": [{"label": label, "probability": value} for label, value in self.top(top)],
            "steps": self.steps,
            "full_steps": self.full_steps,
            "exit": self.exit.short,
            "exit_sentence": str(self.exit),
            "margin": self.margin,
            "exponent": self.exponent,
            "guaranteed": self.guaranteed,
            "milliseconds": {"read": 1000 * self.read_seconds, "compute": 1000 * self.compute_seconds},
        }
        if self.trace:
            answer["trace"] = [vars(step) for step in self.trace]
        return answer


@dataclass(frozen=True)
class Failure:
    """An input that could not be answered, and why."""

    source: str
    message: str


Result = Prediction | Failure


@dataclass
class Item:
    """An input on its way: its place in the order, its name, and its pixels or what is wrong with it."""

    place: int
    source: str
    pixels: np.ndarray | None = None
    message: str = ""
    seconds: float = 0.0


class Model(ABC):
    """What `load` gives. Use it from one thread at a time."""

    def __init__(self, path: Path, config: Config):
        self.path, self.config = path, config
        names = config.labels or tuple(str(i) for i in range(config.architecture.classes))
        self.labels: tuple[str, ...] = tuple(names)

    @property
    def guarantee(self) -> Calibration | None:
        """What was proven about the bundle's own exit policy: epsilon, delta and the number of images."""
        return self.config.exit.calibration

    def prepare(self, image: Any, name: str | None = None) -> np.ndarray:
        """Pixel values [3,H,W] of a picture in any form that `predict` takes."""
        return images.prepare(images.read(image, name), self.config.preprocessing)

    @overload
    def predict(
        self, image: str | os.PathLike[str] | bytes | np.ndarray, *, errors: Literal["raise"] = ..., **settings: Any
    ) -> Prediction: ...
    @overload
    def predict(self, image: Iterable[Any], *, errors: Literal["raise"] = ..., **settings: Any) -> list[Prediction]: ...
    @overload
    def predict(self, image: Any, *, errors: Literal["raise"] = ..., **settings: Any) -> Any: ...
    @overload
    def predict(self, image: Any, *, errors: Literal["return"], **settings: Any) -> Any: ...

    def predict(self, image: Any, *, errors: str = "raise", **settings: Any) -> Any:
        """Answer one image, or a list of them in order; settings as in `stream`.

        With `errors="return"` a bad input takes its place in the list as a `Failure`; otherwise the first one raises.
        """
        if errors not in ("raise", "return"):
            raise UsageError(f"errors must be 'raise' or 'return', not {errors!r}")
        one = is_single(image)
        results = list(self.stream([image] if one else image, **settings))
        for result in results:
            if isinstance(result, Failure) and errors == "raise":
                raise UserError(result.message)
        return results[0] if one else results

    def stream(
        self,
        sources: Iterable[Any],
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        rule: str | None = None,
        threshold: float | None = None,
        kappa: float | None = None,
        adaptive: bool = True,
        deadline_ms: float | None = None,
        trace: bool = False,
        attention: bool = False,
    ) -> Iterator[Result]:
        """Answer images as they come, in order, holding only as many as are on their way.

        `steps` cuts the horizon into that many steps, `max_steps` stops after so many of them. `kappa` is the threshold
        of the contraction rules. `trace` keeps the numbers of every step, `attention` the map at the last.
        """
        if kappa is not None and threshold is not None:
            raise UsageError("give kappa or threshold, not both: they are one number")
        threshold = threshold if kappa is None else kappa
        run = self._run(
            Reader(sources, self.prepare),
            {"steps": steps, "max_steps": max_steps, "rule": rule, "threshold": threshold, "adaptive": adaptive},
            None if deadline_ms is None else deadline_ms / 1000,
            trace,
            attention,
        )
        return _in_order(run)

    @abstractmethod
    def _run(
        self,
        items: Reader,
        settings: dict[str, Any],
        deadline: float | None,
        trace: bool,
        attention: bool,
    ) -> Iterator[tuple[int, Result]]:
        """Results with their places, in any order."""

    @abstractmethod
    def attention(self, image: Any, step: int | None = None, **settings: Any) -> Attention:
        """The CLS maps of an image after `step` steps (0: before the first; None: where it exits)."""


class BundleModel(Model):
    """A bundle folder: the host steps through it, image by image."""

    def __init__(self, path: Path, config: Config, device: str = "cpu", threads: int | None = None):
        super().__init__(path, config)
        self.graphs = Graphs(path, config, device, threads)
        self._slots: Slots | None = None

    def depth(self, **settings: Any) -> Depth:
        """Checked settings (`steps`, `max_steps`, `rule`, `threshold`, `adaptive`) for a `Job`."""
        return exits.resolve(self.config, **settings)

    def slots(self, capacity: int = CAPACITY) -> Slots:
        """Rows for images on their way, of this model's graphs."""
        return Slots(self.graphs, capacity)

    def finish(self, outcome: Outcome, source: str = "", read_seconds: float = 0.0) -> Result:
        """The result that an outcome of the slots stands for."""
        if not np.isfinite(outcome.logits).all():
            return Failure(source, f"{source}: the trajectory left the finite numbers after {outcome.steps} steps")
        probabilities = dynamics.softmax(outcome.logits.astype(np.float64))
        index = int(probabilities.argmax())
        attention = None
        if outcome.states:
            attention = self._maps(outcome.states[-1], outcome.steps)
        depth = outcome.job.depth
        return Prediction(
            self.labels[index],
            index,
            probabilities,
            self.labels,
            outcome.steps,
            depth.steps,
            outcome.reason,
            outcome.margin,
            _number(outcome.exponent),
            depth.guaranteed and outcome.reason is not ExitReason.DEADLINE,
            source,
            read_seconds,
            outcome.seconds,
            self._trace(outcome, index),
            attention,
        )

    def _trace(self, outcome: Outcome, index: int) -> tuple[TraceStep, ...]:
        return tuple(
            TraceStep(
                s.step,
                s.time,
                s.speed,
                _number(s.exponent),
                _number(s.travel),
                s.margin,
                self.labels[int(s.logits.argmax())],
                float(dynamics.softmax(s.logits)[index]),
            )
            for s in outcome.trace
        )

    def _maps(self, state: Floats, step: int) -> Attention:
        grid = self.config.architecture.grid
        return Attention(step, self.graphs.maps(state[None])[0].reshape(-1, grid, grid))

    def _run(
        self, items: Reader, settings: dict[str, Any], deadline: float | None, trace: bool, attention: bool
    ) -> Iterator[tuple[int, Result]]:
        depth = self.depth(**settings)
        slots, self._slots = self._slots or self.slots(), None  # its own: another stream may start before this one ends
        waiting: dict[int, Item] = {}
        while True:
            ready = items.take(slots.free, wait=not slots.active)
            good = [item for item in ready if item.pixels is not None]
            yield from ((item.place, Failure(item.source, item.message)) for item in ready if item.pixels is None)
            if good:
                until = math.inf if deadline is None else slots.clock() + deadline
                keep = "last" if attention else ""
                slots.admit(
                    np.stack([item.pixels for item in good if item.pixels is not None]),
                    [Job(item.place, depth, until, trace, keep) for item in good],
                )
                for item in good:
                    item.pixels = None
                    waiting[item.place] = item
            if not slots.active:
                if items.done:
                    self._slots = slots
                    return
                continue
            for outcome in slots.step():
                item = waiting.pop(outcome.job.key)
                yield item.place, self.finish(outcome, item.source, item.seconds)

    def attention(self, image: Any, step: int | None = None, **settings: Any) -> Attention:
        if step is None:
            result = next(self.stream([image], attention=True, **settings))
            if isinstance(result, Failure):
                raise UserError(result.message)
            assert result.attention is not None
            return result.attention
        full = settings.get("steps") or self.config.integration.steps
        if not 0 <= step <= full:
            raise UsageError(f"step must lie between 0 and {full}, not {step}")
        depth = self.depth(adaptive=False, max_steps=max(step, 1), **settings)
        return self._maps(self._states(image, depth)[step], step)

    def attention_steps(self, image: Any, **settings: Any) -> list[Attention]:
        """The CLS maps along the whole way, from before the first step to the full horizon."""
        states = self._states(image, self.depth(adaptive=False, **settings))
        return [self._maps(state, step) for step, state in enumerate(states)]

    def _states(self, image: Any, depth: Depth) -> tuple[Floats, ...]:
        slots = self.slots(1)
        slots.admit(self.prepare(image)[None], [Job(0, depth, keep="all")])
        while True:
            for outcome in slots.step():
                return outcome.states


class FileModel(Model):
    """A single exported file: the whole trajectory is inside the graph."""

    def __init__(self, path: Path, config: Config, kind: str, device: str = "cpu", threads: int | None = None):
        super().__init__(path, config)
        self.kind = kind
        self.session = open_session(path, device, threads)
        self._inputs = {value.name: value.type for value in self.session.get_overridable_initializers()}
        self._inputs.update({value.name: value.type for value in self.session.get_inputs()})
        self._outputs = [value.name for value in self.session.get_outputs()]
        if "pixel_values" not in self._inputs or "logits" not in self._outputs:
            raise UserError(
                f"{path} is no ODE-ViT: it takes {', '.join(self._inputs)} and gives {', '.join(self._outputs)}"
            )

    @property
    def adaptive(self) -> bool:
        return "steps" in self._outputs

    def _feeds(self, settings: dict[str, Any]) -> dict[str, np.ndarray]:
        """The optional inputs that the settings ask for; what is fixed in the graph is refused."""
        name, own = self.path.name, self.config.integration.steps
        if settings["steps"] not in (None, own):
            raise UsageError(f"{name} takes {own} steps, fixed when it was exported, not {settings['steps']}")
        if not self.adaptive:
            for key in ("max_steps", "rule", "threshold"):
                if settings[key] is not None:
                    raise UsageError(f"{name} has a fixed depth of {own} steps, so {key} cannot be set")
            return {}
        if not settings["adaptive"]:
            raise UsageError(f"{name} exits inside the graph: export --format onnx for a fixed depth")
        if settings["rule"] not in (None, "contraction"):
            raise UsageError(f"{name} has the rule 'contraction' built in, not {settings['rule']!r}")
        depth = exits.resolve(self.config, max_steps=settings["max_steps"], threshold=settings["threshold"])
        feeds = {}
        if settings["max_steps"] is not None:
            feeds["max_steps"] = np.array(depth.max_steps, np.int64)
        if settings["threshold"] is not None:
            feeds["kappa"] = np.array(depth.threshold, np.float32)
        return feeds

    def _run(
        self, items: Reader, settings: dict[str, Any], deadline: float | None, trace: bool, attention: bool
    ) -> Iterator[tuple[int, Result]]:
        if deadline is not None or trace:
            raise UsageError(f"{self.path.name} is one graph: a deadline or a trace needs the bundle it came from")
        if attention and "cls_attention" not in self._outputs:
            raise UsageError(f"{self.path.name} was exported without attention maps: give the bundle it came from")
        feeds = self._feeds(settings)
        while not items.done:
            ready = items.take(CAPACITY, wait=True)
            yield from ((item.place, Failure(item.source, item.message)) for item in ready if item.pixels is None)
            good = [item for item in ready if item.pixels is not None]
            if not good:
                continue
            began = time.monotonic()
            pixels = np.stack([item.pixels for item in good if item.pixels is not None])
            values = self.session.run(None, {"pixel_values": pixels, **feeds})
            seconds = (time.monotonic() - began) / len(good)
            outputs = dict(zip(self._outputs, values))
            for row, item in enumerate(good):
                yield item.place, self._finish(item, {k: v[row] for k, v in outputs.items()}, seconds, bool(feeds))

    def _finish(self, item: Item, outputs: dict[str, Any], seconds: float, changed: bool) -> Result:
        logits = outputs["logits"]
        if not np.isfinite(logits).all():
            return Failure(item.source, f"{item.source}: the trajectory left the finite numbers")
        probabilities = dynamics.softmax(logits.astype(np.float64))
        index, full = int(probabilities.argmax()), self.config.integration.steps
        attention = None
        if "cls_attention" in outputs:
            grid = self.config.architecture.grid
            attention = Attention(full, outputs["cls_attention"].reshape(-1, grid, grid))
        proof = self.guarantee
        return Prediction(
            self.labels[index],
            index,
            probabilities,
            self.labels,
            int(outputs.get("steps", full)),
            full,
            REASONS[int(outputs.get("exit_reason", ExitReason.HORIZON))],
            None,
            None,
            not self.adaptive or (proof is not None and proof.steps == full and not changed),
            item.source,
            item.seconds,
            seconds,
            (),
            attention,
        )

    def attention(self, image: Any, step: int | None = None, **settings: Any) -> Attention:
        full = self.config.integration.steps
        if step not in (None, full):
            raise UsageError(f"{self.path.name} gives the map after step {full} only, not after {step}")
        result = next(self.stream([image], attention=True, **settings))
        if isinstance(result, Failure):
            raise UserError(result.message)
        assert result.attention is not None
        return result.attention


def load(
    source: str | os.PathLike[str] | None = None, device: str = "cpu", threads: int | None = None
) -> BundleModel | FileModel:
    """A model by bundled name (None: the default), bundle folder, exported .onnx file or Hub name."""
    path = bundle.find(source)
    if path.is_dir():
        return BundleModel(path, bundle.read_config(path), device, threads)
    config, kind = read_metadata(path), properties(path).get("format", "onnx")
    if kind.startswith("part"):
        raise UserError(f"{path} is one part of a bundle: give the folder it lies in")
    return FileModel(path, config, kind, device, threads)


def is_single(image: Any) -> bool:
    """Whether `predict` was given one picture rather than several."""
    if isinstance(image, np.ndarray):
        return image.ndim != 4
    return (
        isinstance(image, str | os.PathLike | bytes | bytearray | memoryview)
        or hasattr(image, "read")
        or (hasattr(image, "convert"))
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Reader:
    """Inputs read a little ahead of their use; with several of them, on threads (decoders let go of the lock)."""

    AHEAD, THREADS = 2 * CAPACITY, 2

    def __init__(self, sources: Iterable[Any], prepare: Any):
        self._sources, self._prepare = enumerate(sources), prepare
        self._queue: deque[Future[Item] | tuple[int, Any]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._exhausted = False
        self._fill(2)

    @property
    def done(self) -> bool:
        return self._exhausted and not self._queue

    def take(self, count: int, wait: bool) -> list[Item]:
        """Up to `count` items that are ready, in order; with `wait`, at least one unless there are no more."""
        self._fill(self.AHEAD)
        taken: list[Item] = []
        while self._queue and len(taken) < count:
            head = self._queue[0]
            if isinstance(head, Future):
                if not head.done() and (taken or not wait):
                    break
                item = head.result()
            else:
                item = self._read(*head)
            self._queue.popleft()
            taken.append(item)
        if self._exhausted and not self._queue and self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
        return taken

    def _fill(self, size: int) -> None:
        while not self._exhausted and len(self._queue) < size:
            try:
                place, source = next(self._sources)
            except StopIteration:
                self._exhausted = True
            else:
                if place == 0:  # a single input is read where it is used: no thread to start
                    self._queue.append((place, source))
                else:
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(self.THREADS)
                    self._queue.append(self._pool.submit(self._read, place, source))

    def _read(self, place: int, source: Any) -> Item:
        began, name = time.monotonic(), images.describe(source)
        try:
            pixels = self._prepare(source)
        except UserError as error:
            return Item(place, name, message=str(error))
        return Item(place, name, pixels, seconds=time.monotonic() - began)


def _in_order(results: Iterator[tuple[int, Result]]) -> Iterator[Result]:
    early: dict[int, Result] = {}
    place = 0
    for index, result in results:
        early[index] = result
        while place in early:
            yield early.pop(place)
            place += 1
