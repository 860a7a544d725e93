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
from odevit_serve.serving.turns import Account, Member, Shares, Turns

lengths = st.lists(st.floats(0.001, 1.0), min_size=2, max_size=5)


def advance(shares: Shares, ends: dict[Member, float], turns: dict[Member, float], now: float) -> tuple[float, Member]:
    """The owner whose turn ends first ends it, and wants another."""
    for member in shares.owners:
        ends.setdefault(member, now + turns[member])
    member = min(shares.owners, key=lambda own: ends[own])
    now = ends.pop(member)
    shares.end(member, turns[member], more=True)
    return now, member


@given(lengths, st.integers(1, 3), st.integers(1, 200))
def test_models_that_always_want_to_compute_get_the_same_time(lengths: list[float], at_once: int, rounds: int) -> None:
    shares, accounts = Shares(at_once), [Account() for _ in lengths]
    turns: dict[Member, float] = {}
    for length, account in zip(lengths, accounts):
        for _ in range(at_once + 1):  # so that one of them always waits
            turns[Member(account=account)] = length
    for member in turns:
        shares.ask(member)
    ends: dict[Member, float] = {}
    now, spent = 0.0, dict.fromkeys(accounts, 0.0)
    for _ in range(rounds):
        assert len(shares.owners) == at_once
        now, member = advance(shares, ends, turns, now)
        spent[member.account] += turns[member]
    assert max(spent.values()) - min(spent.values()) <= at_once * max(lengths) + 1e-9


@given(lengths, st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_one_that_comes_back_waits_for_a_turn_of_each_and_its_own_last(
    turns: list[float], away: float, before: float
) -> None:
    shares, busy, late = Shares(), [Member() for _ in turns[1:]], Member()
    late.account.used, late.account.last = before, min(before, turns[0])
    for member in busy:
        member.account.used = away
        shares.ask(member)
    shares.ask(late)
    waited = 0.0
    while shares.owners != [late]:
        (owner,) = shares.owners
        seconds = turns[1 + busy.index(owner)]
        waited += seconds
        shares.end(owner, seconds, more=True)
    assert waited <= sum(turns[1:]) + len(busy) * late.account.last + 1e-6


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.0, 10.0))
def test_background_work_waits_until_nobody_else_wants_to_compute(wants: list[bool], used: float) -> None:
    """An answered image that is followed to full depth takes no turn that the request of another model could use."""
    shares, busy, audits = Shares(), Member(), Member(background=lambda: True)
    busy.account.used = used  # has computed more, and is chosen all the same
    shares.ask(busy)
    shares.ask(audits)
    for more in wants:
        if busy not in shares.owners:
            shares.ask(busy)
            assert shares.owners == [audits]  # a turn that was begun is finished
            shares.end(audits, 0.1, more=True)
        assert shares.owners == [busy]
        shares.end(busy, 1.0, more)
    assert shares.owners == ([busy] if wants[-1] else [audits])


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
