"""Keys, and errors of bounded length."""

from __future__ import annotations

import pytest

from odevit_serve.errors import UsageError
from odevit_serve.serving.http.middleware import MAX_SENTENCE, Options, Problem, authorised


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"authorization": "Bearer secret"}, True),
        ({"authorization": "bearer  secret "}, True),
        ({"x-api-key": "secret"}, True),
        ({}, False),
        ({"x-api-key": "secre"}, False),
        ({"x-api-key": "secrets"}, False),
        ({"x-api-key": ""}, False),
        ({"authorization": "Basic secret"}, False),
        ({"authorization": "Bearer other", "x-api-key": "secret"}, False),
        ({"x-api-key": "\N{SNOWMAN}"}, False),
    ],
)
def test_a_key_is_taken_whole_from_either_header(headers: dict[str, str], allowed: bool) -> None:
    assert authorised(headers, b"secret") is allowed


def test_an_error_quotes_no_more_than_a_sentence() -> None:
    found = Problem(422, "x" * 10**6)
    assert len(found.message) == MAX_SENTENCE + 3
    assert Problem(422, "short").message == "short"


def test_an_empty_key_is_refused_and_never_shown() -> None:
    with pytest.raises(UsageError, match="the API key is empty"):
        Options(api_key=" ")
    assert "hidden" not in repr(Options(api_key="hidden"))
