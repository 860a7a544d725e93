"""One picture as the body of `POST .../predict`, without settings: the same answer by a shorter way.

Such a request needs none of FastAPI's routing and validation. Whatever is not exactly this goes on to FastAPI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pydantic_core
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import UserError
from ...runtime.options import RequestOptions
from ..engine import Engine
from ..repository import Repository, Served
from .exchange import answers, as_problem, note
from .middleware import Problem, error_response

FIRST, PREFIX, SUFFIX = "/v1/predict", "/v1/models/", "/predict"
ROUTES = {True: SimpleNamespace(path=FIRST), False: SimpleNamespace(path="/v1/models/{name}/predict")}
DEFAULT = RequestOptions()
NAMES, TOP = ["picture 1"], 5
HEAD = (b"content-type", b"application/json")


class Direct:
    """Between the gateway and FastAPI."""

    def __init__(self, app: ASGIApp, models: Repository):
        self.app, self.models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._served(scope) if scope["type"] == "http" else None
        if served is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = ROUTES[scope["path"] == FIRST]
        try:
            text = await _answer(Request(scope, receive), receive, served)
        except (Problem, UserError) as error:
            await error_response(scope["state"]["request_id"], as_problem(error))(scope, receive, send)
            return
        headers = [HEAD, (b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    def _served(self, scope: Scope) -> Served | None:
        """The model that a request is for; None when FastAPI is to look at it."""
        path = scope["path"]
        if scope["method"] != "POST" or scope["query_string"] or not path.endswith(SUFFIX):
            return None
        kind = next((value for key, value in scope["headers"] if key == b"content-type"), b"").lower()
        if b"json" in kind or b"multipart" in kind:
            return None
        if path == FIRST:
            served = self.models.first
        elif path.startswith(PREFIX):
            try:
                served = self.models.find(path[len(PREFIX) : -len(SUFFIX)])
            except UserError:
                return None
        else:
            return None
        return None if served.engine is None else served


async def _answer(request: Request, receive: Receive, served: Served) -> bytes:
    served.submit(Engine.check_accepting)  # a full queue is told before the upload
    body = await _body(receive)
    arrived = request.state.arrived
    futures = served.submit(lambda engine: engine.submit_many([body], DEFAULT, names=NAMES, arrived=arrived))
    results = await answers(request, futures)
    note(request, results)
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    answer = {"model": served.name, "request_id": request.state.request_id, "predictions": [result.to_dict(TOP)]}
    return pydantic_core.to_json(answer)


async def _body(receive: Callable[[], Awaitable[Any]]) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
