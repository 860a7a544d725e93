"""From how an image ended to what people are told."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from odevit_serve.config import Confidence
from odevit_serve.runtime.exits import RULES, Depth, ExitReason
from odevit_serve.runtime.jobs import Job, Outcome
from odevit_serve.runtime.results import Attention, Failure, Prediction, conclude

DEPTH = Depth(8, 1.5, 8, RULES["margin"], 0.5, guaranteed=True, evaluations=2)
LABELS = ("ant", "bee", "cat")


def outcome(logits: list[float], depth: Depth = DEPTH, deadline: float = math.inf) -> Outcome:
    return Outcome(Job(0, depth, deadline), 3, ExitReason.EARLY, np.array(logits, np.float32), 1.0, -0.1, 0.0, 0.25)


def concluded(*args: object, **more: object) -> Prediction:
    found = conclude(LABELS, outcome(*args, **more), "a.png", 0.5)  # type: ignore[arg-type]
    assert isinstance(found, Prediction)
    return found


def test_answer_depth_and_cost() -> None:
    found = concluded([0.0, math.log(2), 0.0])
    assert (found.label, found.steps, found.full_steps, found.evaluations) == ("bee", 3, 8, 6)
    np.testing.assert_allclose(found.probabilities, [0.25, 0.5, 0.25], rtol=1e-6)
    assert found.unsure is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_temperature_changes_the_probabilities_and_never_the_answer() -> None:
    own = conclude(LABELS, outcome([0.0, 2 * math.log(2), 0.0]), "", 0.0, confidence=Confidence(temperature=2.0))
    assert isinstance(own, Prediction)
    np.testing.assert_allclose(own.probabilities, [0.25, 0.5, 0.25], rtol=1e-6)
    assert own.label == "bee"


def test_a_deadline_takes_the_guarantee_away() -> None:
    """It may end an image where the rule has not: the proof knows of none."""
    assert concluded([1.0, 0.0, 0.0]).guaranteed
    assert not concluded([1.0, 0.0, 0.0], deadline=5.0).guaranteed
    assert not concluded([1.0, 0.0, 0.0], depth=replace(DEPTH, guaranteed=False)).guaranteed


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_trajectory_without_numbers_is_a_failure(number: float) -> None:
    found = conclude(LABELS, outcome([0.0, number, 0.0]), "a.png", 0.0)
    assert found == Failure("a.png", "a.png: the trajectory produced NaN or infinity after 3 steps")


def test_the_mean_of_attention_is_over_heads() -> None:
    assert Attention(1, np.array([[[1.0]], [[0.0]]])).mean.tolist() == [[0.5]]
