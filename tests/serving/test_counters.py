"""What the engine counts, and that counts of two engines add up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.runtime.exits import RULES, Depth, ExitReason
from odevit_serve.runtime.jobs import Job, Outcome
from odevit_serve.serving.counters import SECONDS, Counters, Durations

DEPTH = Depth(8, 1.5, 8, RULES["fixed"], 0.0)


def outcome(steps: int, seconds: float) -> Outcome:
    return Outcome(Job(0, DEPTH), steps, ExitReason.EARLY, np.zeros(2), 1.0, 0.0, 0.0, seconds)


@given(st.lists(st.floats(0, 100)))
def test_every_duration_is_in_the_bin_below_whose_end_it_lies(seconds: list[float]) -> None:
    found = Durations()
    for value in seconds:
        found.add(value)
    for place, end in enumerate(SECONDS):
        assert sum(found.counts[: place + 1]) == sum(value <= end for value in seconds)
    assert sum(found.counts) == len(seconds)


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 20)), max_size=20), st.integers(0, 20))
def test_merged_counters_are_those_of_one_engine_that_did_it_all(work: list[tuple[int, float]], cut: int) -> None:
    one, first, second = Counters(2), Counters(2), Counters(4)
    for number, (steps, seconds) in enumerate(work):
        for own in (one, first if number < cut else second):
            own.accepted += 1
            own.answer(outcome(steps, seconds), seconds / 2, lowered=steps == 1)
            own.failed["late"] += 1
            own.step(steps % 3, 0.01)
    first.merge(second)
    for name in ("accepted", "answered", "lowered", "saved", "failed", "exits", "depths"):
        assert getattr(first, name) == getattr(one, name)
    assert first.batches == [*one.batches, 0, 0]
    assert first.computed.counts == one.computed.counts
    assert one.saved == sum(8 - steps for steps, _ in work)


def test_the_time_of_a_step_follows_the_latest() -> None:
    own = Counters(1)
    own.step(1, 1.0)
    assert own.step_seconds == 1.0
    for _ in range(100):
        own.step(1, 2.0)
    assert 1.99 < own.step_seconds < 2.0
    assert own.batches == [0, 101]
