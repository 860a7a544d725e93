"""A loaded model: `load`, `predict`, `attention`."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from .. import bundle
from ..config import Calibration, Config
from ..data import images
from ..errors import UsageError, UserError
from .compute import Compute
from .exits import Depth
from .file_batch import FileBatch
from .options import RequestOptions
from .results import Attention, Failure, Prediction, Result, label_names
from .sessions import Graphs, configuration, metadata, open_session
from .slots import Job, Slots

AT_ONCE = 4  # threads that compute at once, at most: they share the interpreter's lock
CAPACITY = 32  # images on their way at once; more gains nothing on a CPU


@dataclass
class Item:
    """An input on its way: its place in the order, its name, and its pixels or what is wrong with it."""

    place: int
    source: str
    pixels: np.ndarray | None = None
    message: str = ""
    seconds: float = 0.0


class Model(ABC):
    """A loaded model, as `load` gives it. Use it from one thread at a time."""

    def __init__(self, path: Path, config: Config):
        self.path, self.config = path, config
        self.labels = label_names(config)
        self._spare: Compute | None = None  # of the latest stream, for the next

    @property
    def guarantee(self) -> Calibration | None:
        """What was proven about the bundle's own exit policy, with epsilon, delta and the number of images; or None."""
        return self.config.exit.calibration

    def prepare(self, image: Any, name: str | None = None, max_pixels: int = images.MAX_PIXELS) -> np.ndarray:
        """Pixel values [3,H,W] of a picture in any form that `predict` takes."""
        return images.prepare(images.open_picture(image, name, max_pixels), self.config.preprocessing)

    @overload
    def predict(
        self, image: str | os.PathLike[str] | bytes | np.ndarray, *, errors: Literal["raise"] = ..., **asked: Any
    ) -> Prediction: ...
    @overload
    def predict(self, image: Iterable[Any], *, errors: Literal["raise"] = ..., **asked: Any) -> list[Prediction]: ...
    @overload
    def predict(self, image: Any, *, errors: Literal["raise"] = ..., **asked: Any) -> Any: ...
    @overload
    def predict(self, image: Any, *, errors: Literal["return"], **asked: Any) -> Any: ...

    def predict(self, image: Any, *, errors: str = "raise", **asked: Any) -> Any:
        """Answer one image, or a list of them in order; options as in `stream`.

        With `errors="return"` an input that cannot be answered gives a `Failure`; otherwise the first one raises.
        """
        if errors not in ("raise", "return"):
            raise UsageError(f"errors must be 'raise' or 'return', not {errors!r}")
        one = is_single(image)
        results = list(self.stream([image] if one else image, **asked))
        for result in results:
            if isinstance(result, Failure) and errors == "raise":
                raise UserError(result.message)
        return results[0] if one else results

    def stream(
        self, sources: Iterable[Any], options: RequestOptions | None = None, /, **asked: Any
    ) -> Iterator[Result]:
        """Answer any number of images, in order and as they come; only those being computed are held in memory.

        Options are those of `RequestOptions`, by name or as one object: `steps` divides the horizon into that many
        steps, `max_steps` stops after so many of them, `rule` and `threshold` set when an image exits, `adaptive=False`
        takes every step, `deadline_ms` ends an image after that time in the model. `trace` keeps the numbers of every
        step, `attention` the map at the last. `solver` and `splitting` replace the bundle's own; their graphs are made
        from copies of its pieces. With a `tolerance`, each image takes several steps at once where the estimated error
        of CLS allows that.
        """
        wanted = RequestOptions.of(options, asked)
        other = self.integrated(wanted.solver, wanted.splitting, wanted.tolerance)
        if other is not self:
            return other.stream(sources, wanted)
        if wanted.states:
            raise UsageError("states are given by the engine: Engine.submit(image, states=True)")
        compute = self._spare or self.compute()
        if wanted.deadline_ms is not None and not compute.anytime:
            raise UsageError(f"{self.path.name} is a single file: a deadline needs the bundle it came from")
        depth, self._spare = compute.depth(wanted), None  # its own: another stream may start before this one ends
        return _in_order(self._run(Reader(sources, self.prepare), compute, depth, wanted))

    def _run(
        self, items: Reader, compute: Compute, depth: Depth, options: RequestOptions
    ) -> Iterator[tuple[int, Result]]:
        """Results with their places, in any order."""
        waiting: dict[int, Item] = {}
        while True:
            ready = items.take(compute.free, wait=not compute.active)
            good = [item for item in ready if item.pixels is not None]
            yield from ((item.place, Failure(item.source, item.message)) for item in ready if item.pixels is None)
            if good:
                until = math.inf if options.deadline_ms is None else compute.clock() + options.deadline_ms / 1000
                compute.admit(
                    np.stack([item.pixels for item in good if item.pixels is not None]),
                    [Job(item.place, depth, until, options.trace, options.keep) for item in good],
                )
                for item in good:
                    item.pixels = None
                    waiting[item.place] = item
            if not compute.active:
                if items.done:
                    self._spare = compute
                    return
                continue
            for outcome in compute.step():
                item = waiting.pop(outcome.job.key)
                yield item.place, compute.finish(outcome, item.source, item.seconds)

    def integrated(
        self, solver: str | None = None, splitting: str | None = None, tolerance: float | None = None
    ) -> Model:
        """The model with another solver, splitting or tolerance; the same object where none differs from its own."""
        return self  # a single file refuses another when it is asked for its depth

    @abstractmethod
    def compute(self, capacity: int = CAPACITY) -> Compute:
        """Rows for images on their way through this model."""

    @abstractmethod
    def computes(self, capacity: int = CAPACITY) -> Sequence[Compute]:
        """The same rows in parts, for threads that compute at once."""

    def open_all(self) -> None:
        """Open what would be opened when it is first asked for: the files may be replaced while this is in use."""
        return

    @abstractmethod
    def attention(self, image: Any, step: int | None = None, **asked: Any) -> Attention:
        """The attention maps of CLS for an image after `step` steps (0: before the first; None: where it exits)."""

    def _last_map(self, image: Any, asked: dict[str, Any]) -> Attention:
        result = next(self.stream([image], attention=True, **asked))
        if isinstance(result, Failure):
            raise UserError(result.message)
        assert result.attention is not None
        return result.attention


