"""Rows that come and go: nothing an image's mates do may change its answer, and no row is computed in vain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odevit_serve import bundle
from odevit_serve.runtime import exits
from odevit_serve.runtime.exits import Depth, ExitReason
from odevit_serve.runtime.sessions import Graphs, Sessions
from odevit_serve.runtime.slots import Job, Outcome, Slots

IMAGES = np.random.default_rng(5).normal(size=(24, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def graphs(tiny_bundle: Path) -> Graphs:
    return Graphs(tiny_bundle, bundle.read_config(tiny_bundle))


def depths(graphs: Graphs) -> list[Depth]:
    resolve = lambda **kw: exits.resolve(graphs.config, **kw)  # noqa: E731
    return [
        resolve(), resolve(threshold=0.3), resolve(adaptive=False), resolve(max_steps=3), resolve(steps=16),
        resolve(rule="confidence", threshold=0.4), resolve(rule="patience", threshold=2.0),
        resolve(rule="kl", threshold=-0.004), resolve(rule="latent-diff", threshold=-0.6),
        resolve(rule="drift", threshold=0.1, steps=5), resolve(rule="contraction", threshold=0.02),
    ]  # fmt: skip


def run(
    graphs: Graphs, jobs: list[tuple[int, Depth]], capacity: int, gulp: int = 99, images: np.ndarray = IMAGES
) -> dict[int, Outcome]:
    """Admit as rows come free, at most `gulp` at a time."""
    slots, waiting, ended = Slots(graphs, capacity), list(enumerate(jobs)), {}
    while waiting or slots.active:
        chosen = [waiting.pop(0) for _ in range(min(slots.free, gulp, len(waiting)))]
        if chosen:
            pixels = np.stack([images[image] for _, (image, _) in chosen])
            slots.admit(pixels, [Job(key, depth) for key, (_, depth) in chosen])
        for outcome in slots.step():
            assert outcome.job.key not in ended
            ended[outcome.job.key] = outcome
    assert slots.active == 0
    assert slots.free == capacity
    return ended


def test_full_depth_equals_torch(tiny_bundles: Callable[..., Path]) -> None:
    import torch

    from odevit_serve.train.model import ODEViT

    for own in ({}, {"solver": "ab2"}, {"solver": "heun", "splitting": "lie"}):
        folder = tiny_bundles(**own)
        graphs = Graphs(folder, bundle.read_config(folder))
        for steps in (8, 5):
            depth = exits.resolve(graphs.config, steps=steps, adaptive=False)
            got = run(graphs, [(i, depth) for i in range(10)], 4)
            with torch.no_grad():
                expected = ODEViT.from_pretrained(folder)(torch.from_numpy(IMAGES[:10]), steps=steps).numpy()
            assert np.abs(np.stack([got[i].logits for i in range(10)]) - expected).max() < 2e-4
            assert {(o.steps, o.reason) for o in got.values()} == {(steps, ExitReason.HORIZON)}


def test_what_a_solver_remembers_stays_with_its_image() -> None:
    """Anderson's state and velocity, for images admitted at different times, moved, parked and resumed: torch, alone.

    By bundled weights: those of the tiny model do not contract, and rounding grows along its steps.
    """
    import torch

    from odevit_serve.train.model import ODEViT

    folder, pictures = bundle.find("cifar10"), np.random.default_rng(6).normal(size=(9, 3, 32, 32)).astype(np.float32)
    graphs, model = Graphs(folder, bundle.read_config(folder), solver="anderson"), ODEViT.from_pretrained(folder)

    @cache
    @torch.no_grad()
    def expected(image: int, depth: Depth, solver: str = "anderson") -> np.ndarray:
        pixels, count = torch.from_numpy(pictures[image : image + 1]), depth.max_steps
        return model(pixels, steps=count, horizon=count * depth.step_size, solver=solver)[0].numpy()

    whole = exits.resolve(graphs.config, adaptive=False)
    kinds = [whole, replace(whole, max_steps=3), exits.resolve(graphs.config, steps=5, adaptive=False),
             replace(whole, max_steps=1), exits.resolve(graphs.config, steps=16, adaptive=False)]  # fmt: skip
    jobs = [(i % 9, kinds[i * 7 % 5]) for i in range(12)]
    for capacity, gulp in ((5, 2), (12, 12), (1, 1)):
        for key, outcome in run(graphs, jobs, capacity, gulp, pictures).items():
            assert outcome.steps == jobs[key][1].max_steps
            np.testing.assert_allclose(outcome.logits, expected(*jobs[key]), atol=2e-4)
    assert np.abs(expected(0, whole) - expected(0, whole, "euler")).max() > 1e-2  # the memory does count
    slots, ended = Slots(graphs, 4), dict[int, Outcome]()
    slots.admit(pictures[:2], [Job(i, kinds[1], park=True) for i in range(2)])
    slots.step()
    slots.admit(pictures[2:4], [Job(i, whole) for i in (2, 3)])
    while slots.active:
        for outcome in slots.step():
            if outcome.job.park:
                slots.resume(outcome.parked, Job(outcome.job.key, whole))
            else:
                ended[outcome.job.key] = outcome
    for key in range(4):
        assert ended[key].steps == whole.steps
        np.testing.assert_allclose(ended[key].logits, expected(key, whole), atol=2e-4)


def test_exits_equal_the_definition(graphs: Graphs) -> None:
    """Follow every image by hand, one at a time, straight through the graphs."""
    config, depth = graphs.config, exits.resolve(graphs.config)
    got = run(graphs, [(i, depth) for i in range(24)], 7)
    policy, steps = config.exit, config.integration.steps
    seen = set()
    for i in range(24):
        state = graphs.stem.run(None, {"pixel_values": IMAGES[i : i + 1]})[0]
        for n in range(1, steps + 1):
            h = np.array([config.integration.step_size], np.float32)
            names = ["next_state", "logits", "margin"]
            state, logits, margin = graphs.step.run(names, {"state": state, "step_size": h})
            if policy.threshold * policy.travel[n] <= margin[0]:
                break
        assert (got[i].steps, int(got[i].logits.argmax())) == (n, int(logits.argmax()))
        assert got[i].reason is (ExitReason.HORIZON if n == steps else ExitReason.EARLY)
        seen.add(n)
    assert len(seen) >= 4  # the images do differ in depth


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_answers_do_not_depend_on_batch_mates(
    graphs: Graphs, alone: dict[Any, tuple[int, int, int]], data: Any
) -> None:
    choice = st.tuples(st.integers(0, 23), st.integers(0, 10))
    picks = data.draw(st.lists(choice, min_size=1, max_size=40))
    capacity, gulp = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16))
    settings_ = depths(graphs)
    got = run(graphs, [(image, settings_[kind]) for image, kind in picks], capacity, gulp)
    for key, pick in enumerate(picks):
        outcome = got[key]
        assert (outcome.steps, int(outcome.reason), int(outcome.logits.argmax())) == alone[pick]


@pytest.fixture(scope="module")
def alone(graphs: Graphs) -> dict[Any, tuple[int, int, int]]:
    """Every image under every setting, by itself."""
    table = {}
    for kind, depth in enumerate(depths(graphs)):
        for image in range(24):
            outcome = run(graphs, [(image, depth)], 1)[0]
            table[image, kind] = (outcome.steps, int(outcome.reason), int(outcome.logits.argmax()))
    assert len({steps for steps, _, _ in table.values()}) > 6
    return table


class Counting:
    """A session that notes how many rows it is asked for."""

    def __init__(self, session: Any):
        self.session, self.rows = session, 0

    def io_binding(self) -> Any:
        return self.session.io_binding()

    def run_with_iobinding(self, binding: Any) -> None:
        self.session.run_with_iobinding(binding)
        self.rows += binding.get_outputs()[0].shape()[0]


def test_compaction_is_real(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the step graph computes are the steps that the images took, and not one more."""
    step, stem = Counting(graphs.step), Counting(graphs.stem)
    monkeypatch.setattr(graphs, "sessions", Sessions(stem, step))
    got = run(graphs, [(i, exits.resolve(graphs.config)) for i in range(24)], 9)
    total = sum(outcome.steps for outcome in got.values())
    assert step.rows == total
    assert stem.rows == 24
    assert total < 24 * 8


