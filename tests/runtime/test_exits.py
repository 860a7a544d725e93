"""Rules, settings and reasons, against the plain definition written out image by image."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit_serve.config import Calibration, Config, ExitPolicy, Integration, Setting
from odevit_serve.errors import UsageError
from odevit_serve.runtime import dynamics, exits
from odevit_serve.runtime.exits import ExitReason, Measured, Readings

TRAVEL = (4.0, 3.0, 2.0, 1.0, 0.0)
CONFIG = Config(integration=Integration(8.0, 4), exit=ExitPolicy("travel", 2.0, 3.0, TRAVEL, 8.0))
SETTING = Setting(4, 8.0, stem="a", step="b")


def readings(**changes: Any) -> Readings:
    values: dict[str, Any] = {
        "step": np.array([1, 2]), "steps": np.array([4, 4]), "step_size": np.array([2.0, 2.0]),
        "logits": np.array([[1.0, 0.0], [0.0, 3.0]]), "previous_logits": np.array([[9.0, 9.0], [0.0, 1.0]]),
        "margin": np.array([1.0, 2.0]), "gain": np.array([0.5, -1.0]), "exponent": np.array([0.25, -0.5]),
        "lyapunov_times": np.array([0.5, 0.75]), "speed": np.array([4.0, 8.0]), "cls_speed": np.array([1.0, 3.0]),
        "first_speed": np.array([4.0, 2.0]), "unchanged": np.array([0, 1]), "measured": Measured.of(CONFIG),
    }  # fmt: skip
    return Readings(**{**values, **changes})


def test_reasons_have_codes_and_sentences() -> None:
    assert [int(r) for r in ExitReason] == [0, 1, 2, 3, 4]
    assert [r.short for r in ExitReason] == [
        "stopped early", "Lyapunov time", "deadline", "depth budget", "full depth",
    ]  # fmt: skip
    assert ExitReason(3) is ExitReason.BUDGET
    for rule in exits.RULES.values():
        assert rule.sentence.startswith("stopped early: ")
        assert not any(word in rule.sentence for word in ("cannot", "final", "safe"))  # more than was proven


def test_readings() -> None:
    got = readings()
    assert got.time.tolist() == [2.0, 4.0]
    assert np.isnan(got.growth[0])
    assert got.growth[1] == pytest.approx(math.log(4) / 2)
    assert got.travel.tolist() == [3.0, 2.0]
    finer = readings(step=np.array([3, 5]), steps=np.array([8, 8]), step_size=np.array([1.0, 1.0]))
    assert finer.travel == pytest.approx([2.5, 1.5])  # between the calibrated times
    mixed = readings(steps=np.array([4, 8]), step_size=np.array([2.0, 1.0]))
    assert mixed.travel == pytest.approx([3.0, 3.0])
    assert np.isnan(readings(measured=None).travel).all()
    assert Measured.of(Config()) is None
    assert got.rows(np.array([1])).margin.tolist() == [2.0]


def test_travel_is_not_stretched_over_another_horizon() -> None:
    longer = CONFIG.replace(integration=Integration(12.0, 4))
    assert Measured.of(longer) is None
    assert exits.resolve(longer).rule.name == "fixed"


def test_scores() -> None:
    score = {name: rule.score(readings()) for name, rule in exits.RULES.items()}
    assert score["travel"] == pytest.approx([1 / 3, 2 / 2])
    assert score["drift"] == pytest.approx([1.5 / 3, 1 / 2])
    assert score["contraction"].tolist() == [-0.25, 0.5]
    assert score["margin"].tolist() == [1.0, 2.0]
    assert score["confidence"] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-3))])
    assert score["patience"].tolist() == [0.0, 1.0]
    assert score["kl"][0] == -math.inf
    p, q = dynamics.softmax(np.array([[0.0, 3.0], [0.0, 1.0]]))
    assert score["kl"][1] == pytest.approx(-(p * np.log(p / q)).sum())
    assert score["latent-diff"].tolist() == [-8.0, -16.0]
    assert score["fixed"].tolist() == [-math.inf, -math.inf]


def plain_reason(row: dict[str, Any]) -> int:
    """The definition, one image at a time."""
    n = row["step"]
    if n >= row["steps"]:
        return ExitReason.HORIZON
    if row["score"] >= row["threshold"]:
        return ExitReason.EARLY
    if row["passed"] >= row["lyapunov"]:
        return ExitReason.LYAPUNOV
    if row["late"]:
        return ExitReason.DEADLINE
    return ExitReason.BUDGET if n >= row["max_steps"] else -1


ROW = st.fixed_dictionaries(
    {
        "score": st.floats(-2, 2), "threshold": st.floats(-2, 2),
        "step": st.integers(1, 6), "steps": st.just(6), "max_steps": st.integers(1, 6), "h": st.floats(0.1, 2),
        "passed": st.floats(0, 9), "lyapunov": st.floats(0.1, 9) | st.just(math.inf),
        "late": st.booleans(),
    }
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6))
def test_decide_follows_the_definition(rows: list[dict[str, Any]]) -> None:
    column = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    n = len(rows)
    got = exits.decide(
        readings(
            step=column["step"], steps=column["steps"], step_size=column["h"], logits=np.zeros((n, 2)),
            previous_logits=np.zeros((n, 2)), margin=np.zeros(n), gain=np.zeros(n), exponent=np.zeros(n),
            lyapunov_times=column["passed"], speed=np.ones(n), first_speed=np.ones(n), cls_speed=np.ones(n),
            unchanged=np.zeros(n),
        ),
        column["score"], column["threshold"], column["lyapunov"], column["late"], column["max_steps"],
    )  # fmt: skip
    expected = [plain_reason(row) for row in rows]
    assert (got is None and set(expected) == {-1}) or got.tolist() == expected


def test_resolve_defaults_to_the_bundle() -> None:
    depth = exits.resolve(CONFIG)
    assert (depth.steps, depth.step_size, depth.max_steps) == (4, 2.0, 4)
    assert (depth.rule.name, depth.threshold, depth.lyapunov) == ("travel", 2.0, 3.0)
    assert exits.resolve(CONFIG, steps=8).step_size == 1.0
    budget = exits.resolve(CONFIG, max_steps=3)
    assert (budget.steps, budget.step_size, budget.max_steps) == (4, 2.0, 3)
    assert exits.resolve(CONFIG, max_steps=99).max_steps == 4
    assert exits.resolve(CONFIG, rule="confidence", threshold=0.9).lyapunov == 3.0  # part of every policy
    assert exits.resolve(CONFIG, adaptive=False).lyapunov == math.inf


def test_without_calibration_every_image_gets_full_depth() -> None:
    bare = Config()
    assert exits.resolve(bare).rule.name == "fixed"
    assert exits.resolve(bare, rule="confidence", threshold=0.9).rule.name == "confidence"
    assert exits.resolve(CONFIG, adaptive=False).rule.name == "fixed"
    with pytest.raises(UsageError, match="needs a bundle that is calibrated for a horizon of 12"):
        exits.resolve(bare, threshold=1.0)


def test_guaranteed_only_as_calibrated() -> None:
    proof = Calibration(0.01, 0.05, 1000, "", SETTING)
    proven = CONFIG.replace(exit=ExitPolicy("travel", 2.0, 3.0, TRAVEL, 8.0, proof))
    assert exits.resolve(proven, SETTING).guaranteed
    assert exits.resolve(proven, SETTING, adaptive=False).guaranteed
    for asked in ({"steps": 8}, {"max_steps": 2}, {"threshold": 1.0}, {"rule": "margin", "threshold": 2.0}):
        assert not exits.resolve(proven, SETTING, **asked).guaranteed
    for asked in ({"steps": 1}, {"steps": 8}, {"max_steps": 2}):  # full depth is the bundle's own, and no other
        assert not exits.resolve(proven, SETTING, adaptive=False, **asked).guaranteed
    for name, value in {"solver": "heun", "splitting": "lie", "precision": "int8", "stem": "c", "step": "c"}.items():
        assert not exits.resolve(proven, replace(SETTING, **{name: value})).guaranteed, name
    assert not exits.resolve(proven).guaranteed  # nothing is known of the graphs
    assert not exits.resolve(CONFIG, SETTING).guaranteed
    other = proven.replace(integration=Integration(8.0, 2), exported_from=proven.integration)
    assert not exits.resolve(other, replace(SETTING, steps=2), adaptive=False).guaranteed  # a file of other steps


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"max_steps": -3}, "not -3"),
        ({"rule": "guess"}, "unknown rule 'guess'"),
        ({"rule": "confidence"}, "needs a threshold"),
        ({"threshold": math.nan}, "threshold must be a number, not NaN"),
        ({"adaptive": False, "rule": "kl"}, "need adaptive depth"),
    ],
)
def test_bad_settings(settings_: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        exits.resolve(CONFIG, **settings_)


def test_a_rule_of_ones_own() -> None:
    @exits.rule("gap")
    def gap(own: Readings) -> np.ndarray:
        best = np.sort(own.probabilities)
        return best[:, -1] - best[:, -2]

    try:
        assert exits.resolve(CONFIG, rule="gap", threshold=0.5).rule.score is gap
        assert exits.find("gap").sentence == "stopped early: the score of the rule 'gap' reached its threshold"
        assert not exits.find("gap").exports
    finally:
        del exits.RULES["gap"]
