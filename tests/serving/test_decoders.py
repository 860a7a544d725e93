"""The threads that decode: lanes take turns, and what was not begun can be given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from odevit_serve.serving.decoders import Decoders


@pytest.fixture
def one() -> Iterator[Decoders]:
    """A single thread, so that the order of tasks is theirs."""
    decoders = Decoders(1)
    yield decoders
    decoders.close()


def test_lanes_take_turns_picture_by_picture(one: Decoders) -> None:
    gate, order = threading.Event(), list[str]()
    first, second = one.lane(), one.lane()
    begun = one.lane().submit(gate.wait)
    while not begun.running():  # the thread is busy before anything waits for it
        threading.Event().wait(0.001)
    futures = [first.submit(order.append, f"a{n}") for n in range(4)]
    futures += [second.submit(order.append, f"b{n}") for n in range(2)]
    gate.set()
    for future in futures:
        future.result(10)
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_failure_is_told_to_whoever_asked_and_ends_no_thread(one: Decoders) -> None:
    lane = one.lane()
    lane.call(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 / 0).result(10)
    assert lane.submit(lambda: 7).result(10) == 7


def test_a_closed_lane_forgets_what_was_not_begun_and_leaves_others_alone(one: Decoders) -> None:
    gate = threading.Event()
    lane, other = one.lane(), one.lane()
    begun = lane.submit(gate.wait)
    waiting, beside = lane.submit(lambda: 1), other.submit(lambda: 2)
    while not begun.running():
        threading.Event().wait(0.001)
    lane.close()
    gate.set()
    assert begun.result(10)
    assert beside.result(10) == 2
    with pytest.raises(CancelledError):
        waiting.result(10)
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(lambda: 1)


def test_a_cancelled_task_is_not_called(one: Decoders) -> None:
    gate, called = threading.Event(), list[int]()
    lane = one.lane()
    lane.call(gate.wait)
    future = lane.submit(called.append, 1)
    assert future.cancel()
    gate.set()
    lane.submit(called.append, 2).result(10)
    assert called == [2]
