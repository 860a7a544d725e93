"""Log lines of the server, as JSON or as text: ours and uvicorn's alike."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from ..errors import UsageError

FORMS = ("auto", "json", "text", "off")


def set_up_logging(form: str) -> None:
    """Log lines to stderr, as JSON or text."""
    if form not in FORMS:
        raise UsageError(f"unknown log format {form!r}: choose one of {', '.join(FORMS)}")
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler: logging.Handler = logging.NullHandler() if form == "off" else logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in ("odevit_serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.CRITICAL + 1 if form == "off" else logging.INFO)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, event, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """The same for a person at a terminal. What clients have sent cannot start a line or steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={_printable(value)}" for key, value in getattr(record, "fields", {}).items())
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} "
        text += f"{_printable(record.getMessage())} {fields}".rstrip()
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def _printable(value: Any) -> str:
    """Control characters, line and paragraph separators and marks of direction as escapes."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
