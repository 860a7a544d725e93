"""The one interface of bundles and single files: whatever is done with it, every image ends once and no row is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import odevit_serve
from odevit_serve.errors import UsageError
from odevit_serve.runtime.compute import Compute
from odevit_serve.runtime.jobs import Job
from odevit_serve.runtime.model import Model
from odevit_serve.runtime.options import RequestOptions
from odevit_serve.runtime.results import Prediction

IMAGES = np.random.default_rng(8).normal(size=(6, 3, 16, 16)).astype(np.float32)
KINDS = ("bundle", "onnx", "onnx-adaptive")


@pytest.fixture(scope="module")
def make(tiny_bundle: Path, tiny_files: dict[str, Path]) -> Callable[[str, int], Compute]:
    models: dict[str, Model] = {
        kind: odevit_serve.load(path, threads=1) for kind, path in {"bundle": tiny_bundle, **tiny_files}.items()
    }
    return lambda kind, capacity: models[kind].compute(capacity)


def test_both_kinds_of_model_satisfy_the_one_interface(make: Callable[[str, int], Compute]) -> None:
    members = {name for name in vars(Compute) if not name.startswith("_")} | set(Compute.__annotations__)
    assert {"capacity", "free", "active", "admit", "step", "cancel", "clear", "depth", "finish"} <= members
    for kind in KINDS:
        assert not [name for name in members if not hasattr(make(kind, 2), name)]


MOVES = st.sampled_from(["admit", "step", "cancel", "clear", "resume"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(capacity=st.integers(1, 5), moves=st.lists(st.tuples(MOVES, st.integers(0, 9)), max_size=30))
def test_every_image_ends_once_or_is_taken_out(
    make: Callable[[str, int], Compute], kind: str, capacity: int, moves: list[tuple[str, int]]
) -> None:
    """Answered, cancelled or cleared; and one that exited can be taken in again."""
    compute = make(kind, capacity)
    depth = compute.depth(RequestOptions())
    inside: set[int] = set()
    left: Counter[int] = Counter()
    parked: list[tuple[int, Any]] = []
    count = 0

    def step() -> None:
        for outcome in compute.step():
            key = outcome.job.key
            inside.remove(key)
            left[key] += 1
            if outcome.steps < depth.steps:
                parked.append((key, outcome.parked))
            answer = compute.finish(outcome, "a.png", 0.5)
            assert isinstance(answer, Prediction)
            assert (answer.source, answer.index) == ("a.png", int(outcome.logits.argmax()))

    for move, number in moves:
        if move == "admit":
            many = min(compute.free, 1 + number % 3)
            jobs = [Job(count + i, depth, park=True) for i in range(many)]
            compute.admit(IMAGES[[job.key % 6 for job in jobs]], jobs)
            inside |= {job.key for job in jobs}
            count += many
        elif move == "step":
            step()
        elif move == "cancel" and inside:
            key = sorted(inside)[number % len(inside)]
            assert compute.cancel(key)
            assert not compute.cancel(key)
            inside.remove(key)
            left[key] += 1
        elif move == "clear":
            jobs = list(compute.clear())
            assert {job.key for job in jobs} == inside
            assert len(jobs) == len(inside)
            left.update(inside)
            inside.clear()
        elif move == "resume" and parked and compute.free:
            key, state = parked.pop(0)
            compute.resume(state, Job(key, depth, park=True))
            inside.add(key)
            left[key] -= 1
        assert compute.active == len(inside)
        assert compute.free == capacity - len(inside)
    for _ in range(3 * depth.steps):
        step()
    assert not inside
    assert left == Counter(range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_fits_and_what_has_another_shape_is_refused(make: Callable[[str, int], Compute], kind: str) -> None:
    compute = make(kind, 2)
    depth = compute.depth(RequestOptions())
    with pytest.raises(UsageError, match="3 images for 2 free slots"):
        compute.admit(IMAGES[:3], [Job(i, depth) for i in range(3)])
    with pytest.raises(UsageError, match=r"pixels of shape \[1, 3, 8, 16\], not \[1, 3, 16, 16\]"):
        compute.admit(IMAGES[:1, :, :8], [Job(0, depth)])
    assert (compute.active, compute.free) == (0, 2)
    with pytest.raises(UsageError, match="capacity must be at least 1, not 0"):
        make(kind, 0)
