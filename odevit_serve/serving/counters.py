"""What the engine counts: plain numbers, written by its thread and read by whoever asks (`/metrics`, tests)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from ..runtime.exits import ExitReason
from ..runtime.slots import Outcome

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # upper ends of the bins


@dataclass
class Durations:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def merge(self, other: Durations) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts)]
        self.total += other.total


class Counters:
    """accepted == answered + failed + cancelled + those still held."""

    def __init__(self, capacity: int):
        self.accepted = self.answered = self.cancelled = self.lowered = 0
        self.failed: Counter[str] = Counter()  # by reason
        self.refused: Counter[str] = Counter()  # by reason; these were never accepted
        self.exits: Counter[ExitReason] = Counter()
        self.depths: Counter[int] = Counter()  # images by steps taken
        self.batches: list[int] = [0] * (capacity + 1)  # steps by images in them
        self.saved = 0  # steps that full depth would have taken on top
        self.step_seconds = 0.0  # of late
        self.mean_depth = 1.0  # of late
        self.queued, self.computed = Durations(), Durations()

    def step(self, rows: int, seconds: float) -> None:
        self.batches[rows] += 1
        self.step_seconds += (seconds - self.step_seconds) * (0.1 if self.step_seconds else 1.0)

    def answer(self, outcome: Outcome, queue_seconds: float, lowered: bool) -> None:
        self.answered += 1
        self.lowered += lowered
        self.exits[outcome.reason] += 1
        self.depths[outcome.steps] += 1
        self.saved += outcome.job.depth.steps - outcome.steps
        self.mean_depth += (outcome.steps - self.mean_depth) * (0.05 if self.answered > 1 else 1.0)
        self.queued.add(queue_seconds)
        self.computed.add(outcome.seconds)

    def merge(self, other: Counters) -> None:
        """Count what another engine of the same model has counted as well."""
        for name in ("accepted", "answered", "cancelled", "lowered", "saved"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("failed", "refused", "exits", "depths"):
            getattr(self, name).update(dict(getattr(other, name)))
        longer = max(len(self.batches), len(other.batches))
        pairs = ([*batches, *[0] * (longer - len(batches))] for batches in (self.batches, other.batches))
        self.batches = [a + b for a, b in zip(*pairs)]
        self.queued.merge(other.queued)
        self.computed.merge(other.computed)
