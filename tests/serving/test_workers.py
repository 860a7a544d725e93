"""The threads that compute: fair, never idle while there is work, and a fault costs only those it happens to."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import SlowSlots, nothing_left, until

import odevit_serve
from odevit_serve.errors import UserError
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving.engine import Engine, StepFailed, Unavailable


@pytest.fixture(scope="module")
def wide(tiny_bundle: Path) -> BundleModel:
    """The same model for three threads that compute at once."""
    loaded = odevit_serve.load(tiny_bundle, threads=3)
    assert isinstance(loaded, BundleModel)
    return loaded


def test_a_step_that_raises_fails_its_batch_and_the_engine_goes_on(
    make: Callable[..., Engine], pictures: np.ndarray, alone: list
) -> None:
    engine = make(4)
    engine.core.gate.clear()  # type: ignore[union-attr]
    futures = engine.submit_many(pictures[:3])
    engine.core.broken = True  # type: ignore[union-attr]
    engine.core.gate.set()  # type: ignore[union-attr]
    for future in futures:
        with pytest.raises(StepFailed, match="the graph exploded"):
            future.result(10)
    engine.core.broken = False  # type: ignore[union-attr]
    prediction = engine.submit(pictures[3]).result(10).prediction
    assert (prediction.label, prediction.steps) == alone[3]
    nothing_left(engine)
    assert engine.ready


def test_a_stem_that_raises_fails_only_the_newcomers(
    make: Callable[..., Engine], pictures: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(4, pause=0.02)
    old = engine.submit(pictures[0], adaptive=False)
    while not engine.active:
        time.sleep(0.001)

    def explode(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "_run_stem", explode)
        with pytest.raises(StepFailed, match="no memory"):
            engine.submit(pictures[1]).result(10)
    assert old.result(10).prediction.steps == 8
    nothing_left(engine)


def test_ready_only_after_warm_up(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(8, start=False)
    engine.core.gate.clear()  # type: ignore[union-attr]
    engine.start(wait=False)
    assert not engine.ready
    with pytest.raises(Unavailable, match="warming up"):
        engine.submit(pictures[0])
    engine.core.gate.set()  # type: ignore[union-attr]
    with engine._pending.lock:
        engine._pending.change.wait_for(lambda: engine.ready, 10)
    assert engine.core.seen == [8, 4, 2, 1]  # type: ignore[union-attr]
    assert engine.submit(pictures[0]).result(10)


def test_a_model_that_cannot_step_is_told_at_the_start(make: Callable[..., Engine]) -> None:
    engine = make(start=False)
    engine.core.broken = True  # type: ignore[union-attr]
    with pytest.raises(UserError, match="could not warm up"):
        engine.start()
    assert not engine.alive


def test_a_cancellation_on_the_way_from_the_queue_to_a_slot_fails_nobody_else(
    model: BundleModel, pictures: np.ndarray, alone: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims: list[Any] = []
    with Engine(model, core=SlowSlots(model.graphs, 4)) as engine:
        pending, take = engine._pending, engine._pending.take

        def cancels(*arguments: Any) -> Any:
            """One of those that were taken from the queue is cancelled before they are admitted."""
            taken = take(*arguments)
            for request in taken[0]:
                if request.future in victims:
                    assert request.future.cancel()
            return taken

        monkeypatch.setattr(pending, "take", cancels)
        engine.core.gate.clear()  # type: ignore[attr-defined]
        first = engine.submit(pictures[0])
        while not engine.active:
            time.sleep(0.001)
        futures = engine.submit_many(pictures[1:4])
        victims.append(futures[1])
        while len(engine._pending.line) < 3:
            time.sleep(0.001)
        engine.core.gate.set()  # type: ignore[attr-defined]
        answers = [future.result(10).prediction for future in (first, futures[0], futures[2])]
        assert [(a.label, a.steps) for a in answers] == [alone[0], alone[1], alone[3]]
        assert futures[1].cancelled()
        nothing_left(engine)
        assert engine.stats.failed == {}


def test_several_threads_share_the_slots_and_give_the_same_answers(
    wide: BundleModel, pictures: np.ndarray, alone: list
) -> None:
    with Engine(wide, slots=8, queue=300) as engine:
        assert [worker.core.capacity for worker in engine._workers.all] == [3, 3, 2]
        assert engine.capacity == 8
        futures = [engine.submit(pictures[i % 24], priority="bulk" if i % 3 else "interactive") for i in range(240)]
        for i in range(0, 240, 7):
            futures[i].cancel()
        for i, future in enumerate(futures):
            if not future.cancelled():
                prediction = future.result(60).prediction
                assert (prediction.label, prediction.steps) == alone[i % 24]
        nothing_left(engine)
        assert sum(rows * count for rows, count in enumerate(engine.stats.batches)) >= engine.stats.answered


def test_a_step_that_raises_fails_one_thread_only(
    wide: BundleModel, pictures: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(wide, slots=6) as engine:
        first, *others = (worker.core for worker in engine._workers.all)
        gate = threading.Event()

        def explode() -> Any:
            raise RuntimeError("the graph exploded")

        monkeypatch.setattr(first, "step", explode)
        for core in others:
            monkeypatch.setattr(core, "step", lambda own=core.step: gate.wait(20) and own())
        futures = engine.submit_many(pictures[:6], adaptive=False)
        while not any(future.done() for future in futures):
            time.sleep(0.001)
        gate.set()
        failed = [future for future in futures if future.exception(20) is not None]
        assert len(failed) >= 1
        assert all(isinstance(future.exception(), StepFailed) for future in failed)
        nothing_left(engine)
        assert engine.ready


def test_a_thread_has_all_of_onnxruntimes_threads_only_while_it_is_alone(
    wide: BundleModel, pictures: np.ndarray
) -> None:
    with Engine(wide, slots=6) as engine:
        cores: list[Any] = [worker.core for worker in engine._workers.all]
        narrow = {id(core._sessions[False].step) for core in cores}
        assert len(narrow) == 1
        assert id(wide.graphs.step) not in narrow
        assert engine.submit(pictures[0]).result(20)
        assert sum(core.alone for core in cores) >= 1
        nothing_left(engine)


def test_a_cancelled_request_frees_its_slot_at_the_next_step(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(1, pause=0.02)
    long = engine.submit(pictures[0], adaptive=False)
    while not engine.active:
        time.sleep(0.001)
    assert long.cancel()
    steps = len(engine.core.seen)  # type: ignore[union-attr]
    assert engine.submit(pictures[1], max_steps=1).result(10)
    assert len(engine.core.seen) - steps <= 3  # type: ignore[union-attr]  # the one under way, and not all eight
    with pytest.raises(CancelledError):
        long.result(0)
    nothing_left(engine)
    assert engine.stats.cancelled == 1


def test_bulk_is_served_while_interactive_keeps_coming(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(1, queue=200)
    engine.core.gate.clear()  # type: ignore[union-attr]
    first = engine.submit(pictures[0])
    while not engine.active:
        time.sleep(0.001)
    ended: list[str] = []
    futures = [first]
    for i in range(20):
        for kind in ("bulk", "interactive"):
            future = engine.submit(pictures[i], priority=kind, max_steps=1)
            future.add_done_callback(lambda _, k=kind: ended.append(k))
            futures.append(future)
    while len(engine._pending.line) < 40:
        time.sleep(0.001)
    engine.core.gate.set()  # type: ignore[union-attr]
    assert not wait(futures, 20).not_done
    assert ended[:8] == ["interactive"] * 3 + ["bulk"] + ["interactive"] * 3 + ["bulk"]


def test_every_thread_warms_up_with_every_size_it_will_run(model: BundleModel) -> None:
    """Alone and beside others: those are graphs of their own."""
    seen: list[tuple[int, bool, int]] = []

    class Noting(SlowSlots):
        def _run_step(self, rows: int) -> None:
            seen.append((self.capacity, self.alone, rows))
            super()._run_step(rows)

    with Engine(model, core=[Noting(model.graphs, capacity, pause=0.0) for capacity in (4, 3)]):
        for capacity, sizes in ((4, [4, 2, 1]), (3, [3, 1])):
            own = [(alone, rows) for known, alone, rows in seen if known == capacity]
            assert own == [(alone, rows) for alone in (True, False) for rows in sizes]


def test_a_fault_of_the_engine_itself_fails_who_is_in_it_and_no_more(
    make: Callable[..., Engine], pictures: np.ndarray, alone: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(2)
    engine.core.gate.clear()  # type: ignore[union-attr]
    inside = engine.submit(pictures[0], adaptive=False)
    until(lambda: engine.active)
    real, fell = engine._pending.share, threading.Event()

    def falls(*given: int) -> int:
        if not fell.is_set():
            fell.set()
            raise ZeroDivisionError("of the engine")
        return real(*given)

    monkeypatch.setattr(engine._pending, "share", falls)
    engine.core.gate.set()  # type: ignore[union-attr]
    with pytest.raises(StepFailed, match=r"the engine failed \(ZeroDivisionError: of the engine\)"):
        inside.result(10)
    later = engine.submit(pictures[1]).result(10).prediction
    assert (later.label, later.steps) == alone[1]
    nothing_left(engine)


def test_an_engine_that_has_ended_holds_nothing(model: BundleModel, pictures: np.ndarray) -> None:
    """Its threads let go of it: it is gone with the last reference, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        engine = Engine(model, slots=2).start()
        assert engine.submit(pictures[0]).result(10)
        engine.close(5)
        held = [weakref.ref(engine), weakref.ref(engine.core)]
        del engine
        until(lambda: [ref() for ref in held] == [None, None])
    finally:
        gc.enable()


def test_what_is_left_when_the_threads_end_is_told_why(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(1)
    engine.core.gate.clear()  # type: ignore[union-attr]
    inside, waiting = engine.submit_many(pictures[:2], adaptive=False)
    until(lambda: engine.active)
    ended = threading.Thread(target=engine.close, args=(0.0,))
    ended.start()
    for future in (inside, waiting):
        with pytest.raises(Unavailable, match="shut down before the answer"):
            future.result(10)
    engine.core.gate.set()  # type: ignore[union-attr]
    ended.join(20)
    until(lambda: not any(worker.thread.is_alive() for worker in engine._workers.all))
    nothing_left(engine)
