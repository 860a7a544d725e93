"""Deadlines: those that have come are called, and what has ended is cleared away."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from odevit_serve.serving.deadlines import SPARE, Deadlines


def test_deadlines_that_were_kept_are_forgotten() -> None:
    fired: list[Any] = []

    @dataclass
    class Kept:
        future: Future[None]
        deadline: float

    deadlines: Deadlines[Kept] = Deadlines(time.monotonic, fired.append)
    for _ in range(1000):
        kept = Kept(Future(), time.monotonic() + 3600)
        deadlines.add(kept)
        kept.future.set_result(None)
    assert len(deadlines._heap) <= SPARE + 1
    due = Kept(Future(), time.monotonic() + 0.01)
    deadlines.add(due)
    limit = time.monotonic() + 10
    while not fired and time.monotonic() < limit:
        time.sleep(0.001)
    assert fired == [due]
    deadlines.close()
