"""What is asked for an image, and what there is of its way when it has ended."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from odevit_serve import bundle
from odevit_serve.runtime import dynamics, exits
from odevit_serve.runtime.jobs import Job, Outcome
from odevit_serve.runtime.sessions import Graphs
from odevit_serve.runtime.slots import Slots

IMAGES = np.random.default_rng(5).normal(size=(6, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def graphs(tiny_bundle: Path) -> Graphs:
    return Graphs(tiny_bundle, bundle.read_config(tiny_bundle))


def ended(slots: Slots) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    while slots.active:
        found |= {outcome.job.key: outcome for outcome in slots.step()}
    return found


def test_trace_and_states(graphs: Graphs) -> None:
    slots, depth = Slots(graphs, 3), exits.resolve(graphs.config, adaptive=False)
    jobs = [Job("all", depth, trace=True, keep="all"), Job("last", depth, keep="last"), Job("cls", depth, keep="cls")]
    slots.admit(IMAGES[[0, 0, 0]], jobs)
    found = ended(slots)
    full = found["all"]
    assert [s.step for s in full.trace] == list(range(1, 9))
    assert [s.time for s in full.trace] == pytest.approx([s.step * depth.step_size for s in full.trace])
    assert full.trace[-1].margin == full.margin
    np.testing.assert_array_equal(full.trace[-1].logits, full.logits)
    assert len(full.states) == 9
    assert np.allclose(full.states[-1], found["last"].states[0], atol=1e-5)
    assert np.allclose([state[0] for state in full.states], found["cls"].states, atol=1e-5)
    moved = np.linalg.norm(full.states[1] - full.states[0]) / depth.step_size
    assert full.trace[0].speed == pytest.approx(moved, rel=1e-3)  # Euler: the speed is what the state moved by
    assert math.isnan(full.trace[0].growth)
    growth = math.log(full.trace[-1].speed / full.trace[0].speed) / (7 * depth.step_size)
    assert full.trace[-1].growth == pytest.approx(growth)
    assert full.trace[-1].exponent == full.exponent
    passed = sum(depth.step_size * max(s.exponent, 0.0) for s in full.trace)
    assert full.lyapunov_times == pytest.approx(passed)
    assert found["last"].trace == ()


def test_a_job_that_asks_for_nothing_more_than_an_answer_gets_no_more(graphs: Graphs) -> None:
    slots, depth = Slots(graphs, 2), exits.resolve(graphs.config)
    slots.admit(IMAGES[:2], [Job("plain", depth), Job("parked", depth, park=True)])
    found = ended(slots)
    plain, parked = found["plain"], found["parked"]
    assert (plain.trace, plain.states, plain.parked) == ((), (), None)
    assert parked.parked is not None
    assert (parked.trace, parked.states) == ((), ())


def test_what_an_image_leaves_does_not_change_when_others_take_its_row(graphs: Graphs) -> None:
    slots, depth = Slots(graphs, 1), exits.resolve(graphs.config, max_steps=2)
    slots.admit(IMAGES[:1], [Job("first", depth, trace=True, keep="all", park=True)])
    first = ended(slots)["first"]

    def everything() -> list[np.ndarray]:
        held = first.parked
        arrays = [first.logits, *first.states, held.state, held.logits, *held.numbers]
        return [*arrays, *(step.logits for step in first.trace)]

    before = [np.array(array, copy=True) for array in everything()]
    for image in range(1, 6):
        slots.admit(IMAGES[image : image + 1], [Job("other", depth)])
        ended(slots)
    for array, was in zip(everything(), before, strict=True):
        np.testing.assert_array_equal(array, was)


def test_the_numbers_of_a_step_are_those_of_its_states(graphs: Graphs) -> None:
    """By the definitions: distances over times, the head's boundaries, and what calibration measured."""
    from odevit_serve.train.model import ODEViT

    policy, weight = graphs.config.exit, ODEViT.from_pretrained(graphs.folder).head.weight.detach().numpy()
    slots, depth = Slots(graphs, 1), exits.resolve(graphs.config, adaptive=True, threshold=1e9)
    assert depth.rule.name == "travel"
    slots.admit(IMAGES[:1], [Job("one", depth, trace=True, keep="all")])
    outcome = ended(slots)["one"]
    for step, before, after in zip(outcome.trace, outcome.states[:-1], outcome.states[1:], strict=True):
        moved = (after - before) / depth.step_size
        assert step.speed == pytest.approx(np.linalg.norm(moved), rel=1e-3)
        assert step.cls_speed == pytest.approx(np.linalg.norm(moved[0]), rel=1e-3)
        assert step.margin == pytest.approx(dynamics.margin(step.logits[None], weight)[0], rel=1e-3)
        assert step.travel == pytest.approx(max(policy.travel[step.step], dynamics.TINY))
        assert step.score == pytest.approx(step.margin / step.travel)
        assert step.step_size == depth.step_size
        assert math.isnan(step.error)  # sizes are not chosen here


def test_an_outcome_is_timed_from_its_admission(graphs: Graphs) -> None:
    now = [5.0]
    slots, depth = Slots(graphs, 2, clock=lambda: now[0]), exits.resolve(graphs.config, adaptive=False, max_steps=2)
    slots.admit(IMAGES[:1], [Job("early", depth)])
    now[0] = 7.0
    assert not slots.step()
    slots.admit(IMAGES[1:2], [Job("late", depth)])
    now[0] = 8.5
    found = {outcome.job.key: outcome for outcome in slots.step()}
    now[0] = 9.0
    found |= {outcome.job.key: outcome for outcome in slots.step()}
    assert (found["early"].seconds, found["late"].seconds) == (3.5, 2.0)
    assert found["late"].job == Job("late", depth)
