"""Early exit as other systems batch it: a batch runs until all of it has exited; `benchmark serve` starts this."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..runtime.model import load_bundle
from ..runtime.slots import Job, Outcome, Slots
from .servers import SLOTS


class SynchronousSlots(Slots):
    """A batch as other early-exit systems run it: nobody comes in, and nobody leaves, until the last one is done."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._done: dict[int, Outcome] = {}

    @property
    def free(self) -> int:
        return 0 if self.active else self.capacity

    def step(self) -> list[Outcome]:
        for outcome in super().step():
            self._done.setdefault(id(outcome.job.key), outcome)
        if len(self._done) < self.active:
            return []
        done = list(self._done.values())
        self.clear()
        return done

    def cancel(self, key: Any) -> bool:
        return False  # its row is computed to the end all the same

    def clear(self) -> tuple[Job, ...]:
        jobs, self._done = self.jobs, {}
        if jobs:
            super()._compact(np.arange(self.active))
        return jobs

    def _compact(self, ended: np.ndarray) -> None:
        pass


def serve_synchronous(source: str, port: int, threads: int) -> None:
    from ..serving.engine import Engine
    from ..serving.http.middleware import Options
    from ..serving.http.uvicorn_server import run
    from ..serving.logs import set_up_logging

    set_up_logging("off")
    model = load_bundle(source, threads=threads)
    engine = Engine(model, core=model.computes(SLOTS, SynchronousSlots), queue=1024)
    run(engine, Options(), "127.0.0.1", port, 5.0, 1024)


if __name__ == "__main__":
    serve_synchronous(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
