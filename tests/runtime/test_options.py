"""What a request may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from odevit_serve.errors import UsageError
from odevit_serve.runtime.options import DAY_MS, MOST_STEPS, RequestOptions


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"max_steps": -1}, "max_steps must be at least 1, not -1"),
        ({"max_steps": MOST_STEPS + 1}, "max_steps may be at most 1,000,000"),
        ({"tolerance": -0.5}, "tolerance must be a number of 0 or more, not -0.5"),
        ({"tolerance": float("nan")}, "tolerance must be a number of 0 or more, not nan"),
        ({"deadline_ms": 0}, "deadline_ms must be above 0 and at most a day, not 0"),
        ({"deadline_ms": DAY_MS + 1}, "at most a day"),
        ({"priority": "soon"}, "priority must be one of interactive, bulk, not 'soon'"),
        ({"depht": 3}, "unknown option 'depht'"),
    ],
)
def test_what_cannot_be_is_told(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        RequestOptions.of(None, asked)


def test_what_is_asked_goes_over_the_options_given() -> None:
    given = RequestOptions(max_steps=4, priority="bulk")
    found = RequestOptions.of(given, {"max_steps": 2})
    assert (found.max_steps, found.priority) == (2, "bulk")
    assert RequestOptions.of(given, {}) is given


@pytest.mark.parametrize(
    ("asked", "kept"), [({}, ""), ({"attention": True}, "last"), ({"attention": True, "states": True}, "all")]
)
def test_which_states_are_kept(asked: dict[str, Any], kept: str) -> None:
    assert RequestOptions(**asked).keep == kept
