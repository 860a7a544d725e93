"""Requests that were accepted: whatever happens to them, each ends once, and no place is lost."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import CancelledError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit_serve.errors import UserError
from odevit_serve.runtime.exits import RULES, Depth
from odevit_serve.runtime.options import RequestOptions
from odevit_serve.serving.pending import Pending
from odevit_serve.serving.requests import Overloaded, Request, StepFailed, Unavailable

DEPTH = Depth(8, 1.5, 8, RULES["fixed"], 0.0)


class Holder:
    """A thread's slots, by what is in them."""

    def __init__(self) -> None:
        self.gone: list[Request] = []

    def let_go(self, request: Request) -> None:
        self.gone.append(request)


def ready(places: int = 4) -> Pending:
    own = Pending(places, 2)
    own.set_state("ready", of=("new",))
    return own


def request(priority: Any = "interactive") -> Request:
    return Request(b"", "a.png", RequestOptions(priority=priority), DEPTH, float("inf"), 0.0)


MOVES = st.sampled_from(["accept", "accept", "line", "take", "end", "fail", "cancel"])


@settings(max_examples=300, deadline=None)
@given(places=st.integers(1, 6), moves=st.lists(st.tuples(MOVES, st.integers(0, 50)), min_size=10, max_size=60))
def test_each_request_ends_once_and_gives_its_place_back(places: int, moves: list[tuple[str, int]]) -> None:
    own, holder = ready(places), Holder()
    every: list[Request] = []
    decoding: list[Request] = []  # accepted, not yet in line
    inside: list[Request] = []  # in slots
    ends: Counter[Request] = Counter()
    answered, failed, cancelled, refused = 0, 0, 0, 0
    freed: list[Request] = []  # cancelled in a slot
    for move, number in moves:
        waiting = [one for one in every if one in own.held]
        if move == "accept":
            new = [request("bulk" if number % 2 else "interactive") for _ in range(1 + number % 3)]
            if own.taken + len(new) > places:
                with pytest.raises(Overloaded, match=f"{own.taken} of {places} places taken"):
                    own.accept(new)
                refused += len(new)
            else:
                own.accept(new)
                every += new
                decoding += new
                for one in new:
                    one.future.add_done_callback(lambda _, one=one: ends.update([one]))
        elif move == "line" and decoding:
            some, decoding = decoding[number % 2 :], decoding[: number % 2]
            for one in some:
                one.pixels = object()  # type: ignore[assignment]
            own.enqueue(some)
        elif move == "take":
            before, line = own.taken, len(own.line)
            taken, fill = own.take(1 + number % 4, holder, 7.0, True)
            assert len(taken) == min(1 + number % 4, line)
            assert fill == before / places
            assert all(one.admitted == 7.0 and one.holder is holder for one in taken)
            inside += taken
        elif move == "end" and inside:
            one = inside.pop(number % len(inside))
            with own.lock:
                ended = own.end(one)
                assert not own.end(one)
            if ended:
                one.future.set_result(None)  # type: ignore[arg-type]
                answered += 1
        elif move == "fail" and waiting:
            own.fail(waiting[number % len(waiting)], StepFailed("no"), "error")
            failed += 1
        elif move == "cancel" and waiting:
            one = waiting[number % len(waiting)]
            freed += [one] if one.admitted else []
            assert one.future.cancel()
            cancelled += 1
        decoding = [one for one in decoding if one in own.held]
        assert own.taken == sum(not one.admitted for one in own.held) <= places
        assert len(own.line) == sum(not one.admitted and one not in decoding for one in own.held)
        assert all(one.pixels is None for one in every if one not in own.held)  # whose memory is needed no more
        assert holder.gone == freed
    assert own.stats.accepted == len(every) == answered + failed + cancelled + len(own.held)
    assert (own.stats.cancelled, own.stats.failed["error"]) == (cancelled, failed)
    assert own.stats.refused["queue full"] == refused
    for one in every:
        assert ends[one] == (one not in own.held)
        assert one.future.done() == (one not in own.held)