class BundleModel(Model):
    """A bundle folder: the host steps through it, image by image."""

    def __init__(
        self,
        path: Path,
        config: Config,
        device: str = "cpu",
        threads: int | None = None,
        trust: bool = False,
        graphs: Graphs | None = None,
    ):
        self.graphs = graphs or Graphs(path, config, device, threads, trust)
        super().__init__(path, self.graphs.config)
        self._others: dict[tuple[str, str, float], BundleModel] = {}

    def integrated(
        self, solver: str | None = None, splitting: str | None = None, tolerance: float | None = None
    ) -> BundleModel:
        own = self.config.integration
        wanted = own.by(solver, splitting, tolerance)
        if wanted == own:
            return self
        key, graphs = (wanted.solver, wanted.splitting, wanted.tolerance), self.graphs
        if key not in self._others:
            other = Graphs(self.path, graphs.own, graphs.device, graphs.threads, graphs.trusted, *key)
            self._others[key] = BundleModel(self.path, graphs.own, graphs=other)
        return self._others[key]

    def depth(self, **asked: Any) -> Depth:
        """Checked options (`steps`, `max_steps`, `rule`, `threshold`, `adaptive`, `tolerance`) for a `Job`."""
        return self.graphs.depth(RequestOptions.of(None, asked))

    def slots(self, capacity: int = CAPACITY) -> Slots:
        """Rows for images on their way, of this model's graphs."""
        return Slots(self.graphs, capacity)

    def compute(self, capacity: int = CAPACITY) -> Slots:
        return self.slots(capacity)

    def computes(self, capacity: int = CAPACITY, kind: type[Slots] = Slots) -> Sequence[Slots]:
        graphs = self.graphs
        parts, each = _parts(capacity, graphs.device, graphs.threads)
        beside = graphs.open(each) if len(parts) > 1 else None
        return [kind(graphs, part, beside=beside) for part in parts]

    def open_all(self) -> None:
        if (self.path / bundle.ATTENTION).is_file():
            _ = self.graphs.attention

    def attention(self, image: Any, step: int | None = None, **asked: Any) -> Attention:
        if step is None:
            return self._last_map(image, asked)
        full = asked.get("steps") or self.config.integration.steps
        if not 0 <= step <= full:
            raise UsageError(f"step must lie between 0 and {full}, not {step}")
        depth = self.depth(adaptive=False, max_steps=max(step, 1), **asked)
        maps = self._maps(image, depth)
        if step >= len(maps):
            raise UsageError(f"the image takes {len(maps) - 1} steps of sizes of its own: there is no step {step}")
        return maps[step]

    def attention_steps(self, image: Any, **asked: Any) -> list[Attention]:
        """The CLS maps along the whole trajectory, from before the first step to the full horizon."""
        return list(self._maps(image, self.depth(adaptive=False, **asked)))

    def _maps(self, image: Any, depth: Depth) -> tuple[Attention, ...]:
        slots = self.slots(1)
        slots.admit(self.prepare(image)[None], [Job(0, depth, keep="all")])
        while True:
            for outcome in slots.step():
                return slots.maps(outcome)


