"""The numbers of the report on trajectories whose answers are planted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from odevit_serve import load
from odevit_serve.config import Integration
from odevit_serve.runtime import dynamics
from odevit_serve.train.analysis import numbers as sections

OWN = Integration(4.0, 4)


def onehot(answers: np.ndarray, classes: int = 3) -> np.ndarray:
    return np.eye(classes)[answers].astype(float)


def test_free_exponent_of_a_velocity_that_grows_evenly() -> None:
    rate = np.array([0.3, -0.2])
    speed = 5 * np.exp(rate[:, None] * 0.5 * np.arange(6))
    np.testing.assert_allclose(sections.free_exponents(speed, 0.5), rate)


def test_stopping_at_a_time() -> None:
    answers = np.array([[0, 1, 1, 1], [2, 2, 2, 0], [1, 1, 1, 1]])
    labels = np.array([1, 0, 1])
    got = sections.stop_at_time(np.array([1.0, 2.5, math.inf]), answers, 1.0, labels)
    assert got == {
        "accuracy": pytest.approx(1 / 3),  # 0 after one step, 2 after three, 1 at the end
        "mean_steps": pytest.approx(8 / 3),
        "stopped_early": pytest.approx(2 / 3),
        "differs": pytest.approx(2 / 3),
    }
    assert sections.stop_at_time(np.full(3, 1e-9), answers, 1.0, None)["mean_steps"] == 1


def test_exponents_that_tell_errors_apart() -> None:
    """Wrong images get the larger exponent, classes with more errors the larger mean."""
    labels = np.repeat([0, 1, 2, 0, 1, 2], 10)
    right = np.arange(60) % 10 >= labels  # class 0 all right, class 2 two in ten wrong
    final = np.where(right, labels, (labels + 1) % 3)
    logits = np.stack([onehot(final)] * 4, 1) * np.where(right, 5.0, 1.0)[:, None, None]
    values = np.where(right, 0.1, 0.9)[:, None]
    speed = np.exp(values * np.arange(4))
    got = sections.stability(
        values, {"logits": logits, "speed": speed, "exponent": speed}, 1.0, labels, ["a", "b", "c"]
    )
    for kind in got["kinds"].values():
        assert kind["auroc_of_error"]["value"] == 1
        assert kind["correlation_with_right"]["value"] == pytest.approx(-1)
        assert kind["positive"] == 1
        means = {c["label"]: (c["accuracy"], c["exponent"]) for c in kind["classes"]}
        assert means["a"] == (1.0, pytest.approx(0.1))
        assert means["c"] == (pytest.approx(0.8), pytest.approx(0.26))
    assert got["auroc_of_doubt"]["value"] == 1
    assert got["full"]["accuracy"] == right.mean()
    without = sections.stability(values, {"logits": logits, "speed": speed, "exponent": speed}, 1.0, None, [])
    assert "auroc_of_error" not in without["kinds"]["free"]


def test_the_exponent_toward_the_boundary_over_time() -> None:
    """Four images, three steps of 0.5: those with the larger exponent after the first step change their answer."""
    exponents = np.array([[2.0, -1.0, 1.0], [4.0, 1.0, 1.0], [-2.0, -1.0, -1.0], [0.5, 0.5, 0.5]])
    answers = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]])
    first, second, last = sections.toward_boundary(exponents, answers, 0.5)["steps"]
    assert (first["positive"], second["positive"], last["positive"]) == (0.75, 0.5, 0.75)
    assert first["auroc_of_change"]["value"] == second["auroc_of_change"]["value"] == 1
    assert last["auroc_of_change"] is None
    assert first["exponent"][1] == 1.25
    assert last["times"][1] == pytest.approx(np.median([1.5, 3.0, 0.0, 0.75]))


def test_depth_counts_and_recommends() -> None:
    labels = np.array([0, 1, 2, 0])
    grid = [(2, 2.0), (4, 2.0), (2, 4.0), (4, 4.0)]
    answers = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 2, 2], [1, 1, 0, 0]])
    arrays = {"grid": answers, "schemes": answers[:, None, :2]}
    schemes = [("euler", "parallel"), ("ab2", "parallel")]
    got = sections.depth(arrays, answers[:, 3], grid, [2, 4], schemes, OWN, labels, None)
    assert [row["accuracy"] for row in got["grid"]] == [0.5, 0.5, 1.0, 1.0]
    assert (got["recommended_steps"], got["measure"]) == (2, "accuracy")
    assert [row["accuracy"] for row in got["curves"][1]["rows"]] == [0.5, 0.5]
    teacher = np.array([0, 1, 1, 1])
    got = sections.depth(arrays, answers[:, 3], grid, [2, 4], schemes, OWN, None, teacher)
    assert got["at_own"] == {"steps": 4, "horizon": 4.0, "agreement": 0.5}
    assert got["agreement_with"] == "the teacher"


def test_distance_by_who_is_right() -> None:
    labels = np.zeros(40, int)
    student = np.repeat([0, 1, 0, 1], 10)
    teacher = np.repeat([0, 0, 1, 1], 10)
    far = np.repeat([1.0, 9.0, 8.0, 2.0], 10)
    arrays = {
        "logits": onehot(student)[:, None],
        "teacher_logits": onehot(teacher),
        "teacher_distance": np.stack([far + 1, far], 1),
    }
    got = sections.distance(arrays, labels)
    assert {g["name"]: (g["images"], g["mean"]) for g in got["groups"]} == {
        "both right": (10, 1.0), "only the teacher": (10, 9.0), "only the student": (10, 8.0), "both wrong": (10, 2.0),
    }  # fmt: skip
    assert got["region"] == 8.0  # 20 that agree, and one of those at distance 8 that does not: 95.2%
    assert got["auroc_of_disagreement"]["value"] == 1
    assert got["teacher_accuracy"] == 0.5


def test_the_bound_beside_the_error() -> None:
    """x' = x over [0, 2] from 1, in 4 steps: everything is known."""
    own = Integration(2.0, 4)
    error = np.array([[math.exp(0.5 * n) - 1.5**n for n in range(1, 5)]])
    arrays = {
        "error": error,
        "cls_error": error / 2,
        "lipschitz": np.ones((1, 4)),
        "bend": np.exp([[0.0, 0.5, 1.0, 2.0]]),
        "radius": np.ones((1, 4)),
    }
    got = sections.steepness(arrays, own, 0.1, {}, 10.0, 0.5)
    bound = (math.exp(2) - 1) / 2 * math.exp(2) * 0.5
    assert got["theorem"]["holds"]
    assert got["theorem"]["median_log10_excess"] == pytest.approx(math.log10(bound / error[0, -1]))
    assert not got["printed"]["holds"]
    assert sections.steepness(arrays, own, 1e6, {}, 10.0, 0.5)["printed"]["holds"]
    assert "theorem" not in sections.steepness(arrays, Integration(2.0, 4, "heun"), 0.1, {}, 10.0, 0.5)


