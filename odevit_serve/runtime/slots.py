"""Images at different depths in one batch: preallocated rows, advanced together, compacted as they finish.

`Slots` is synchronous and has no thread: `admit` puts images into free rows, `step` advances every active row by one
step of its own size and hands back those that have ended. Rows that have ended are never computed again: the last
active rows are moved into their place, so the batch of every call is exactly the active images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import step_size
from ..bundle import ESTIMATE_INPUTS, ESTIMATE_OUTPUTS, STEM, STEP
from ..errors import UsageError
from .dynamics import Floats
from .exits import REASONS, Depth, ExitReason, Measured, Readings, Rule, decide
from .jobs import Job, Outcome, Parked, Step
from .options import RequestOptions
from .results import Attention, Result, conclude, label_names
from .sessions import Graphs, Sessions, cannot_run

__all__ = ["Job", "Outcome", "Slots", "Step"]


@dataclass(frozen=True)
class _Entry:
    """What belongs to an active row but is no number."""

    job: Job
    trace: list[Step]
    kept: list[Floats]

    @property
    def watched(self) -> bool:
        return self.job.trace or self.job.keep in ("all", "cls")

    def take(self, state: Floats) -> None:
        self.kept.append((state[0] if self.job.keep == "cls" else state).copy())


class _Estimate(NamedTuple):
    """Rows of graphs whose steps choose their size: what such a step reads and gives, and where it leaves an image."""

    before: Floats  # the size of the step before; 0: there was none
    left: Floats  # time to the horizon
    tolerance: Floats
    taken: Floats
    change: Floats
    error: Floats  # estimated
    last: Floats  # `taken` in double
    position: np.ndarray  # in steps of the grid
    grid: Floats  # the size of those
    steps: np.ndarray  # how many there are

    def read(self) -> None:
        """Take over what a step has given."""
        self.last[:] = self.taken
        self.error[:] = step_size.estimate(self.change, self.last, self.before)
        self.position[:] += np.rint(self.last / self.grid).astype(np.int64)
        self.left[:] = (self.steps - self.position) * self.grid
        self.before[:] = self.taken


class _Bound(NamedTuple):
    """The first so many rows on one side: what a step of them is bound to, and views of what it leaves behind.

    Made once and kept: cutting them anew is a hundredth or two of the time of a step of a single image.
    """

    binding: Any
    readings: tuple[Any, ...]  # the arrays of `Readings`
    top: np.ndarray
    threshold: Floats
    max_steps: np.ndarray
    estimate: _Estimate | None = None


class Slots:
    """Up to `capacity` images on their way. One thread at a time may use it. It is the `Compute` of a bundle."""

    anytime = True  # an image can end after any step
    least_steps = 1

    def __init__(
        self,
        graphs: Graphs,
        capacity: int = 32,
        clock: Callable[[], float] = time.monotonic,
        beside: Sessions | None = None,
    ):
        if capacity < 1:
            raise UsageError(f"capacity must be at least 1, not {capacity}")
        self.graphs, self.capacity, self.clock = graphs, capacity, clock
        self._sessions = {True: graphs.sessions, False: beside or graphs.sessions}  # by `alone`
        self.alone = True
        self.measured = Measured.of(graphs.config)
        self.labels = label_names(graphs.config)
        self.active = 0
        self.seconds = {"stem": 0.0, "step": 0.0}  # spent inside the graphs
        classes = graphs.config.architecture.classes
        self._pixel_shape = tuple(graphs.config.preprocessing.input_size)
        # Two of everything that a step both reads and writes: a step goes from one side to the other.
        self._states = [np.empty((capacity, *graphs.state_shape), np.float32) for _ in range(2)]
        self._logits = [np.empty((capacity, classes), np.float32) for _ in range(2)]
        self._side = 0
        self._margin, self._gain, self._exponent, self._speed, self._cls_speed, self._first = (
            np.empty(capacity, np.float32) for _ in range(6)
        )
        self._step_size = np.empty(capacity, np.float32)
        self._sizes = np.empty(capacity)  # the same in double: time is a product of it
        self._step, self._steps, self._max, self._top, self._unchanged = (
            np.zeros(capacity, np.int64) for _ in range(5)
        )
        self._threshold, self._lyapunov, self._passed, self._deadline, self._since = (
            np.empty(capacity) for _ in range(5)
        )
        self._rows: list[np.ndarray] = [  # all but the states
            *self._logits, self._margin, self._gain, self._exponent, self._speed, self._cls_speed, self._first,
            self._step_size, self._sizes, self._step, self._steps, self._max, self._top, self._unchanged,
            self._threshold, self._lyapunov, self._passed, self._deadline, self._since,
        ]  # fmt: skip
        self._estimate: _Estimate | None = None
        if graphs.estimates:
            before, left, tolerance, taken, change = (np.zeros(capacity, np.float32) for _ in range(5))
            error, last, position = np.zeros(capacity), np.zeros(capacity), np.zeros(capacity, np.int64)
            self._estimate = _Estimate(
                before, left, tolerance, taken, change, error, last, position, self._sizes, self._steps
            )
            self._rows += self._estimate[:-2]  # the last two are there
        self._entries: list[_Entry] = []
        self._known: dict[tuple[int, int, bool], _Bound] = {}  # by rows, side and `alone`
        self._watched = 0  # jobs that keep something of every step
        self._timed = 0  # jobs with a deadline
        self._limited = 0  # jobs with a Lyapunov limit
        self._fresh = False  # whether some row has not made its first step
        self._rules: dict[str, Rule] = {}  # of the active rows

    @property
    def free(self) -> int:
        return self.capacity - self.active

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(entry.job for entry in self._entries)

    def admit(self, pixels: np.ndarray, jobs: Sequence[Job]) -> None:
        """Put images [k,3,H,W] into free rows and run the stem on them."""
        count = len(jobs)
        if count > self.free:
            raise UsageError(f"{count} images for {self.free} free slots")
        if pixels.shape != (count, *self._pixel_shape):
            raise UsageError(f"pixels of shape {list(pixels.shape)}, not {[count, *self._pixel_shape]}")
        if not count:
            return
        pixels = np.ascontiguousarray(pixels, np.float32)
        start, end = self.active, self.active + count
        began = self.clock()
        self._run_stem(pixels, self._states[self._side][start:end])
        self.seconds["stem"] += self.clock() - began
        depths = [jobs[0].depth] if all(job.depth is jobs[0].depth for job in jobs) else [job.depth for job in jobs]
        self._step_size[start:end] = self._sizes[start:end] = [depth.step_size for depth in depths]
        self._steps[start:end] = [depth.steps for depth in depths]
        self._max[start:end] = [depth.max_steps for depth in depths]
        self._threshold[start:end] = [depth.threshold for depth in depths]
        self._lyapunov[start:end] = [depth.lyapunov for depth in depths]
        self._deadline[start:end] = [job.deadline for job in jobs]
        for row, job in enumerate(jobs, start):
            entry = _Entry(job, [], [])
            if job.keep in ("all", "cls"):
                entry.take(self._states[self._side][row])
            self._count(entry, 1)
            self._entries.append(entry)
        if self._estimate is not None:
            own = self._estimate
            own.before[start:end] = own.position[start:end] = 0
            own.left[start:end] = self._steps[start:end] * self._sizes[start:end]
            own.tolerance[start:end] = [depth.tolerance for depth in depths]
        self._step[start:end] = 0
        self._unchanged[start:end] = 0
        self._passed[start:end] = 0.0
        self._top[start:end] = -1
        self._since[start:end] = began
        self._rules |= {job.depth.rule.name: job.depth.rule for job in jobs}
        self._fresh = True
        self.active = end

    def resume(self, parked: Parked, job: Job) -> None:
        """Put an image that was parked at its exit into a free row, to go on from there as `job` says."""
        if not self.free:
            raise UsageError("no free slot to resume an image in")
        row, depth = self.active, job.depth
        for array, value in zip(self._rows, parked.numbers):
            array[row] = value
        self._states[self._side][row], self._logits[self._side][row] = parked.state, parked.logits
        self._max[row], self._deadline[row] = depth.max_steps, job.deadline
        self._threshold[row], self._lyapunov[row] = depth.threshold, depth.lyapunov
        entry = _Entry(job, list(parked.trace), [])
        self._count(entry, 1)
        self._entries.append(entry)
        self._rules[depth.rule.name] = depth.rule
        self.active += 1

    def step(self) -> list[Outcome]:
        """Advance every active image by one step, and hand back those that end with it."""
        rows = self.active
        if not rows:
            return []
        began = self.clock()
        bound = self._bound(rows)
        self._run_step(rows)
        now = self.clock()
        self.seconds["step"] += now - began
        readings = self._read(bound)
        score = self._score(readings)
        late = now >= self._deadline[:rows] if self._timed else None
        limit = self._lyapunov[:rows] if self._limited else None
        code = decide(readings, score, bound.threshold, limit, late, bound.max_steps)
        if self._watched:
            self._watch(readings, score)
        if code is None:
            return []
        ended = np.flatnonzero(code >= 0)
        outcomes = [self._outcome(row, REASONS[code[row]], readings, now) for row in ended.tolist()]
        self._compact(ended)
        return outcomes

    def cancel(self, key: Any) -> bool:
        """Free the row of the image known by `key`; False when it is not here."""
        for row, entry in enumerate(self._entries):
            if entry.job.key == key:
                self._compact(np.array([row]))
                return True
        return False

    def clear(self) -> tuple[Job, ...]:
        """Free every row, for example after a step that raised; gives back the jobs that were in them."""
        jobs = self.jobs
        if jobs:
            self._compact(np.arange(self.active))
        return jobs

    def depth(self, options: RequestOptions) -> Depth:
        """How deep an image with these options goes."""
        return self.graphs.depth(options)

    def finish(self, outcome: Outcome, source: str = "", read_seconds: float = 0.0) -> Result:
        """The result that an outcome stands for, with the map of the last state where that alone was kept."""
        attention = self.maps(outcome)[0] if outcome.job.keep == "last" else None
        return conclude(self.labels, outcome, source, read_seconds, attention, self.graphs.config.confidence)

    def maps(self, outcome: Outcome) -> tuple[Attention, ...]:
        """The CLS maps of the states that were kept."""
        grid, first = self.graphs.config.architecture.grid, outcome.steps + 1 - len(outcome.states)
        heads = self.graphs.maps(np.stack(outcome.states))
        return tuple(Attention(step, values.reshape(-1, grid, grid)) for step, values in enumerate(heads, first))

    def _run_stem(self, pixels: np.ndarray, target: np.ndarray) -> None:
        stem = self._sessions[self.alone].stem
        binding = stem.io_binding()
        _bind(binding.bind_input, "pixel_values", pixels)
        _bind(binding.bind_output, "state", target)
        try:
            stem.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's own classes share no other base
            raise cannot_run(f"{self.graphs.folder.name}/{STEM}", error) from None

    def _run_step(self, rows: int) -> None:
        try:
            self._sessions[self.alone].step.run_with_iobinding(self._bound(rows).binding)
        except Exception as error:  # onnxruntime's own classes share no other base
            raise cannot_run(f"{self.graphs.folder.name}/{STEP}", error) from None
        self._side = 1 - self._side

    def _bound(self, rows: int) -> _Bound:
        """A step of the first rows, from the side they are on to the other."""
        side, other = self._side, 1 - self._side
        known = self._known.get((rows, side, self.alone))
        if known is not None:
            return known
        binding = self._sessions[self.alone].step.io_binding()
        _bind(binding.bind_input, "state", self._states[side][:rows])
        _bind(binding.bind_input, "step_size", self._step_size[:rows])
        outputs = {
            "next_state": self._states[other], "logits": self._logits[other], "margin": self._margin,
            "gain": self._gain, "exponent": self._exponent, "speed": self._speed, "cls_speed": self._cls_speed,
        }  # fmt: skip
        estimate: _Estimate | None = None
        sizes: Floats = self._sizes
        if self._estimate is not None:
            estimate = _Estimate(*(array[:rows] for array in self._estimate))
            sizes = self._estimate.last
            for name in ESTIMATE_INPUTS:
                _bind(binding.bind_input, name, getattr(estimate, name))
            outputs |= {name: getattr(self._estimate, name) for name in ESTIMATE_OUTPUTS}
        for name, array in outputs.items():
            _bind(binding.bind_output, name, array[:rows])
        arrays = (
            self._step, self._steps, sizes, self._logits[other], self._logits[side], self._margin, self._gain,
            self._exponent, self._passed, self._speed, self._cls_speed, self._first, self._unchanged,
        )  # fmt: skip
        self._known[rows, side, self.alone] = bound = _Bound(
            binding,
            tuple(array[:rows] for array in arrays),
            self._top[:rows],
            self._threshold[:rows],
            self._max[:rows],
            estimate,
        )
        return bound

    def _read(self, bound: _Bound) -> Readings:
        readings = Readings(*bound.readings)
        readings.measured = self.measured
        if bound.estimate is not None:
            bound.estimate.read()
            readings.position, readings.grid_size = bound.estimate.position, bound.estimate.grid
        step, unchanged = readings.step, readings.unchanged
        step += 1
        readings.lyapunov_times += readings.step_size * np.maximum(readings.exponent, 0.0)
        if self._fresh:
            np.copyto(readings.first_speed, readings.speed, where=step == 1)
            self._fresh = False
        top = readings.logits.argmax(1)
        unchanged += 1
        changed = top != bound.top
        if np.count_nonzero(changed):
            unchanged[changed] = 0
            bound.top[:] = top
        return readings

    def _score(self, readings: Readings) -> Floats:
        if len(self._rules) == 1:
            return next(iter(self._rules.values())).score(readings)
        score = np.empty(self.active)
        names = np.array([entry.job.depth.rule.name for entry in self._entries])
        for name, rule in self._rules.items():
            chosen = np.flatnonzero(names == name)
            score[chosen] = rule.score(readings.rows(chosen))
        return score

    def _watch(self, readings: Readings, score: Floats) -> None:
        for row, entry in enumerate(self._entries):
            if entry.job.trace:
                entry.trace.append(
                    Step(
                        int(readings.step[row]),
                        float(readings.time[row]),
                        float(readings.speed[row]),
                        float(readings.cls_speed[row]),
                        float(readings.growth[row]),
                        float(readings.exponent[row]),
                        float(readings.lyapunov_times[row]),
                        float(readings.travel[row]),
                        float(readings.margin[row]),
                        float(readings.gain[row]),
                        float(score[row]),
                        readings.logits[row].copy(),
                        float(readings.step_size[row]),
                        math.nan if self._estimate is None else float(self._estimate.error[row]),
                    )
                )
            if entry.job.keep in ("all", "cls"):
                entry.take(self._states[self._side][row])

    def _outcome(self, row: int, reason: ExitReason, readings: Readings, now: float) -> Outcome:
        entry = self._entries[row]
        job = entry.job
        if job.keep == "last":
            entry.take(self._states[self._side][row])
        return Outcome(
            job,
            int(readings.step[row]),
            reason,
            readings.logits[row].copy(),
            float(readings.margin[row]),
            float(readings.exponent[row]),
            float(readings.lyapunov_times[row]),
            now - float(self._since[row]),
            tuple(entry.trace),
            tuple(entry.kept),
            self._park(row) if job.park else None,
        )

    def _park(self, row: int) -> Parked:
        """A copy of a row as the latest step has left it."""
        numbers = tuple(array[row].copy() for array in self._rows)
        now = self._side
        return Parked(
            self._states[now][row].copy(), self._logits[now][row].copy(), numbers, tuple(self._entries[row].trace)
        )

    def _count(self, entry: _Entry, change: int) -> None:
        self._watched += change * entry.watched
        self._timed += change * (entry.job.deadline < math.inf)
        self._limited += change * (entry.job.depth.lyapunov < math.inf)

    def _compact(self, ended: np.ndarray) -> None:
        """Move the last active rows into the rows that have ended."""
        left = self.active - len(ended)
        stay = np.ones(self.active, bool)
        stay[ended] = False
        for row in ended.tolist():
            self._count(self._entries[row], -1)
        holes = ended[ended < left]
        movers = left + np.flatnonzero(stay[left:])
        if len(holes):
            for array in (self._states[self._side], *self._rows):  # the other side is written before it is read
                array[holes] = array[movers]
        for hole, mover in zip(holes.tolist(), movers.tolist()):
            self._entries[hole] = self._entries[mover]
        del self._entries[left:]
        if len(self._rules) > 1 or not left:
            self._rules = {entry.job.depth.rule.name: entry.job.depth.rule for entry in self._entries}
        self.active = left


def _bind(bind: Callable[..., None], name: str, array: np.ndarray) -> None:
    bind(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
