"""Several models on one set of threads: who computes next, and that nobody starves."""

from __future__ import annotations

import threading
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from servers import SlowSlots, png, until

import odevit_serve
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving.decoders import Decoders
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.turns import Member, Shares, Turns

lengths = st.lists(st.floats(0.001, 1.0), min_size=2, max_size=5)


@given(lengths, st.integers(1, 200))
def test_those_who_always_want_to_compute_get_the_same_time(turns: list[float], rounds: int) -> None:
    shares, members = Shares(), [Member() for _ in turns]
    for member in members:
        shares.ask(member)
    spent = dict.fromkeys(members, 0.0)
    for _ in range(rounds):
        owner = shares.owner
        assert owner is not None
        seconds = turns[members.index(owner)]
        spent[owner] += seconds
        shares.end(seconds, more=True)
    assert max(spent.values()) - min(spent.values()) <= max(turns) + 1e-9


@given(lengths, st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_one_that_comes_back_waits_for_a_turn_of_each_and_its_own_last(
    turns: list[float], away: float, before: float
) -> None:
    shares, busy, late = Shares(), [Member() for _ in turns[1:]], Member()
    late.used, late.last = before, min(before, turns[0])
    for member in busy:
        member.used = away
        shares.ask(member)
    shares.ask(late)
    waited = 0.0
    while shares.owner is not late:
        assert shares.owner is not None
        seconds = turns[1 + busy.index(shares.owner)]
        waited += seconds
        shares.end(seconds, more=True)
    assert waited <= sum(turns[1:]) + len(busy) * late.last + 1e-6


@given(st.lists(st.integers(0, 2), max_size=60))
@settings(max_examples=50)
def test_decoders_take_the_lanes_in_turn(pictures: list[int]) -> None:
    decoders, gate, done = Decoders(1), threading.Event(), []
    blocker = decoders.lane()
    blocker.call(gate.wait)  # while all are put
    lanes = [decoders.lane() for _ in range(3)]
    for number in pictures:
        lanes[number].call(lambda n=number: done.append(n))  # type: ignore[misc]
    gate.set()
    until(lambda: len(done) == len(pictures))
    decoders.close()
    for at, number in enumerate(done):  # while another has pictures left, none is served twice in a row
        if at and done[at - 1] == number:
            assert set(done[at:]) == {number}


def test_a_busy_model_does_not_starve_another(tiny_bundle: Path) -> None:
    """One model is flooded with slow steps, the other is asked once: it computes after one step of the first."""
    model = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(model, BundleModel)
    turns, decoders = Turns(), Decoders()
    shared = {"turns": turns, "decoders": decoders}
    heavy, light = SlowSlots(model.graphs, 4, pause=0.01), SlowSlots(model.graphs, 4, pause=0.0)
    with Engine(model, core=heavy, queue=300, **shared) as busy, Engine(model, core=light, **shared) as quiet:
        flood = busy.submit_many([png(i) for i in range(16)] * 16, adaptive=False)
        until(lambda: len(heavy.seen) > 10)
        before = len(heavy.seen)
        answer = quiet.submit(png(0), adaptive=False).result(20)
        assert answer.prediction.steps == 8
        assert len(heavy.seen) - before <= 16  # at most one a step of its own, and some slack for the decoding
        assert not all(future.done() for future in flood)
        for future in flood:
            future.cancel()


def test_two_engines_never_compute_at_once(tiny_bundle: Path) -> None:
    model = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(model, BundleModel)
    inside: list[int] = []
    most: list[int] = []

    class Counted(SlowSlots):
        def _run_step(self, rows: int) -> None:
            inside.append(1)
            most.append(len(inside))
            super()._run_step(rows)
            inside.pop()

    turns = Turns()
    cores = [Counted(model.graphs, 4, pause=0.001) for _ in range(3)]
    engines = [Engine(model, core=core, turns=turns).start() for core in cores]
    futures = [engine.submit(png(i)) for i in range(12) for engine in engines]
    assert all(future.result(20).prediction.label for future in futures)
    assert max(most) == 1
    for engine in engines:
        assert engine.close(5)
