"""Images followed to full depth, with everything that any exit rule could read at every step written down."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..data.datasets import Images
from ..errors import UserError
from ..runtime import dynamics
from ..runtime.dynamics import Floats
from ..runtime.exits import RULES, Depth, Measured, Readings, Rule
from ..runtime.model import CAPACITY, BundleModel, Reader
from ..runtime.slots import Job, Outcome, Slots

NUMBERS = ("margin", "gain", "exponent", "speed", "cls_speed")  # of every step of every image


class Followed:
    """Images that were followed to full depth: where each would have ended, and whether that was an error."""

    labels: np.ndarray | None = None  # [n]

    @property
    def answers(self) -> np.ndarray:
        """[n,N]"""
        raise NotImplementedError

    @property
    def lyapunov_times(self) -> Floats:
        """[n,N]: how many have passed after each step."""
        raise NotImplementedError

    @property
    def finite(self) -> np.ndarray:
        """[n]: whether a trajectory has numbers to its end; one that has not counts as an error."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def steps(self) -> int:
        return self.answers.shape[1]

    @property
    def lengths(self) -> np.ndarray:
        """[n]: steps to full depth. Where images choose the size of their steps, the rest of a row repeats its last."""
        return np.full(len(self), self.steps)

    def exit_steps(self, scores: Floats, threshold: float, lyapunov: float | None = None) -> np.ndarray:
        """The step (from 1) at which each image would have ended."""
        ends = scores >= threshold
        if lyapunov is not None:
            ends = ends | (self.lyapunov_times >= lyapunov)
        ends = ends | (np.arange(1, self.steps + 1) >= self.lengths[:, None])
        return ends.argmax(1) + 1  # type: ignore[no-any-return]

    def answers_at(self, steps: np.ndarray) -> np.ndarray:
        return self.answers[np.arange(len(self)), steps - 1]

    def errors(self, steps: np.ndarray, target: str = "agreement") -> np.ndarray:
        """Per image, whether ending at `steps` is an error. For accuracy: full depth is right and the early answer is
        not, which happens at least as often as accuracy drops."""
        early, full = self.answers_at(steps), self.answers[:, -1]
        if target == "agreement":
            return np.asarray((early != full) | ~self.finite)
        assert self.labels is not None
        return ((full == self.labels) & (early != self.labels)) | ~self.finite


@dataclass(frozen=True)
class Recording(Followed):
    """n images along N steps; arrays are [n,N] unless they say otherwise."""

    step_size: float
    logits: Floats  # [n,N,C]
    margin: Floats
    gain: Floats
    exponent: Floats
    speed: Floats
    cls_speed: Floats
    travels: Floats  # [n,N+1] distance of CLS to where it ends
    labels: np.ndarray | None = None  # [n]
    positions: np.ndarray | None = None  # in steps of the grid, where images choose the size of their steps
    _scores: dict[tuple[str, bytes], Floats] = field(default_factory=dict, repr=False, compare=False)

    @property
    def answers(self) -> np.ndarray:
        return self.logits.argmax(-1)  # type: ignore[no-any-return]

    @property
    def finite(self) -> np.ndarray:
        return np.asarray(np.isfinite(self.logits).all((1, 2)))

    @property
    def lyapunov_times(self) -> Floats:
        return np.cumsum(self.sizes * np.maximum(np.nan_to_num(self.exponent), 0.0), 1)

    @property
    def sizes(self) -> Floats:
        """Of the steps; 0 beyond the last."""
        if self.positions is None:
            return np.full(self.answers.shape, self.step_size)
        return self.step_size * np.diff(self.positions, axis=1, prepend=0)

    @property
    def lengths(self) -> np.ndarray:
        if self.positions is None:
            return super().lengths
        return (self.positions < self.steps).sum(1) + 1  # type: ignore[no-any-return]

    def logits_at(self, steps: np.ndarray) -> Floats:
        """[n,C]: where each image ends."""
        return self.logits[np.arange(len(self)), steps - 1]  # type: ignore[no-any-return]

    def mean_travel(self) -> Floats:
        """[N+1]: the expected remaining travel."""
        return self.travels[self.finite].mean(0)  # type: ignore[no-any-return]

    def subset(self, rows: np.ndarray) -> Recording:
        arrays = ("logits", "margin", "gain", "exponent", "speed", "cls_speed", "travels")
        own: dict[str, Any] = {name: getattr(self, name)[rows] for name in arrays}
        for name in ("labels", "positions"):
            array = getattr(self, name)
            own[name] = None if array is None else array[rows]
        return replace(self, **own, _scores={})

    def scores(self, rule: Rule, travel: Floats | None = None) -> Floats:
        """What a rule says of every image after every step, given the expected remaining travel [N+1]."""
        key = (rule.name, b"" if travel is None else travel.tobytes())
        if key not in self._scores:
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                found = np.asarray(rule.score(self._readings(travel)), float).reshape(len(self), self.steps)
            self._scores[key] = np.where(np.isnan(found), -np.inf, found)
        return self._scores[key]

    def _readings(self, travel: Floats | None) -> Readings:
        """One row for each image and step, so that a rule scores them all at once."""
        count, steps = len(self), self.steps
        answers = self.answers
        unchanged = np.zeros((count, steps), int)
        for step in range(1, steps):
            unchanged[:, step] = np.where(answers[:, step] == answers[:, step - 1], unchanged[:, step - 1] + 1, 0)
        before = np.concatenate([self.logits[:, :1], self.logits[:, :-1]], 1)
        measured = None
        if travel is not None:
            measured = Measured(np.linspace(0.0, steps * self.step_size, steps + 1), travel)
        flat: dict[str, Any] = {
            name: getattr(self, name).reshape(-1)
            for name in ("margin", "gain", "exponent", "lyapunov_times", "speed", "cls_speed")
        }
        return Readings(
            np.tile(np.arange(1, steps + 1), count),
            np.full(count * steps, steps),
            self.sizes.reshape(-1),
            self.logits.reshape(count * steps, -1),
            before.reshape(count * steps, -1),
            **flat,
            first_speed=np.repeat(self.speed[:, 0], steps),
            unchanged=unchanged.reshape(-1),
            measured=measured,
            position=None if self.positions is None else self.positions.reshape(-1),
            grid_size=np.full(count * steps, self.step_size),
        )


