"""The graph that decides per image: class and depth as the runtime gives them, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odevit_serve import bundle
from odevit_serve.config import Calibration, Config, Setting
from odevit_serve.errors import UserError
from odevit_serve.export.formats.onnx_adaptive import adaptive_graph
from odevit_serve.runtime import exits
from odevit_serve.runtime.graphs import Parts
from odevit_serve.runtime.sessions import Graphs
from odevit_serve.runtime.slots import Job, Slots

IMAGES = np.random.default_rng(1).normal(size=(64, 3, 16, 16)).astype(np.float32)
OUTPUTS = ("logits", "steps", "exit_reason")


@cache
def parts(folder: Path) -> Parts:
    return Parts.of(folder, bundle.read_config(folder))


def session(folder: Path, compact: bool = True, **policy: Any) -> onnxruntime.InferenceSession:
    config = changed(folder, **policy)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the two optional inputs are no constants
    return onnxruntime.InferenceSession(adaptive_graph(parts(folder), config, compact).SerializeToString(), options)


def changed(folder: Path, **policy: Any) -> Config:
    config = bundle.read_config(folder)
    return config.replace(exit=replace(config.exit, **policy))


def run(graph: onnxruntime.InferenceSession, pixels: np.ndarray, **inputs: float) -> dict[str, np.ndarray]:
    kinds = {"max_steps": np.int64, "threshold": np.float32}
    feed = {name: np.array(value, kinds[name]) for name, value in inputs.items()}
    return dict(zip(OUTPUTS, graph.run(list(OUTPUTS), {"pixel_values": pixels, **feed})))


def runtime(folder: Path, config: Config, pixels: np.ndarray, **depth: Any) -> dict[str, np.ndarray]:
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
    found = run(session(tiny_bundle), IMAGES[:batch])
    same(found, runtime(tiny_bundle, bundle.read_config(tiny_bundle), IMAGES[:batch]))
    if batch == 64:
        assert len(np.unique(found["steps"])) > 3  # or the test would show little


RULES = {"travel": 0.12, "drift": 0.1, "contraction": 0.01, "margin": 0.3, "confidence": 0.5, "latent-diff": -0.88}


def test_every_rule_that_exports_is_tried() -> None:
    assert set(RULES) == {name for name, rule in exits.RULES.items() if rule.exports}


@pytest.mark.parametrize("rule", RULES)
def test_any_rule_that_exports_ends_images_as_in_the_runtime(tiny_bundle: Path, rule: str) -> None:
    policy = {"rule": rule, "threshold": RULES[rule]}
    if rule not in ("travel", "drift"):  # a proof is what lets a bundle run by them
        policy["calibration"] = Calibration(0.01, 0.05, 1, "", Setting(8, 4.0))
    found = run(session(tiny_bundle, **policy), IMAGES)
    same(found, runtime(tiny_bundle, changed(tiny_bundle, **policy), IMAGES))
    assert len(np.unique(found["steps"])) > 1


def test_a_rule_of_ones_own_can_be_exported(tiny_bundle: Path) -> None:
    @exits.rule("half-drift", needs_travel=True, exports=True)
    def half_drift(readings: exits.Readings) -> np.ndarray:
        return (readings.margin + 0.5 * readings.gain) / readings.travel

    try:
        policy = {"rule": "half-drift", "threshold": 0.1}
        same(run(session(tiny_bundle, **policy), IMAGES), runtime(tiny_bundle, changed(tiny_bundle, **policy), IMAGES))
    finally:
        del exits.RULES["half-drift"]


@pytest.mark.parametrize("lyapunov", [None, 0.05])
@pytest.mark.parametrize("depth", [{}, {"max_steps": 5}, {"threshold": 0.03}, {"threshold": 2.0, "max_steps": 7}])
def test_same_with_budgets_thresholds_and_the_lyapunov_limit(
    tiny_bundle: Path, lyapunov: float | None, depth: dict[str, float]
) -> None:
    found = run(session(tiny_bundle, lyapunov=lyapunov), IMAGES, **depth)
    same(found, runtime(tiny_bundle, changed(tiny_bundle, lyapunov=lyapunov), IMAGES, **depth))
    if lyapunov and depth in ({}, {"threshold": 2.0, "max_steps": 7}):
        assert exits.ExitReason.LYAPUNOV in found["exit_reason"]
    if depth == {"threshold": 2.0, "max_steps": 7} and not lyapunov:
        assert exits.ExitReason.BUDGET in found["exit_reason"]


@pytest.mark.parametrize(("rule", "inside"), [("travel", False), ("drift", False), ("contraction", True)])
def test_the_exponent_is_computed_only_where_it_can_decide(tiny_bundle: Path, rule: str, inside: bool) -> None:
    """It is the one reading with an Erf; the rule `contraction` reads it at every step."""
    graph = adaptive_graph(parts(tiny_bundle), changed(tiny_bundle, rule=rule)).graph
    [body] = [a.g for node in graph.node if node.op_type == "Loop" for a in node.attribute if a.name == "body"]
    assert any(node.op_type == "Erf" for node in body.node) == inside
    branches = [a.g for node in body.node if node.op_type == "If" for a in node.attribute]
    assert any(node.op_type == "Erf" for branch in branches for node in branch.node) != inside


@pytest.mark.parametrize(("solver", "splitting"), [("ab2", "strang"), ("anderson", "parallel")])
def test_a_solver_with_memory(tiny_bundles: Callable[..., Path], solver: str, splitting: str) -> None:
    folder = tiny_bundles(solver=solver, splitting=splitting, attention="l2")
    same(run(session(folder), IMAGES), runtime(folder, bundle.read_config(folder), IMAGES))


def test_all_or_none_exit(tiny_bundle: Path) -> None:
    graph = session(tiny_bundle)
    found = run(graph, IMAGES, threshold=0.0)
    assert (found["steps"] == 1).all()
    assert (found["exit_reason"] == exits.ExitReason.EARLY).all()
    limited = session(tiny_bundle, lyapunov=1e-6)
    assert exits.ExitReason.LYAPUNOV in run(limited, IMAGES)["exit_reason"]
    same(run(limited, IMAGES, threshold=np.inf), run(graph, IMAGES, threshold=np.inf))  # full depth, for audits
    found = run(graph, IMAGES, threshold=np.inf)
    assert (found["steps"] == 8).all()
    assert (found["exit_reason"] == exits.ExitReason.HORIZON).all()


@pytest.mark.parametrize("policy", [{"travel": ()}, {"rule": "fixed"}])
def test_without_calibration_every_image_gets_the_full_depth(tiny_bundle: Path, policy: dict[str, Any]) -> None:
    found = run(session(tiny_bundle, **policy), IMAGES)
    assert (found["steps"] == 8).all()
    assert (found["exit_reason"] == exits.ExitReason.HORIZON).all()


def test_missing_inputs_mean_the_calibrated_ones(tiny_bundle: Path) -> None:
    graph = session(tiny_bundle)
    assert [value.name for value in graph.get_inputs()] == ["pixel_values"]
    assert {value.name for value in graph.get_overridable_initializers()} == {"max_steps", "threshold"}
    given_both = run(graph, IMAGES, max_steps=8, threshold=bundle.read_config(tiny_bundle).exit.threshold)
    same(run(graph, IMAGES), given_both)
    same(run(graph, IMAGES, max_steps=99), given_both)


def test_a_loop_of_fixed_shapes_gives_the_same(tiny_bundle: Path) -> None:
    """What TensorRT takes: rows that have exited are carried on, and their answers kept."""
    fixed, free = session(tiny_bundle, compact=False), session(tiny_bundle)
    for inputs in ({}, {"max_steps": 5.0}, {"threshold": 0.0}):
        same(run(fixed, IMAGES, **inputs), run(free, IMAGES, **inputs))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(st.integers(0, 63), min_size=1, max_size=20))
def test_an_answer_does_not_depend_on_its_batch_mates(tiny_bundle: Path, chosen: list[int]) -> None:
    graph = shared(tiny_bundle)
    together = run(graph, IMAGES)
    same(run(graph, IMAGES[chosen]), {name: value[chosen] for name, value in together.items()})


@cache
def shared(folder: Path) -> onnxruntime.InferenceSession:
    return session(folder)


def test_a_rule_that_does_not_export_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(
        UserError, match="the rule 'patience' cannot be written into a graph: calibrate for one of travel"
    ):
        adaptive_graph(parts(tiny_bundle), changed(tiny_bundle, rule="patience"))