class FileModel(Model):
    """A single exported file: the whole trajectory is inside the graph."""

    def __init__(self, path: Path, device: str = "cpu", threads: int | None = None, trust: bool = False):
        self.session = open_session(path, device, threads, trust)
        self._opened = (device, threads, trust)
        found = metadata(self.session, path)
        super().__init__(path, configuration(found, path))
        if found.get("format") == "parts":
            raise UserError(f"{path} is one part of a bundle: give the folder it lies in")
        self.compute(1)  # which checks that it is such a file

    def compute(self, capacity: int = CAPACITY) -> FileBatch:
        return FileBatch(self.path.name, self.config, self.session, capacity)

    def computes(self, capacity: int = CAPACITY) -> Sequence[Compute]:
        device, threads, trust = self._opened
        parts, each = _parts(capacity, device, threads)
        beside = open_session(self.path, device, each, trust) if len(parts) > 1 else None
        return [FileBatch(self.path.name, self.config, self.session, part, beside=beside) for part in parts]

    @property
    def adaptive(self) -> bool:
        """Whether images exit inside the graph."""
        return self.compute(1).adaptive

    def attention(self, image: Any, step: int | None = None, **asked: Any) -> Attention:
        full = self.config.integration.steps
        if step not in (None, full):
            raise UsageError(f"{self.path.name} gives the map after step {full} only, not after {step}")
        return self._last_map(image, asked)


def _parts(capacity: int, device: str, threads: int | None) -> tuple[list[int], int]:
    """How many rows each of the threads that compute at once has, and how many threads of onnxruntime."""
    given = threads or os.cpu_count() or 1
    count = min(given, AT_ONCE, capacity) if device == "cpu" else 1  # one graph at a time fills a GPU
    return [capacity // count + (i < capacity % count) for i in range(count)], given // count


def load(
    source: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    threads: int | None = None,
    trust: bool = False,
) -> BundleModel | FileModel:
    """Load a model by bundled name (None: the default), bundle folder, exported .onnx file or Hub name.

    Without `trust`, graphs that refer to other data or code are refused and their memory is bounded (`runtime.trust`).
    """
    path = bundle.find(source)
    if path.is_dir():
        return load_bundle(path, device, threads, trust)
    return FileModel(path, device, threads, trust)


def load_bundle(
    source: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    threads: int | None = None,
    trust: bool = False,
) -> BundleModel:
    """Load a bundle, for what needs separate steps: a single exported file is refused."""
    path = bundle.find(source)
    if not path.is_dir():
        raise UserError(f"{path} is a single file and shows no steps: give the bundle it was exported from")
    return BundleModel(path, bundle.read_config(path), device, threads, trust)


def is_single(image: Any) -> bool:
    """Whether `predict` was given one picture rather than several."""
    if isinstance(image, np.ndarray):
        return image.ndim != 4
    return (
        isinstance(image, str | os.PathLike | bytes | bytearray | memoryview)
        or hasattr(image, "read")
        or (hasattr(image, "convert"))
    )


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
