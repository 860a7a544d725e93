"""Where images would have ended, read off a recording whose answers are written by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from odevit_serve.guarantee.recording import Recording, filled
from odevit_serve.runtime.exits import RULES


def recording(answers: list[list[int]], labels: list[int] | None = None, **changes: np.ndarray) -> Recording:
    """Images with these answers after each step of size 2; the margin after step n is n."""
    given = np.array(answers)
    count, steps = given.shape
    numbers = {name: np.zeros((count, steps)) for name in ("gain", "exponent", "speed", "cls_speed")}
    own = Recording(
        2.0,
        np.eye(3)[given],
        margin=np.tile(np.arange(1.0, steps + 1), (count, 1)),
        travels=np.tile(np.arange(steps, -1.0, -1.0), (count, 1)),
        labels=None if labels is None else np.array(labels),
        **numbers,
    )
    return dataclasses.replace(own, **changes)  # type: ignore[arg-type]


def test_an_image_ends_where_its_score_first_reaches_the_threshold_and_at_the_horizon_at_the_latest() -> None:
    own = recording([[0, 1, 1], [2, 2, 0]])
    scores = np.array([[0.1, 0.9, 0.2], [0.1, 0.2, 0.3]])
    assert own.exit_steps(scores, 0.5).tolist() == [2, 3]
    assert own.exit_steps(scores, -np.inf).tolist() == [1, 1]
    assert own.answers_at(own.exit_steps(scores, 0.5)).tolist() == [1, 0]


def test_lyapunov_times_count_growth_alone_and_end_an_image() -> None:
    own = recording([[0, 0, 0]], exponent=np.array([[0.5, -9.0, 0.25]]))
    assert own.lyapunov_times.tolist() == [[1.0, 1.0, 1.5]]
    never = np.full((1, 3), -np.inf)
    assert own.exit_steps(never, np.inf, 1.0).tolist() == [1]
    assert own.exit_steps(never, np.inf, 1.5).tolist() == [3]


def test_errors_by_agreement_and_by_accuracy() -> None:
    own = recording([[0, 1], [0, 1], [1, 1]], labels=[0, 1, 1])
    first = np.array([1, 1, 1])
    assert own.errors(first).tolist() == [True, True, False]
    assert own.errors(first, "accuracy").tolist() == [False, True, False]  # the first was right only early


def test_a_trajectory_without_numbers_is_an_error_at_any_step_and_measures_no_travel() -> None:
    logits = np.eye(3)[np.array([[0, 0], [1, 1]])]
    logits[1, 1, 2] = np.nan
    travels = np.array([[4.0, 2.0, 0.0], [9.0, 9.0, 9.0]])
    own = recording([[0, 0], [1, 1]], logits=logits, travels=travels)
    assert own.errors(np.array([2, 2])).tolist() == [False, True]
    assert own.mean_travel().tolist() == [4.0, 2.0, 0.0]


def test_scores_are_those_of_the_rule_at_every_step() -> None:
    own = recording([[0, 1, 1]])
    assert own.scores(RULES["patience"]).tolist() == [[0.0, 0.0, 1.0]]
    assert own.scores(RULES["travel"], np.array([3.0, 2.0, 4.0, 1.0])).tolist() == [[0.5, 0.5, 3.0]]


def test_a_subset_has_its_own_scores() -> None:
    own = recording([[0, 0], [1, 2]], labels=[0, 2])
    own.scores(RULES["patience"])
    part = own.subset(np.array([1]))
    assert part.scores(RULES["patience"]).tolist() == [[0.0, 0.0]]
    assert part.labels is not None
    assert part.labels.tolist() == [2]


def test_steps_of_any_size_end_where_the_grid_does() -> None:
    own = recording([[0, 1, 1], [0, 0, 0]], positions=np.array([[1, 3, 3], [1, 2, 3]]))
    assert own.lengths.tolist() == [2, 3]
    assert own.sizes.tolist() == [[2.0, 4.0, 0.0], [2.0, 2.0, 2.0]]
    assert own.exit_steps(np.full((2, 3), -np.inf), np.inf).tolist() == [2, 3]


@pytest.mark.parametrize(("count", "wanted"), [(2, [1, 2]), (4, [1, 2, 2, 2])])
def test_rows_are_filled_by_their_last_value(count: int, wanted: list[int]) -> None:
    assert filled([1, 2], count) == wanted
