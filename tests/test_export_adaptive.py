"""The graph that decides per image: class and depth as the runtime gives them, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odevit_serve import bundle, exits
from odevit_serve.errors import UserError
from odevit_serve.export.adaptive import adaptive
from odevit_serve.export.checks import reference_depths
from odevit_serve.export.graph import Folded
from odevit_serve.export.pieces import Pieces
from odevit_serve.session import Graphs
from odevit_serve.slots import Job, Slots
from odevit_serve.train.model import ODEViT

pytestmark = pytest.mark.usefixtures("traced_once")
IMAGES = np.random.default_rng(1).normal(size=(64, 3, 16, 16)).astype(np.float32)
OUTPUTS = ("logits", "steps", "exit_reason")


def session(model: ODEViT, compact: bool = True, **policy: Any) -> onnxruntime.InferenceSession:
    config = model.config
    if policy:
        config = config.replace(exit=exits_policy(config, **policy))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the two optional inputs are no constants
    graph = adaptive(Pieces(Folded(model)), config, compact)
    return onnxruntime.InferenceSession(graph.SerializeToString(), options)


def exits_policy(config: bundle.Config, **changes: Any) -> bundle.ExitPolicy:
    from dataclasses import replace

    return replace(config.exit, **changes)


def run(graph: onnxruntime.InferenceSession, pixels: np.ndarray, **inputs: float) -> dict[str, np.ndarray]:
    kinds = {"max_steps": np.int64, "kappa": np.float32}
    feed = {name: np.array(value, kinds[name]) for name, value in inputs.items()}
    return dict(zip(OUTPUTS, graph.run(list(OUTPUTS), {"pixel_values": pixels, **feed})))


def runtime(folder: Path, config: bundle.Config, pixels: np.ndarray, **depth: Any) -> dict[str, np.ndarray]:
    """The same images through the engine's slots."""
    slots = Slots(Graphs(folder, config), len(pixels))
    slots.admit(pixels, [Job(key, exits.resolve(config, **depth)) for key in range(len(pixels))])
    ended = {}
    while slots.active:
        ended |= {outcome.job.key: outcome for outcome in slots.step()}
    order = [ended[key] for key in range(len(pixels))]
    return {
        "logits": np.stack([o.logits for o in order]),
        "steps": np.array([o.steps for o in order]),
        "exit_reason": np.array([int(o.reason) for o in order]),
    }


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(found["steps"], wanted["steps"])
    np.testing.assert_array_equal(found["exit_reason"], wanted["exit_reason"])
    np.testing.assert_array_equal(found["logits"].argmax(-1), wanted["logits"].argmax(-1))
    np.testing.assert_allclose(found["logits"], wanted["logits"], atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2, 7, 32, 64])
def test_same_class_and_depth_as_the_runtime(tiny_bundle: Path, batch: int) -> None:
    config = bundle.read_config(tiny_bundle)
    found = run(session(ODEViT.from_pretrained(tiny_bundle)), IMAGES[:batch])
    same(found, runtime(tiny_bundle, config, IMAGES[:batch]))
    if batch == 64:
        assert len(np.unique(found["steps"])) > 3  # or the test would show little


@pytest.mark.parametrize("lyapunov", [None, 0.35])
@pytest.mark.parametrize("depth", [{}, {"max_steps": 5}, {"threshold": 0.03}, {"threshold": 2.0, "max_steps": 7}])
def test_same_with_budgets_thresholds_and_the_lyapunov_limit(
    tiny_bundle: Path, lyapunov: float | None, depth: dict[str, float]
) -> None:
    model = ODEViT.from_pretrained(tiny_bundle)
    config = model.config.replace(exit=exits_policy(model.config, lyapunov=lyapunov))
    inputs = {"kappa" if name == "threshold" else name: value for name, value in depth.items()}
    found = run(session(model, lyapunov=lyapunov), IMAGES, **inputs)
    same(found, runtime(tiny_bundle, config, IMAGES, **depth))
    if lyapunov and depth in ({}, {"threshold": 2.0, "max_steps": 7}):
        assert exits.ExitReason.LYAPUNOV in found["exit_reason"]
    if depth == {"threshold": 2.0, "max_steps": 7} and not lyapunov:
        assert exits.ExitReason.BUDGET in found["exit_reason"]


def test_a_solver_with_memory_and_travel_that_is_not_scaled(tiny_bundles: Callable[..., Path]) -> None:
    folder = tiny_bundles(solver="ab2", splitting="strang", attention="l2")
    model = ODEViT.from_pretrained(folder)
    config = model.config.replace(exit=exits_policy(model.config, cls_speed=()))
    same(run(session(model, cls_speed=()), IMAGES), runtime(folder, config, IMAGES))


def test_all_exit_at_once() -> None:
    found = run(session(tiny_model()), IMAGES, kappa=0.0)
    assert (found["steps"] == 1).all()
    assert (found["exit_reason"] == exits.ExitReason.CONTRACTED).all()


def test_none_exits() -> None:
    found = run(session(tiny_model()), IMAGES, kappa=np.inf)
    assert (found["steps"] == 8).all()
    assert (found["exit_reason"] == exits.ExitReason.HORIZON).all()


def test_without_calibration_every_image_gets_the_full_depth() -> None:
    found = run(session(tiny_model(calibrated=False)), IMAGES)
    assert (found["steps"] == 8).all()
    assert (found["exit_reason"] == exits.ExitReason.HORIZON).all()


def test_missing_inputs_mean_the_calibrated_ones() -> None:
    model = tiny_model()
    graph = session(model)
    assert [value.name for value in graph.get_inputs()] == ["pixel_values"]
    assert {value.name for value in graph.get_overridable_initializers()} == {"max_steps", "kappa"}
    given_both = run(graph, IMAGES, max_steps=8, kappa=model.config.exit.threshold)
    same(run(graph, IMAGES), given_both)
    same(run(graph, IMAGES, max_steps=99), given_both)


def test_a_loop_of_fixed_shapes_gives_the_same() -> None:
    """What TensorRT takes: rows that have exited are carried on, and their answers kept."""
    model = tiny_model()
    for inputs in ({}, {"max_steps": 5.0}, {"kappa": 0.0}):
        same(run(session(model, compact=False), IMAGES, **inputs), run(session(model), IMAGES, **inputs))


def test_the_rule_written_in_torch_agrees() -> None:
    model = tiny_model()
    wanted = reference_depths(model, model.config, IMAGES, 8, model.config.exit.threshold)
    assert wanted["sure"].mean() > 0.9
    found = run(session(model), IMAGES)
    np.testing.assert_array_equal(found["steps"][wanted["sure"]], wanted["steps"][wanted["sure"]])


@cache
def shared() -> onnxruntime.InferenceSession:
    return session(tiny_model())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(st.integers(0, 63), min_size=1, max_size=20))
def test_an_answer_does_not_depend_on_its_batch_mates(chosen: list[int]) -> None:
    together = run(shared(), IMAGES)
    same(run(shared(), IMAGES[chosen]), {name: value[chosen] for name, value in together.items()})


def test_another_rule_is_refused() -> None:
    model = tiny_model()
    config = model.config.replace(exit=exits_policy(model.config, rule="confidence"))
    with pytest.raises(UserError, match="contraction, and this bundle was calibrated for confidence"):
        adaptive(Pieces(Folded(model)), config)
