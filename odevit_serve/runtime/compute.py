"""What stands between the engine (or `predict`) and a model: rows that are admitted, stepped and handed back.

`Slots` advances the images of a bundle step by step; `FileBatch` runs a single exported file, whose graph takes all
steps at once. The engine knows only this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .exits import Depth
from .jobs import Job, Outcome
from .options import RequestOptions
from .results import Attention, Result


class Compute(Protocol):
    """Up to `capacity` images at once. One thread at a time may use it, except for `depth`, `maps` and `finish`."""

    alone: bool  # whether the next run may have all threads; beside others it has its share of them

    @property
    def capacity(self) -> int: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def anytime(self) -> bool:
        """Whether an admitted image can end at its deadline with the best answer so far."""

    @property
    def least_steps(self) -> int:
        """The smallest number of steps that an image can be limited to."""

    @property
    def active(self) -> int:
        """Images that are admitted and have not ended."""

    @property
    def free(self) -> int:
        """How many may be admitted now."""

    def depth(self, options: RequestOptions) -> Depth:
        """How deep an image with these options goes; what the model cannot do is refused."""

    def admit(self, pixels: np.ndarray, jobs: Sequence[Job]) -> None:
        """Take images [k,3,H,W] in."""

    def resume(self, parked: Any, job: Job) -> None:
        """Take an image in again that had exited (`Job.park`, `Outcome.parked`), to go on as `job` says."""

    def step(self) -> list[Outcome]:
        """Compute for a while, and hand back the images that have ended."""

    def cancel(self, key: Any) -> bool:
        """Free the row of the image known by `key`; False when it is not here."""

    def clear(self) -> tuple[Job, ...]:
        """Free every row; gives back the jobs that were in them."""

    def finish(self, outcome: Outcome, source: str = "", read_seconds: float = 0.0) -> Result:
        """The result that an outcome stands for."""

    def maps(self, outcome: Outcome) -> tuple[Attention, ...]:
        """The CLS maps of every state that the outcome has kept."""
