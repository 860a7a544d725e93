"""JSON bodies are read in bounds."""

from __future__ import annotations

import pytest

from odevit_serve.errors import UsageError
from odevit_serve.serving.http.exchange import MAX_KEYS, parse_json
from odevit_serve.serving.http.middleware import Problem


def test_too_many_values_are_refused_before_any_is_built() -> None:
    assert parse_json(b'{"images": [1, 2, 3]}', 2) == {"images": [1, 2, 3]}
    with pytest.raises(Problem, match="more than 1 values") as found:
        parse_json(b"[1, 2, 3 and no JSON at all", 1)
    assert found.value.status == 413


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "the body is not valid JSON"),
        (b"[1]", "the body must be a JSON object"),
        (b"[" * 100_000, "the body is not valid JSON"),
        (b"\xff", "the body is not valid JSON"),
    ],
)
def test_what_is_no_object(body: bytes, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_json(body, 100)


def test_the_number_of_keys_is_bounded() -> None:
    body = b"{" + b",".join(b'"%d": 0' % key for key in range(MAX_KEYS + 1)) + b"}"
    with pytest.raises(UsageError, match=f"{MAX_KEYS} are allowed"):
        parse_json(body, 10**6)
