"""The laws of the engine: nothing lost or answered twice, no slot leaks, batch mates do not matter, nobody starves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import nothing_left

from odevit_serve.errors import UsageError, UserError
from odevit_serve.runtime.exits import ExitReason
from odevit_serve.runtime.model import BundleModel
from odevit_serve.runtime.options import RequestOptions
from odevit_serve.serving.engine import (
    DeadlineExceeded,
    Diverged,
    Engine,
    Limits,
    NotAPicture,
    Overloaded,
    Unavailable,
)

LAWS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_images_exit_at_different_depths(alone: list[tuple[str, int]]) -> None:
    assert len({steps for _, steps in alone}) >= 3  # or the tests below would show nothing


def test_submit_answers_and_says_how(make: Callable[..., Engine], pictures: np.ndarray, alone: list) -> None:
    engine = make()
    answer = engine.submit(pictures[0]).result(10)
    assert (answer.prediction.label, answer.prediction.steps) == alone[0]
    assert answer.queue_seconds > 0
    assert answer.lowered_to is None
    assert answer.to_dict()["milliseconds"].keys() == {"read", "compute", "queue"}
    nothing_left(engine)


def test_predict_is_submit_for_asyncio(make: Callable[..., Engine], pictures: np.ndarray, alone: list) -> None:
    engine = make()

    async def ask() -> list[tuple[str, int]]:
        answers = await asyncio.gather(*(engine.predict(p) for p in pictures))
        return [(a.prediction.label, a.prediction.steps) for a in answers]

    assert asyncio.run(ask()) == alone


@LAWS
@given(
    order=st.lists(st.tuples(st.integers(0, 23), st.booleans(), st.sampled_from([0, 0, 0, 1, 3])), max_size=40),
    slots=st.integers(1, 6),
)
def test_an_answer_does_not_depend_on_its_batch_mates(
    make: Callable[..., Engine], pictures: np.ndarray, alone: list, order: list, slots: int
) -> None:
    engine = make(slots, pause=0.0005)
    futures = []
    for index, bulk, pause in order:
        futures.append(engine.submit(pictures[index], priority="bulk" if bulk else "interactive"))
        time.sleep(pause / 1000)
    answers = [future.result(10).prediction for future in futures]
    assert [(a.label, a.steps) for a in answers] == [alone[index] for index, _, _ in order]
    nothing_left(engine)
    engine.close()


@LAWS
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(["plain", "cancel", "late", "short", "broken", "bad", "cancel-later"]), st.integers(0, 2)
        ),
        max_size=40,
    ),
    slots=st.integers(1, 4),
    queue=st.integers(1, 20),
)
def test_nothing_is_lost_or_answered_twice_and_no_slot_leaks(
    make: Callable[..., Engine], pictures: np.ndarray, script: list, slots: int, queue: int
) -> None:
    engine = make(slots, pause=0.0005, queue=queue)
    calls: dict[int, int] = {}
    futures, refused, to_cancel = [], 0, []
    for number, (kind, pause) in enumerate(script):
        engine.core.broken = kind == "broken"  # type: ignore[union-attr]
        options: dict[str, Any] = {"late": {"deadline_ms": 0.01}, "short": {"max_steps": 1}}.get(kind, {})
        try:
            future = engine.submit(b"no picture" if kind == "bad" else pictures[number % 24], **options)
        except Overloaded:
            refused += 1
            continue
        future.add_done_callback(lambda _, n=number: calls.update({n: calls.get(n, 0) + 1}))
        futures.append(future)
        if kind == "cancel":
            future.cancel()
        elif kind == "cancel-later":
            to_cancel.append(future)
        time.sleep(pause / 1000)
        if to_cancel and number % 3 == 0:
            to_cancel.pop().cancel()
    engine.core.broken = False  # type: ignore[union-attr]
    assert not wait(futures, 120).not_done
    assert all(count == 1 for count in calls.values())
    assert len(calls) == len(futures) == len(script) - refused
    for future in futures:
        if not future.cancelled() and future.exception() is not None:
            assert isinstance(future.exception(), UserError)
            assert str(future.exception())
    nothing_left(engine)
    assert engine.submit(pictures[0]).result(10)
    engine.close()


def test_cancelling_a_task_cancels_the_request(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(1, pause=0.02)

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.predict(pictures[0], adaptive=False), 0.05)

    asyncio.run(ask())
    nothing_left(engine)
    assert engine.stats.cancelled == 1


def test_a_deadline_gives_the_best_answer_so_far(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(pause=0.02)
    prediction = engine.submit(pictures[0], adaptive=False, deadline_ms=70).result(10).prediction
    assert prediction.exit is ExitReason.DEADLINE
    assert 1 <= prediction.steps < 8
    assert not prediction.guaranteed


def test_a_deadline_in_the_queue_is_an_error_of_its_own(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(1, pause=0.02)
    long = engine.submit(pictures[0], adaptive=False)
    while not engine.active:
        time.sleep(0.001)
    with pytest.raises(DeadlineExceeded, match="30 ms passed before the first step"):
        engine.submit(pictures[1], deadline_ms=30).result(10)
    assert not long.done()  # it was told while the other was still on its way
    nothing_left(engine)


def test_a_full_queue_refuses_all_or_nothing_and_says_when_to_come_back(
    make: Callable[..., Engine], pictures: np.ndarray
) -> None:
    engine = make(1, queue=3)
    engine.core.gate.clear()  # type: ignore[union-attr]
    inside = engine.submit(pictures[0])
    while not engine.active:
        time.sleep(0.001)
    futures = engine.submit_many(pictures[:2])
    with pytest.raises(Overloaded, match="2 of 3 places taken") as refused:
        engine.submit_many(pictures[:2])
    assert refused.value.retry_after > 0
    futures.append(engine.submit(pictures[2]))
    engine.core.gate.set()  # type: ignore[union-attr]
    assert not wait([inside, *futures], 10).not_done
    nothing_left(engine)
    assert engine.stats.refused == {"queue full": 2}


def test_overload_lowers_the_depth_and_says_so(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(2, queue=40, overload="depth")
    engine.core.gate.clear()  # type: ignore[union-attr]
    futures = [engine.submit(pictures[i % 24], adaptive=False) for i in range(40)]
    engine.core.gate.set()  # type: ignore[union-attr]
    answers = [future.result(20) for future in futures]
    lowered = [a for a in answers if a.lowered_to is not None]
    assert 10 < len(lowered) < 40  # those who came into a short queue kept their depth
    for answer in lowered:
        assert answer.prediction.steps == answer.lowered_to
        assert answer.prediction.exit is ExitReason.BUDGET
        assert not answer.prediction.guaranteed
    assert min(a.lowered_to for a in lowered) <= 4
    assert engine.stats.lowered == len(lowered)
    assert engine.submit(pictures[0], adaptive=False).result(10).lowered_to is None


def test_by_default_overload_never_lowers_the_depth(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(2, queue=40)
    futures = [engine.submit(pictures[i % 24], adaptive=False) for i in range(40)]
    assert {f.result(20).prediction.steps for f in futures} == {8}


def test_a_bad_picture_fails_alone(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make()
    good, bad = engine.submit_many([pictures[0], b"GIF87a, but not really"])
    with pytest.raises(NotAPicture):
        bad.result(10)
    assert good.result(10)
    nothing_left(engine)


def test_close_finishes_what_was_accepted(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(2, pause=0.005)
    futures = engine.submit_many(pictures)
    assert engine.close(20) is True
    assert all(future.result(0) for future in futures)
    with pytest.raises(Unavailable, match="shutting down"):
        engine.submit(pictures[0])
    nothing_left(engine)


def test_close_fails_the_rest_when_grace_is_over(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(1)
    engine.core.gate.clear()  # type: ignore[union-attr]
    futures = engine.submit_many(pictures[:4])
    threading.Timer(0.5, engine.core.gate.set).start()  # type: ignore[union-attr]
    assert engine.close(0.2) is False
    for future in futures:
        with pytest.raises(Unavailable, match="before the answer was ready"):
            future.result(0)
    nothing_left(engine)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rule": "confidence", "threshold": 0.9}, "rule 'confidence' is not allowed"),
        ({"threshold": 0.01}, "threshold must be at least 0.1"),
        ({"threshold": 9.0}, "threshold may be at most 5"),
        ({"max_steps": 7}, "max_steps may be at most 6"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"steps": 33}, "steps may be at most 32"),
        ({"deadline_ms": 0}, "deadline_ms must be above 0"),
        ({"priority": "urgent"}, "priority must be one of interactive, bulk"),
        ({"colour": 1}, "unknown option 'colour'"),
    ],
)
def test_settings_are_held_to_the_operators_limits(
    make: Callable[..., Engine], pictures: np.ndarray, asked: dict, message: str
) -> None:
    engine = make(limits=Limits(rules=("travel", "margin"), min_threshold=0.1, max_threshold=5.0, max_steps=6))
    with pytest.raises(UsageError, match=message):
        engine.submit(pictures[0], **asked)
    assert engine.submit(pictures[0], adaptive=False).result(10).prediction.steps == 6
    nothing_left(engine)


def test_requests_with_different_settings_share_a_batch(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make(4, pause=0.01)
    asked: list[dict[str, Any]] = [
        {"adaptive": False},
        {"max_steps": 2, "adaptive": False},
        {"rule": "patience", "threshold": 2},
        {"steps": 16, "adaptive": False},
    ]
    engine.core.gate.clear()  # type: ignore[union-attr]
    futures = [engine.submit(pictures[0], RequestOptions(), **one) for one in asked]
    while len(engine._pending.line) + engine.active < 4:
        time.sleep(0.001)
    engine.core.gate.set()  # type: ignore[union-attr]
    steps = [f.result(10).prediction.steps for f in futures]
    assert steps[0] == 8
    assert steps[1] == 2
    assert 3 <= steps[2] <= 8
    assert steps[3] == 16
    assert max(engine.core.seen[-20:]) >= 3  # type: ignore[union-attr]


def test_states_trace_and_maps_for_those_who_look_closely(
    make: Callable[..., Engine], model: BundleModel, pictures: np.ndarray
) -> None:
    engine = make()
    answer = engine.submit(pictures[0], adaptive=False, trace=True, states=True).result(10)
    assert len(answer.states) == len(answer.attention) == 9
    assert len(answer.prediction.trace) == 8
    for step in (0, 3, 8):
        np.testing.assert_allclose(answer.attention[step].heads, model.attention(pictures[0], step).heads, atol=1e-5)
    last = engine.submit(pictures[0], attention=True).result(10)
    assert [a.step for a in last.attention] == [last.prediction.steps]
    nothing_left(engine)


def test_pixels_are_checked(make: Callable[..., Engine], model: BundleModel, pictures: np.ndarray, alone: list) -> None:
    engine = make()
    pixels = np.stack([model.prepare(p) for p in pictures[:3]])
    answers = [f.result(10).prediction for f in engine.submit_pixels(pixels)]
    assert [(a.label, a.steps) for a in answers] == alone[:3]
    with pytest.raises(UsageError, match="shape"):
        engine.submit_pixels(pixels[:, :2])
    pixels[0, 0, 0, 0] = np.nan
    with pytest.raises(UsageError, match="finite"):
        engine.submit_pixels(pixels)
    nothing_left(engine)


def test_an_image_that_diverges_fails_alone(
    make: Callable[..., Engine], model: BundleModel, pictures: np.ndarray
) -> None:
    engine = make()
    pixels = np.stack([model.prepare(p) for p in pictures[:3]])
    pixels[1] = 1e38
    futures = engine.submit_pixels(pixels, adaptive=False)
    with pytest.raises(Diverged, match="produced NaN or infinity"):
        futures[1].result(10)
    assert futures[0].result(10)
    assert futures[2].result(10)
    nothing_left(engine)


def test_json_has_no_word_for_infinity(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    answer = make().submit(pictures[0], trace=True).result(10)
    step = dataclasses.replace(answer.prediction.trace[0], margin=float("inf"))
    odd = dataclasses.replace(answer.prediction, margin=float("inf"), trace=(step,))
    data = dataclasses.replace(answer, prediction=odd).to_dict()
    assert data["margin"] is None
    assert data["trace"][0]["margin"] is None
    assert step.margin == float("inf")
    json.dumps(data, allow_nan=False)


def test_many_threads_at_once(make: Callable[..., Engine], pictures: np.ndarray, alone: list) -> None:
    engine = make(8, pause=0.0, queue=1000)
    wrong: list[Any] = []

    def client(seed: int) -> None:
        random = np.random.default_rng(seed)
        for index in random.integers(0, 24, 40):
            prediction = engine.submit(pictures[index]).result(20).prediction
            if (prediction.label, prediction.steps) != alone[index]:
                wrong.append((index, prediction))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert engine.stats.answered == 320
    nothing_left(engine)


def test_a_deadline_holds_behind_a_slow_decoder(
    make: Callable[..., Engine], model: BundleModel, pictures: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, release, prepare = make(), threading.Event(), model.prepare

    def held_up(*arguments: Any) -> Any:
        assert release.wait(20)
        return prepare(*arguments)

    monkeypatch.setattr(model, "prepare", held_up)
    slow = engine.submit_many(pictures[:2])  # both decoders are busy
    with pytest.raises(DeadlineExceeded, match="50 ms passed before the first step"):
        engine.submit(pictures[2], deadline_ms=50).result(10)
    assert not any(future.done() for future in slow)
    assert engine.waiting == 2  # its place is free
    release.set()
    assert all(future.result(10) for future in slow)
    nothing_left(engine)


def test_a_deadline_counts_from_arrival(make: Callable[..., Engine], pictures: np.ndarray) -> None:
    engine = make()
    (late,) = engine.submit_many(pictures[:1], arrived=time.monotonic() - 1, deadline_ms=500)
    with pytest.raises(DeadlineExceeded):
        late.result(10)
    (early,) = engine.submit_many(pictures[:1], arrived=time.monotonic(), deadline_ms=20_000)
    assert early.result(10).prediction.label
    nothing_left(engine)


def test_maps_do_not_wait_for_decoders(
    make: Callable[..., Engine], model: BundleModel, pictures: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, release, prepare = make(), threading.Event(), model.prepare
    (wanted,) = engine.submit_pixels(np.stack([prepare(pictures[0])]), attention=True)
    monkeypatch.setattr(model, "prepare", lambda *arguments: release.wait(20) and prepare(*arguments))
    slow = engine.submit_many(pictures[:2])
    assert wanted.result(10).attention
    release.set()
    assert all(future.result(10) for future in slow)
