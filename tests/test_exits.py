"""Rules, settings and reasons, against the plain definition written out image by image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odevit_serve import dynamics, exits
from odevit_serve.bundle import Calibration, Config, ExitPolicy, Integration
from odevit_serve.errors import UsageError
from odevit_serve.exits import ExitReason, Measured, Readings

TRAVEL, SPEED = (4.0, 3.0, 2.0, 1.0, 0.0), (1.0, 2.0, 2.0, 1.0)
CONFIG = Config(integration=Integration(8.0, 4), exit=ExitPolicy("contraction", 2.0, 3.0, TRAVEL, SPEED))


def readings(**changes: Any) -> Readings:
    values: dict[str, Any] = {
        "step": np.array([1, 2]), "steps": np.array([4, 4]), "step_size": np.array([2.0, 2.0]),
        "logits": np.array([[1.0, 0.0], [0.0, 3.0]]), "previous_logits": np.array([[9.0, 9.0], [0.0, 1.0]]),
        "margin": np.array([1.0, 2.0]), "speed": np.array([4.0, 8.0]), "cls_speed": np.array([1.0, 3.0]),
        "first_speed": np.array([4.0, 2.0]), "previous_cls_speed": np.array([9.0, 1.5]), "unchanged": np.array([0, 1]),
        "measured": Measured.of(CONFIG),
    }  # fmt: skip
    return Readings(**{**values, **changes})


def test_reasons_have_codes_and_sentences() -> None:
    assert [int(r) for r in ExitReason] == [0, 1, 2, 3, 4, 5]
    assert [r.short for r in ExitReason][:5] == [
        "contracted", "Lyapunov time reached", "deadline", "depth budget", "full horizon",
    ]  # fmt: skip
    assert str(ExitReason.CONTRACTED) == "contracted: what is left to travel cannot change the answer"
    assert ExitReason(3) is ExitReason.BUDGET


def test_readings() -> None:
    got = readings()
    assert got.time.tolist() == [2.0, 4.0]
    assert np.isnan(got.exponent[0])
    assert got.exponent[1] == pytest.approx(math.log(4) / 2)
    assert got.travel == pytest.approx([3.0 * 1.0 / 1.0, 2.0 * 3.0 / 2.0])
    finer = readings(step=np.array([3, 5]), steps=np.array([8, 8]), step_size=np.array([1.0, 1.0]))
    assert finer.travel == pytest.approx([2.5 * 1 / 1.5, 1.5 * 3 / 2.0])  # between the calibrated times
    plain = CONFIG.replace(exit=ExitPolicy(travel=TRAVEL))
    assert readings(measured=Measured.of(plain)).travel.tolist() == [3.0, 2.0]
    assert np.isnan(readings(measured=None).travel).all()
    assert Measured.of(Config()) is None
    assert got.rows(np.array([1])).margin.tolist() == [2.0]


def test_scores() -> None:
    score = {name: rule.score(readings()) for name, rule in exits.RULES.items()}
    assert score["contraction"] == pytest.approx([1 / 3, 2 / 3])
    assert score["margin"].tolist() == [1.0, 2.0]
    assert score["confidence"] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-3))])
    assert score["patience"].tolist() == [0.0, 1.0]
    assert score["kl"][0] == -math.inf
    p, q = dynamics.softmax(np.array([[0.0, 3.0], [0.0, 1.0]]))
    assert score["kl"][1] == pytest.approx(-(p * np.log(p / q)).sum())
    assert score["latent-diff"].tolist() == [-8.0, -16.0]
    assert score["fixed"].tolist() == [-math.inf, -math.inf]
    steady, growing = (
        1.0 * 3 * 2.0,
        3.0 * (2.0 ** (3 * 2 / 2) - 2.0) / (math.log(2) / 2),
    )
    assert score["contraction-extrapolated"] == pytest.approx([1 / steady, 2 / growing])


def plain_reason(row: dict[str, Any]) -> int:
    """The definition, one image at a time."""
    n, h = row["step"], row["h"]
    if n >= row["steps"]:
        return ExitReason.HORIZON
    if row["score"] >= row["threshold"]:
        return row["settled"]
    if n >= 2:
        rate = math.log(row["speed"] / row["first"]) / ((n - 1) * h)
        if rate > 0 and n * h >= row["lyapunov"] / rate:
            return ExitReason.LYAPUNOV
    if row["late"]:
        return ExitReason.DEADLINE
    return ExitReason.BUDGET if n >= row["max_steps"] else -1


ROW = st.fixed_dictionaries(
    {
        "score": st.floats(-2, 2), "threshold": st.floats(-2, 2), "settled": st.sampled_from([0, 5]),
        "step": st.integers(1, 6), "steps": st.just(6), "max_steps": st.integers(1, 6), "h": st.floats(0.1, 2),
        "speed": st.floats(0.01, 50), "first": st.floats(0.01, 50), "lyapunov": st.floats(0.1, 9) | st.just(math.inf),
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
            previous_logits=np.zeros((n, 2)), margin=np.zeros(n), speed=column["speed"], first_speed=column["first"],
            cls_speed=np.ones(n), previous_cls_speed=np.ones(n), unchanged=np.zeros(n),
        ),
        column["score"], column["threshold"], column["lyapunov"], column["late"], column["max_steps"],
        column["settled"],
    )  # fmt: skip
    expected = [plain_reason(row) for row in rows]
    assert (got is None and set(expected) == {-1}) or got.tolist() == expected


def test_resolve_defaults_to_the_bundle() -> None:
    depth = exits.resolve(CONFIG)
    assert (depth.steps, depth.step_size, depth.max_steps) == (4, 2.0, 4)
    assert (depth.rule.name, depth.threshold, depth.lyapunov) == ("contraction", 2.0, 3.0)
    assert exits.resolve(CONFIG, steps=8).step_size == 1.0
    budget = exits.resolve(CONFIG, max_steps=3)
    assert (budget.steps, budget.step_size, budget.max_steps) == (4, 2.0, 3)
    assert exits.resolve(CONFIG, max_steps=99).max_steps == 4
    assert exits.resolve(CONFIG, rule="confidence", threshold=0.9).lyapunov == math.inf


def test_without_calibration_every_image_gets_full_depth() -> None:
    bare = Config()
    assert exits.resolve(bare).rule.name == "fixed"
    assert exits.resolve(bare, rule="confidence", threshold=0.9).rule.name == "confidence"
    assert exits.resolve(CONFIG, adaptive=False).rule.name == "fixed"
    with pytest.raises(UsageError, match="needs a calibrated bundle"):
        exits.resolve(bare, threshold=1.0)


def test_guaranteed_only_as_calibrated() -> None:
    proof = Calibration(0.01, 0.05, 1000, "", steps=4, horizon=8.0)
    proven = CONFIG.replace(exit=ExitPolicy("contraction", 2.0, 3.0, TRAVEL, SPEED, proof))
    assert exits.resolve(proven).guaranteed
    assert exits.resolve(proven, adaptive=False).guaranteed
    for settings_ in ({"steps": 8}, {"max_steps": 2}, {"threshold": 1.0}, {"rule": "margin", "threshold": 2.0}):
        assert not exits.resolve(proven, **settings_).guaranteed
    assert not exits.resolve(CONFIG).guaranteed


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"max_steps": -3}, "not -3"),
        ({"rule": "guess"}, "unknown rule 'guess'"),
        ({"rule": "confidence"}, "needs a threshold"),
        ({"threshold": -0.1}, "kappa must be 0 or more, not -0.1"),
        ({"threshold": math.nan}, "kappa must be 0 or more, not nan"),
        ({"adaptive": False, "rule": "kl"}, "makes no sense"),
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
        assert exits.find("gap").reason is ExitReason.SETTLED
    finally:
        del exits.RULES["gap"]
