"""Batch-synchronous early exit is what it claims to be: the same answers, all at the end of a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from servers import png

import odevit_serve
from odevit_serve.benchmark.synchronous import SynchronousSlots
from odevit_serve.runtime.model import BundleModel
from odevit_serve.runtime.slots import Job
from odevit_serve.serving.engine import Engine


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> BundleModel:
    loaded = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(loaded, BundleModel)
    return loaded


def test_a_synchronous_batch_ends_together_with_the_same_answers(model: BundleModel) -> None:
    pictures = [png(i) for i in range(6)]
    alone = [(p.label, p.steps) for p in model.predict(pictures)]
    assert len({steps for _, steps in alone}) > 1
    slots = SynchronousSlots(model.graphs, 8)
    keys = [object() for _ in pictures]
    slots.admit(np.stack([model.prepare(p) for p in pictures]), [Job(key, model.depth()) for key in keys])
    assert slots.free == 0
    turns = 0
    while True:
        turns += 1
        done = slots.step()
        if done:
            break
    assert turns == max(steps for _, steps in alone)
    by = {id(outcome.job.key): slots.finish(outcome) for outcome in done}
    found = [(by[id(key)].label, by[id(key)].steps) for key in keys]  # type: ignore[union-attr]
    assert found == alone
    assert (slots.active, slots.free) == (0, 8)


def test_a_synchronous_engine_goes_on(model: BundleModel) -> None:
    with Engine(model, core=SynchronousSlots(model.graphs, 4)) as engine:
        futures = engine.submit_many([png(i) for i in range(20)])
        assert [f.result(20).prediction.steps for f in futures] == [
            p.steps for p in model.predict([png(i) for i in range(20)])
        ]
