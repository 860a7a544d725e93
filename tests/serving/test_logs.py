"""Log lines: nothing that a client sends can forge a line or steer a terminal."""

from __future__ import annotations

import json
import logging

import pytest

from odevit_serve.errors import UsageError
from odevit_serve.serving.logs import JsonLines, TextLines, set_up_logging

FORGED = "/a\n12:00:00 info request status=200\x1b[2J\u2028\u202eb\x00"


def record(path: str) -> logging.LogRecord:
    made = logging.LogRecord("odevit_serve.http", logging.INFO, "", 0, "request", (), None)
    made.fields = {"path": path, "status": 404}
    return made


def test_text_is_one_line_without_control_characters() -> None:
    line = TextLines().format(record(FORGED))
    assert line.isprintable()
    assert line.endswith(r"path=/a\n12:00:00 info request status=200\x1b[2J\u2028\u202eb\x00 status=404")
    assert TextLines().format(record("/v1/größe")).endswith("path=/v1/größe status=404")


def test_json_is_one_line_and_keeps_the_text() -> None:
    line = JsonLines().format(record(FORGED))
    assert "\n" not in line
    assert json.loads(line)["path"] == FORGED


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown log format 'xml'"):
        set_up_logging("xml")
