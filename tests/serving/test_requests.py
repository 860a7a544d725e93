"""What the operator of a server allows."""

from __future__ import annotations

from typing import Any

import pytest

from odevit_serve.errors import UsageError
from odevit_serve.runtime.options import RequestOptions
from odevit_serve.serving.requests import Limits

LIMITS = Limits(rules=("drift", "travel"), min_threshold=0.1, max_threshold=2.0, max_steps=4)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"rule": "margin"}, "rule 'margin' is not allowed here: choose one of drift, travel"),
        ({"threshold": 0.05}, "threshold must be at least 0.1 here, not 0.05"),
        ({"threshold": 3}, "threshold may be at most 2 here, not 3"),
        ({"max_steps": 5}, "max_steps may be at most 4 here, not 5"),
        ({"steps": 33}, "steps may be at most 32 here, not 33"),
    ],
)
def test_more_than_is_allowed_is_told(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LIMITS.check(RequestOptions(**asked), 8)


@pytest.mark.parametrize(
    "asked", [{}, {"rule": "drift", "threshold": 0.1}, {"threshold": 2.0}, {"max_steps": 4}, {"steps": 32}]
)
def test_what_is_allowed_passes(asked: dict[str, Any]) -> None:
    LIMITS.check(RequestOptions(**asked), 8)
