"""A single exported file in the place of the slots: its graph runs the whole way, so a batch is one step.

This is what serving systems call dynamic batching: whatever waits goes in together and comes out together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dynamics
from .errors import UsageError
from .exits import REASONS, RULES, Depth, ExitReason
from .model import Failure, FileModel, Prediction
from .slots import Job, Outcome

if TYPE_CHECKING:
    from .request import Settings


class WholeSlots:
    """The interface of `Slots` over a `FileModel`."""

    def __init__(self, model: FileModel, capacity: int = 32, clock: Callable[[], float] = time.monotonic):
        if capacity < 1:
            raise UsageError(f"capacity must be at least 1, not {capacity}")
        self.model, self.capacity, self.clock = model, capacity, clock
        known = [output.name for output in model.session.get_outputs()]
        self._names = [name for name in ("logits", "steps", "exit_reason") if name in known]
        self._jobs: list[Job] = []
        self._pixels: list[np.ndarray] = []
        self._since: list[float] = []

    @property
    def active(self) -> int:
        return len(self._jobs)

    @property
    def free(self) -> int:
        return self.capacity - self.active

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(self._jobs)

    def depth(self, settings: Settings) -> Depth:
        """The one depth that the file has; anything else is refused."""
        for key in ("max_steps", "rule", "threshold", "kappa", "steps"):
            if getattr(settings, key) is not None:
                raise UsageError(f"{key} cannot be set: {self.model.path.name} is one graph, serve the bundle instead")
        if not settings.adaptive or settings.trace or settings.attention or settings.states:
            raise UsageError(f"{self.model.path.name} is one graph: depth, trace and attention need the bundle")
        own = self.model.config.integration
        return Depth(own.steps, own.step_size, own.steps, RULES["fixed"], -math.inf)

    def admit(self, pixels: np.ndarray, jobs: Sequence[Job]) -> None:
        if len(jobs) > self.free:
            raise UsageError(f"{len(jobs)} images for {self.free} free slots")
        began = self.clock()
        self._pixels += list(pixels)
        self._jobs += jobs
        self._since += [began] * len(jobs)

    def step(self) -> list[Outcome]:
        if not self._jobs:
            return []
        values = self.model.session.run(self._names, {"pixel_values": np.stack(self._pixels)})
        now, outputs = self.clock(), dict(zip(self._names, values))
        full = self.model.config.integration.steps
        steps = outputs.get("steps", np.full(self.active, full))
        codes = outputs.get("exit_reason", np.full(self.active, ExitReason.HORIZON))
        outcomes = [
            Outcome(job, int(steps[i]), REASONS[int(codes[i])], outputs["logits"][i], math.nan, math.nan, now - since)
            for i, (job, since) in enumerate(zip(self._jobs, self._since))
        ]
        self.clear()
        return outcomes

    def cancel(self, key: Any) -> bool:
        for row, job in enumerate(self._jobs):
            if job.key == key:
                for own in (self._jobs, self._pixels, self._since):
                    del own[row]  # type: ignore[attr-defined]
                return True
        return False

    def clear(self) -> tuple[Job, ...]:
        jobs = self.jobs
        self._jobs, self._pixels, self._since = [], [], []
        return jobs

    def finish(self, outcome: Outcome, source: str = "", read_seconds: float = 0.0) -> Prediction | Failure:
        if not np.isfinite(outcome.logits).all():
            return Failure(source, f"{source}: the trajectory left the finite numbers")
        model = self.model
        probabilities = dynamics.softmax(outcome.logits.astype(np.float64))
        index, full = int(probabilities.argmax()), model.config.integration.steps
        proof = model.guarantee
        return Prediction(
            model.labels[index],
            index,
            probabilities,
            model.labels,
            outcome.steps,
            full,
            outcome.reason,
            None,
            None,
            not model.adaptive or (proof is not None and proof.steps == full),
            source,
            read_seconds,
            outcome.seconds,
        )