def test_one_that_was_taken_cannot_be_cancelled_once_it_is_answered() -> None:
    own, one = ready(), request()
    own.accept([one])
    own.enqueue([one])
    own.take(1, Holder(), 1.0, True)
    with own.lock:
        assert own.end(one)
    assert not one.future.cancel()
    own.fail(one, StepFailed("too late"), "error")
    one.future.set_result("answer")  # type: ignore[arg-type]
    assert one.future.result(0) == "answer"
    assert own.stats.failed == {}


def test_one_that_was_cancelled_is_not_answered() -> None:
    own, one = ready(), request()
    own.accept([one])
    assert one.future.cancel()
    own.enqueue([one])  # its picture was decoded meanwhile
    assert (len(own.line), own.taken) == (0, 0)
    with own.lock:
        assert not own.end(one)
    own.fail(one, StepFailed("too late"), "error")
    with pytest.raises(CancelledError):
        one.future.result(0)
    assert (own.stats.cancelled, own.stats.failed) == (1, {})


def test_an_answer_that_meets_a_cancellation_leaves_the_request_to_it() -> None:
    """The thread that computes finds the future cancelled before the cancellation has come to the lock."""
    own, one = ready(), request()
    found: list[bool] = []

    def answers(_: object) -> None:
        with own.lock:
            found.append(own.end(one))

    one.future.add_done_callback(answers)
    own.accept([one])
    assert one.future.cancel()
    assert found == [False]
    assert (own.stats.cancelled, own.held, own.taken) == (1, set(), 0)


@pytest.mark.parametrize(
    ("state", "words"),
    [("new", "warming up"), ("warming", "warming up"), ("draining", "shutting down"), ("closed", "shutting down"),
     ("failed", "broken")],
)  # fmt: skip
def test_nothing_is_accepted_in_any_state_but_ready(state: str, words: str) -> None:
    own = Pending(4, 2)
    own.state = state
    refusal = own.refusal()
    assert isinstance(refusal, Unavailable)
    assert words in str(refusal)
    with pytest.raises(Unavailable):
        own.accept([request(), request()])
    assert own.stats.refused == {"unavailable": 2}
    assert (own.stats.accepted, own.taken, own.held) == (0, 0, set())


def test_all_or_none_are_accepted() -> None:
    own = ready(3)
    own.accept([request(), request()])
    assert own.refusal() is None
    refusal = own.refusal(2)
    assert isinstance(refusal, Overloaded)
    assert refusal.retry_after > 0
    with pytest.raises(UserError):
        own.accept([request(), request()])
    assert own.taken == 2


def test_when_to_come_back_follows_the_time_the_queue_takes() -> None:
    """Twice as many that wait, or steps that take twice as long, need twice the time."""
    own = ready(40)
    own.accept([request() for _ in range(20)])
    own.stats.step_seconds, own.stats.mean_depth = 0.5, 4.0

    def seconds() -> float:
        refusal = own.refusal(100)
        assert isinstance(refusal, Overloaded)
        return refusal.retry_after

    assert seconds() == pytest.approx(20 * 4.0 * 0.5 / 2)  # two slots
    own.stats.step_seconds = 1e-9
    assert seconds() == 0.1  # no sooner than a client can turn round


def test_a_state_is_left_for_another_only_from_where_it_may_be() -> None:
    own = Pending(1, 1)
    own.set_state("draining", of=("warming", "ready"))
    assert own.state == "new"
    own.set_state("ready", of=("new",))
    own.set_state("draining", of=("warming", "ready"))
    assert own.state == "draining"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 60))
def test_what_waits_is_shared_out_evenly(active: list[int], waiting: int) -> None:
    """So many for each thread that none would have more than its part of all images, and all of them are taken."""
    own = ready(100)
    requests = [request() for _ in range(waiting)]
    own.accept(requests)
    own.enqueue(requests)
    total, threads = sum(active) + waiting, len(active)
    shares = [own.share(mine, sum(active), threads) for mine in active]
    assert min(shares) >= 0
    for mine, share in zip(active, shares):
        assert mine + share <= max(mine, -(-total // threads))
    assert sum(shares) >= waiting
