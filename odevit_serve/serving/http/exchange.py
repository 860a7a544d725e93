"""From an HTTP request to the engine and back: what `/v1` and the Open Inference Protocol share."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
import typing
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.requests import ClientDisconnect

from ...errors import UsageError, UserError
from ...runtime.options import RequestOptions
from ..engine import Answer, DeadlineExceeded, Engine, NotAPicture, Overloaded, Unavailable
from ..repository import NoModel, Served
from .middleware import Problem

STATUS = {Overloaded: 429, Unavailable: 503, DeadlineExceeded: 504, NotAPicture: 415, NoModel: 404, UsageError: 422}
ASIDE = 64 * 1024  # bytes of JSON from which parsing leaves the event loop
MAX_KEYS = 32  # of a JSON object that is checked key by key
SETTINGS = 1000  # values in the JSON of a request beside its pictures or pixels

_hints = typing.get_type_hints(RequestOptions)
_fields: dict[str, Any] = {
    field.name: (_hints[field.name], Field(field.default, **field.metadata))
    for field in dataclasses.fields(RequestOptions)
    if field.metadata
}
_own: Any = create_model("RequestOptions", __config__=ConfigDict(extra="forbid"), **_fields)


class Asked(_own):
    """The options of a request. What is left out is the model's own."""

    def options(self, **more: Any) -> RequestOptions:
        given = self.model_dump(exclude_unset=True)
        return RequestOptions(**{key: given[key] for key in _own.model_fields if key in given}, **more)


class ErrorBody(BaseModel):
    error: str
    request_id: str


def parse_json(body: bytes, values: int) -> dict[str, Any]:
    """A JSON object of bounded size; no more than `values` values are ever built, and one error tells what is wrong."""
    if body.count(b",") > values:  # there is one between any two values
        raise Problem(413, f"the JSON has more than {values:,} values")
    try:
        data = pydantic_core.from_json(body)
    except ValueError as error:
        raise UsageError(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError("the body must be a JSON object")
    if len(data) > MAX_KEYS:
        raise UsageError(f"the JSON object has {len(data):,} keys, {MAX_KEYS} are allowed")
    return data


async def awake(served: Served) -> Served:
    """A model whose memory was given back is loaded again, on another thread, before it is asked."""
    if served.asleep:
        await asyncio.to_thread(served.current)
    return served


async def read_body(request: Request, served: Served) -> bytes:
    """The whole body; its limits are the gateway's. A full queue is told before the upload, not after it."""
    (await awake(served)).submit(Engine.check_accepting)
    return b"".join([chunk async for chunk in request.stream()])


async def aside(size: int, function: Any, *args: Any) -> Any:
    """Call it, on another thread if it is work enough to hold up the event loop."""
    return await asyncio.to_thread(function, *args) if size > ASIDE else function(*args)


async def decoded(served: Served, function: Any, *arguments: Any) -> Any:
    """Call it where pictures are decoded; what an engine that is replaced has not begun, the next one does."""
    while True:
        future = served.submit(lambda engine: engine.decode(function, *arguments))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the request itself was
                raise


@asynccontextmanager
async def in_time(request: Request, deadline_ms: float | None, what: str) -> AsyncIterator[None]:
    """Hold to the deadline of a request, counted from its arrival, what the engine does not do."""
    if deadline_ms is None:
        yield
        return
    try:
        async with asyncio.timeout(max(0.0, request.state.arrived + deadline_ms / 1000 - time.monotonic())):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline of {deadline_ms:g} ms passed before {what}") from None


async def answers(request: Request, futures: Sequence[Future[Answer]]) -> list[Answer | BaseException]:
    """Wait for all, unless the client goes away first: then its slots are wanted by others."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    left = collections.deque(futures)  # whose ends take one out each, on whatever thread

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    def ended(_: object) -> None:
        left.pop()
        if not left:  # one call for all of a request
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever asked
                loop.call_soon_threadsafe(end)

    for future in futures:
        future.add_done_callback(ended)
    gone: asyncio.Task[None] = loop.create_task(_gone(request))
    gone.add_done_callback(end)
    try:
        await over
        if left:
            raise ClientDisconnect
        return [future.exception() or future.result() for future in futures]
    finally:
        gone.cancel()
        if left:
            for future in futures:
                future.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def note(request: Request, results: Sequence[Answer | BaseException]) -> None:
    """Fields for the log line."""
    good = [result for result in results if isinstance(result, Answer)]
    notes = {"images": len(results), "steps": [a.prediction.steps for a in good]}
    if len(good) < len(results):
        notes["failed"] = len(results) - len(good)
    request.state.notes.update(notes)


def as_problem(error: BaseException) -> Problem:
    """The answer that an error stands for."""
    if isinstance(error, Problem):
        return error
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    elif status == 503:
        headers["Retry-After"] = "1"
    return Problem(status, str(error) if isinstance(error, UserError) else "the server failed", headers)
