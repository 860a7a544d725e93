"""What every HTTP request passes through: an id, the key, limits on its body, one log line, one count.

Plain ASGI, so that a body is measured while it arrives and nothing is buffered on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("odevit_serve.http")
OPEN = ("/v2/health/live", "/v2/health/ready")  # probes carry no key
LINGER = 0.5  # seconds that a body which is too large is read on and thrown away
GONE = 499  # the client went away; nobody reads the answer
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Problem(Exception):
    """An answer that is an error: its status, its sentence, and headers that go with it."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


@dataclass(frozen=True)
class Options:
    """How the server behaves towards its clients."""

    max_body: int = 16 * 2**20
    max_images: int = 64  # in one request
    body_timeout: float = 30.0  # seconds for the whole body to arrive
    api_key: str | None = None
    cors: tuple[str, ...] = ()


@dataclass
class Doors:
    """Bodies that are arriving now, so that a shutdown need not wait for slow ones."""

    closed: bool = False
    arriving: set[asyncio.Timeout] = field(default_factory=set)

    def close(self) -> None:
        self.closed = True
        for timeout in self.arriving:
            timeout.reschedule(asyncio.get_running_loop().time())


class Gateway:
    def __init__(self, app: ASGIApp, options: Options, doors: Doors, count: Callable[[str, int, float], None]):
        self.app, self.options, self.doors, self.count = app, options, doors, count
        self.key = options.api_key.encode() if options.api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _ID.fullmatch(given) else uuid.uuid4().hex
        state["notes"] = {}
        began, status = time.monotonic(), 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = state["request_id"]
            await send(message)

        try:
            problem = self._refuse(scope, headers)
            if problem is not None:
                if problem.status == 413:
                    await _discard(receive)
                await error_response(state["request_id"], problem)(scope, receive, tell)
            else:
                await self.app(scope, self._measured(receive), tell)
        except ClientDisconnect:
            status = GONE
        except Exception:
            log.exception("a request failed", extra={"fields": {"request_id": state["request_id"]}})
            if not status:
                await error_response(state["request_id"], Problem(500, "the server failed"))(scope, receive, tell)
        finally:
            seconds = time.monotonic() - began
            route = getattr(scope.get("route"), "path", "unmatched")
            self.count(route, status or 500, seconds)
            _log(scope, state, status or 500, seconds)

    def _refuse(self, scope: Scope, headers: Headers) -> Problem | None:
        if self.key and scope["path"] not in OPEN and scope["method"] != "OPTIONS" and not self._authorised(headers):
            return Problem(401, "a valid API key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return Problem(422, f"Content-Length must be a number, not {length[:40]!r}")
        if int(length) > self.options.max_body:
            return self._too_large(int(length))
        return None

    def _authorised(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode("latin-1"), self.key)

    def _too_large(self, size: int) -> Problem:
        text = f"the body has {size:,} bytes or more, {self.options.max_body:,} are allowed"
        return Problem(413, text, {"Connection": "close"})

    def _measured(self, receive: Receive) -> Receive:
        """`receive` that ends a body which is too long, too slow, or still arriving when the server shuts down."""
        size, done = 0, False
        until = time.monotonic() + self.options.body_timeout

        async def measured() -> Message:
            nonlocal size, done
            if done:
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())) as timeout:
                    self.doors.arriving.add(timeout)
                    try:
                        if self.doors.closed:
                            timeout.reschedule(asyncio.get_running_loop().time())
                        message = await receive()
                    finally:
                        self.doors.arriving.discard(timeout)
            except TimeoutError:
                close = {"Connection": "close"}
                if self.doors.closed:
                    raise Problem(503, "the server is shutting down", close) from None
                text = f"the body took longer than {self.options.body_timeout:g} s to arrive"
                raise Problem(408, text, close) from None
            done = message["type"] != "http.request" or not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.options.max_body:
                if not done:
                    await _discard(receive)
                raise self._too_large(size)
            return message

        return measured


async def _discard(receive: Receive) -> None:
    """Let a client that is still sending see its answer: closing on it at once would reset the connection."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body", False):
                pass


def error_response(request_id: str, problem: Problem) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": problem.message, "request_id": request_id}, problem.status, headers=problem.headers)


def _log(scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
    level = logging.ERROR if status >= 500 and status not in (503, 504) else logging.INFO
    if log.isEnabledFor(level):
        fields = {
            "request_id": state["request_id"],
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "milliseconds": round(1000 * seconds, 3),
            **state["notes"],
        }
        log.log(level, "request", extra={"fields": fields})


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
    """The same for a person at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "fields", {}).items())
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} "
        text += f"{record.getMessage()} {fields}".rstrip()
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")