def test_deadline_and_clock(graphs: Graphs) -> None:
    now = [0.0]
    slots = Slots(graphs, 4, clock=lambda: now[0])
    depth = exits.resolve(graphs.config, adaptive=False)
    slots.admit(IMAGES[:2], [Job("soon", depth, deadline=2.5), Job("never", depth)])
    ended: dict[str, Outcome] = {}
    for second in range(1, 9):
        now[0] = float(second)
        ended |= {outcome.job.key: outcome for outcome in slots.step()}
    assert (ended["soon"].steps, ended["soon"].reason) == (3, ExitReason.DEADLINE)
    assert (ended["never"].steps, ended["never"].reason) == (8, ExitReason.HORIZON)
    assert ended["soon"].seconds == 3.0


def test_cancel_and_clear(graphs: Graphs) -> None:
    slots, depth = Slots(graphs, 4), exits.resolve(graphs.config, adaptive=False)
    slots.admit(IMAGES[:4], [Job(key, depth) for key in "abcd"])
    slots.step()
    assert slots.cancel("b")
    assert not slots.cancel("b")
    assert {job.key for job in slots.jobs} == set("acd")
    slots.admit(IMAGES[4:5], [Job("e", depth)])
    ended = {}
    while slots.active:
        ended |= {outcome.job.key: outcome for outcome in slots.step()}
    reference = run(graphs, [(i, depth) for i in range(5)], 1)
    for key, image in zip("acde", (0, 2, 3, 4)):
        assert np.abs(ended[key].logits - reference[image].logits).max() < 1e-5
    slots.admit(IMAGES[:3], [Job(i, depth) for i in range(3)])
    assert [job.key for job in slots.clear()] == [0, 1, 2]
    assert slots.free == 4
    assert slots.step() == []


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(images=st.lists(st.integers(0, 23), min_size=1, max_size=6), pause=st.booleans(), rule=st.integers(0, 1))
def test_an_image_that_was_parked_goes_on_as_if_it_had_not_stopped(
    graphs: Graphs, images: list[int], pause: bool, rule: int
) -> None:
    early = depths(graphs)[(0, 6)[rule]]
    whole = replace(early, threshold=math.inf)
    straight = Slots(graphs, 6)
    straight.admit(IMAGES[images], [Job(i, whole, trace=True) for i in range(len(images))])
    wanted = {o.job.key: o for _ in range(8) for o in straight.step()}
    slots, found = Slots(graphs, 7), {}
    slots.admit(IMAGES[images], [Job(i, early, trace=True, park=True) for i in range(len(images))])
    parked: list[Outcome] = []
    while slots.active or parked:
        for outcome in slots.step():
            if outcome.job.park and outcome.steps < 8:
                parked.append(outcome)
            else:
                found[outcome.job.key] = outcome
        while parked and not (pause and slots.active):  # with a pause, when the others have gone on for a while
            first = parked.pop(0)
            slots.resume(first.parked, Job(first.job.key, whole, trace=True))
    for key, outcome in wanted.items():
        assert np.allclose(found[key].logits, outcome.logits, atol=1e-5)
        assert [s.step for s in found[key].trace] == list(range(1, 9))
        for name in ("score", "lyapunov_times", "growth", "gain"):
            values = [[getattr(step, name) for step in o.trace] for o in (found[key], outcome)]
            assert np.allclose(*values, atol=1e-4, equal_nan=True)