def test_rules_see_what_the_runtime_sees(tiny_bundle, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Scores and answers from torch's arrays against those that the runtime's own recorder writes down."""
    import torch
    from conftest import tiny_model
    from PIL import Image

    from odevit_serve.data.datasets import Images
    from odevit_serve.guarantee.recording import Recorder
    from odevit_serve.runtime import exits
    from odevit_serve.train.analysis.collect import Study, look_trajectory
    from odevit_serve.train.batches import Batch

    model, runtime = tiny_model(), load(tiny_bundle)
    random = np.random.default_rng(0)
    raw = [Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(12)]
    images = Images([str(i) for i in range(12)], None, (), lambda i: raw[i], True)
    pixels = torch.from_numpy(np.stack([runtime.prepare(picture) for picture in raw]))
    study = Study(model, images, None, None, tmp_path, "")
    arrays = look_trajectory(study, Batch(pixels, torch.zeros(12), torch.arange(12), []))
    found = sections.record(arrays, None, model.config.integration)
    wanted = Recorder(runtime, images, None).record(np.arange(12))  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.answers, wanted.answers)
    np.testing.assert_allclose(found.travels, wanted.travels, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.lyapunov_times, wanted.lyapunov_times, rtol=2e-3, atol=2e-3)
    for name in ("margin", "confidence", "patience", "kl", "latent-diff", "contraction", "drift"):
        travel, rule = wanted.mean_travel(), exits.find(name)
        ours, theirs = (
            found.scores(rule, travel)[:, :-1],
            wanted.scores(rule, travel)[:, :-1],
        )  # nothing is left at the end
        np.testing.assert_allclose(ours, theirs, rtol=5e-3, atol=1e-3)


def test_a_rule_that_knows_and_one_that_does_not() -> None:
    random = np.random.default_rng(0)
    count, steps = 400, 5
    settles = random.integers(1, steps + 1, count)  # the step from which the answer is final
    answers = (np.arange(1, steps + 1)[None] >= settles[:, None]).astype(int)
    knows = np.where(answers == 1, 1.0, 0.0) + 0.1 * random.random((count, steps))
    guesses = random.random((count, steps))
    empty = np.zeros((count, steps))
    travels = np.zeros((count, steps + 1))
    base = sections.Recording(1.0, np.eye(2)[answers], empty, empty, empty, empty, empty, travels, np.ones(count, int))
    changes = answers[:, :-1] != answers[:, -1:]
    first, second = (sections.judge_rule(base, scores, changes) for scores in (knows, guesses))
    assert first["auroc_by_step"] == [1.0] * (steps - 1)
    assert all(0.4 < v < 0.6 for v in second["auroc_by_step"])
    row = first["at_levels"]["1%"]
    assert row["differs"] <= 0.01
    assert row["mean_steps"] == pytest.approx(settles[count // 2 :].mean(), abs=0.05)
    assert second["at_levels"]["1%"]["mean_steps"] > row["mean_steps"] + 1
    assert any(r["differs"] == 0 and r["accuracy"] == 1 for r in first["curve"])


def test_entropy_by_right_and_wrong() -> None:
    entropy = np.array([[1.0, 0.5], [1.0, 0.7]])
    got = sections.attention(entropy, np.array([True, False]))
    assert (got["right"], got["wrong"]) == ([1.0, 0.5], [1.0, 0.7])
    assert got["entropy"] == pytest.approx([1.0, 0.6])
    assert "right" not in sections.attention(entropy, None)


def test_energies_that_fall_and_tell() -> None:
    """Two heads, one falls in every step and one rises; images whose answer changes later move more."""
    answers = np.array([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])
    fall = np.array([9.0, 8.0, 1.0, 2.0])[:, None] * -np.arange(4)
    cls = np.stack([fall, np.tile(np.arange(4) * 0.1, (4, 1))], 2)
    arrays = {"cls": cls, "mean": cls, "cls_held": np.diff(cls, axis=1)}
    got = sections.energy(arrays, answers, np.array([False, False, True, True]))
    first, second = got["heads"]
    assert (first["falls"], first["falls_with_held_keys"], first["falls_over_all"]) == (1, 1, 1)
    assert (second["falls"], second["falls_with_held_keys"], second["falls_over_all"]) == (0, 0, 0)
    assert first["by_step"] == [0, -5, -10, -15]
    assert got["auroc_of_change"]["change of energy"][0]["value"] == 1
    assert got["auroc_of_change"]["energy"][0]["value"] == 0
    assert got["auroc_of_change"]["energy"][1]["value"] is None  # nothing changes after the second step
    assert got["auroc_of_error"]["value"] == 0


def test_what_resting_tokens_could_save() -> None:
    arrays = {"below": np.ones((2, 4, 1)), "resting": np.array([[[0.0], [0.5], [0.5], [1.0]]] * 2)}
    got = sections.tokens(arrays, (0.1,))
    assert got["saved"] == [0.25]  # half of the tokens in the last two of four steps
    assert got["resting"] == [[0.0, 0.5, 0.5, 1.0]]


def test_confidence_is_that_of_the_softmax() -> None:
    assert dynamics.softmax(np.array([[0.0, math.log(3)]])).max() == pytest.approx(0.75)
