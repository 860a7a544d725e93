"""From JSON data to dataclasses: each error names the field and the value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from odevit_serve.errors import UsageError
from odevit_serve.schema import build, shown


@dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    inner: Inner
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 1.0)
    maybe: Inner | None = None
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    free: Any = None


def test_data_becomes_the_dataclass() -> None:
    data = {"inner": {"size": 3, "rate": 1}, "names": ["a"], "pair": [2, 3], "table": {"x": 1}, "free": [None]}
    found = build(Outer, data)
    assert found == Outer(Inner(3, 1.0), ("a",), (2, 3.0), None, {"x": 1.0}, [None])
    assert isinstance(found.inner.rate, float)
    assert build(Outer, dataclasses.asdict(found)) == found


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], r"the top level must be an object, not \[\]"),
        ({}, "^inner is missing"),
        ({"inner": {}}, r"^inner\.size is missing"),
        ({"inner": {"size": 1, "sise": 2}}, "inner has an unknown field 'sise'"),
        ({"inner": {"size": True}}, r"inner\.size must be of type int, not True"),
        ({"inner": {"size": 1, "rate": float("nan")}}, r"inner\.rate must be finite, not nan"),
        ({"inner": {"size": 1}, "names": "ab"}, "names must be a list, not 'ab'"),
        ({"inner": {"size": 1}, "names": ["a", 2]}, r"names\[1\] must be of type str, not 2"),
        ({"inner": {"size": 1}, "pair": [1]}, "pair must have 2 values, not 1"),
        ({"inner": {"size": 1}, "table": {"x": "y"}}, r"table\.x must be of type float, not 'y'"),
    ],
)
def test_what_is_wrong_is_named(data: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(Outer, data)


def test_a_message_quotes_a_value_of_any_size_in_few_characters() -> None:
    assert shown([1, "a"]) == "[1, 'a']"
    deep: Any = "x" * 1000
    for _ in range(4):
        deep = {f"{number}" * 200: [deep] * 9 for number in range(9)}
    assert len(shown(deep)) < 320
