"""What every HTTP request passes through: an id, the key, limits on its body, one log line, one count.

Plain ASGI, so that a body is measured while it arrives and nothing is buffered on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import UsageError
from .. import tracing

log = logging.getLogger("odevit_serve.http")
OPEN = ("/v2/health/live", "/v2/health/ready")  # probes carry no key
LINGER = 0.5  # seconds that a body which is too large is read on and thrown away
GONE = 499  # the client went away; nobody reads the answer
MAX_QUERY = 8192  # bytes
MAX_SENTENCE = 400  # characters of an error: some of them quote what was sent
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LENGTH = re.compile(r"[0-9]{1,15}")


class Problem(Exception):
    """An answer that is an error: its status, its sentence, and headers that go with it."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        short = message if len(message) <= MAX_SENTENCE else message[:MAX_SENTENCE] + "..."
        self.status, self.message, self.headers = status, short, headers or {}


@dataclass(frozen=True)
class Options:
    """How the server behaves towards its clients."""

    max_body: int = 16 * 2**20
    max_images: int = 64  # in one request
    body_timeout: float = 30.0  # seconds for the whole body to arrive
    api_key: str | None = field(default=None, repr=False)
    cors: tuple[str, ...] = ()
    header_timeout: float = 10.0  # seconds for the head of a request to arrive, for the first as for the next
    grpc: str | None = None  # address and port of the same protocol over gRPC

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty: leave it out to serve without one")


@dataclass
class Doors:
    """Bodies that are arriving now, so that a shutdown need not wait for slow ones."""

    closed: bool = False
    arriving: set[asyncio.Timeout] = field(default_factory=set)

    def close(self) -> None:
        self.closed = True
        for timeout in self.arriving:
            timeout.reschedule(asyncio.get_running_loop().time())


def authorised(headers: Mapping[str, str], key: bytes) -> bool:
    """Whether the headers, or the metadata of gRPC, carry the key."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return hmac.compare_digest(given.encode("latin-1", "replace"), key)


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
        state["arrived"] = began = time.monotonic()
        status = 0
        traced = tracing.attach(headers) if tracing.is_set_up() else None

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", state["request_id"].encode("ascii"))
                message["headers"] = [*message.get("headers", ()), own]
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
            if traced is not None:
                tracing.detach(traced)
            seconds = time.monotonic() - began
            route = getattr(scope.get("route"), "path", "unmatched")
            self.count(route, status or 500, seconds)
            _log(scope, state, status or 500, seconds)

    def _refuse(self, scope: Scope, headers: Headers) -> Problem | None:
        if self.key and scope["path"] not in OPEN and scope["method"] != "OPTIONS" and not self._authorised(headers):
            return Problem(401, "a valid API key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
        if len(scope["query_string"]) > MAX_QUERY:
            return Problem(414, f"the query has more than {MAX_QUERY:,} bytes")
        length = headers.get("content-length", "0")
        if not _LENGTH.fullmatch(length):
            return Problem(422, f"Content-Length must be a number, not {length[:40]!r}")
        if int(length) > self.options.max_body:
            return self._too_large(int(length))
        return None

    def _authorised(self, headers: Headers) -> bool:
        return authorised(headers, self.key)

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