def filled(values: Sequence[Any] | np.ndarray, count: int) -> list[Any]:
    """So many of them: the last is repeated."""
    return [*values, *[values[-1]] * (count - len(values))]


class Recorder:
    """Follows images to full depth and writes down what rules can read."""

    def __init__(
        self,
        model: BundleModel,
        images: Images,
        labels: np.ndarray | None,
        steps: int | None = None,
        advance: Callable[[], None] = lambda: None,
    ):
        self.model, self.images, self.labels, self.advance = model, images, labels, advance
        own = model.config.integration
        count = steps or own.steps
        # Never stops by itself: limits and thresholds are applied to the recording.
        tolerance = own.tolerance if steps is None else 0.0
        self.depth = Depth(count, own.horizon / count, count, RULES["fixed"], math.inf, tolerance=tolerance)
        self.slots: Slots = model.slots(CAPACITY)
        self.digest = hashlib.sha256()
        self.skipped = 0
        self.steps_run = self.images_run = 0

    def time_saved(self, mean_steps: float) -> float:
        stem = self.slots.seconds["stem"] / max(1, self.images_run)
        step = self.slots.seconds["step"] / max(1, self.steps_run)
        return 1 - (stem + mean_steps * step) / (stem + self.depth.steps * step)

    def record(self, indices: np.ndarray) -> Recording:
        found: dict[int, Outcome] = {}
        for outcome in self._outcomes(indices):
            found[outcome.job.key] = outcome
            self.advance()
        if not found:
            raise UserError("none of the images could be read")
        places = sorted(found)
        traces = [found[place].trace for place in places]

        grid, count = self.depth.step_size, self.depth.steps
        reached = [np.rint([step.time / grid for step in trace]).astype(int) for trace in traces]
        followed = [filled(trace, count) for trace in traces]

        def column(name: str) -> Floats:
            return np.array([[getattr(step, name) for step in trace] for trace in followed])

        travels = [dynamics.travel_to_end(np.stack(found[place].states)) for place in places]
        if self.depth.tolerance:  # travel is over time, and these have no numbers at some times of the grid
            at = np.arange(count + 1)
            travels = [np.interp(at, [0, *times], values) for times, values in zip(reached, travels)]
        numbers: dict[str, Any] = {name: column(name) for name in NUMBERS}
        return Recording(
            grid,
            np.stack([np.stack([step.logits for step in trace]) for trace in followed]),
            **numbers,
            travels=np.stack(travels),
            labels=None if self.labels is None else self.labels[indices[places]],
            positions=np.array([filled(times, count) for times in reached]) if self.depth.tolerance else None,
        )

    def _outcomes(self, indices: np.ndarray) -> Iterator[Outcome]:
        reader = Reader(indices.tolist(), self._pixels)
        while not reader.done or self.slots.active:
            ready = reader.take(self.slots.free, wait=not self.slots.active)
            good = [(item.place, item.pixels) for item in ready if item.pixels is not None]
            self.skipped += len(ready) - len(good)
            for _, pixels in good:
                self.digest.update(pixels.tobytes())
            if good:
                batch = np.stack([pixels for _, pixels in good])
                self.slots.admit(batch, [Job(place, self.depth, trace=True, keep="cls") for place, _ in good])
                self.images_run += len(good)
            self.steps_run += self.slots.active
            yield from self.slots.step()

    def _pixels(self, index: int) -> np.ndarray:
        try:
            return self.model.prepare(self.images.read(index))
        except UserError:
            raise
        except Exception as error:  # the decoders' many ways to fail
            raise UserError(f"{self.images.names[index]} cannot be read ({error})") from None
