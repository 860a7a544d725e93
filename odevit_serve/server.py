"""The HTTP server: `/v1` for people with curl, `/metrics` and `/docs`; the Open Inference Protocol is in `oip`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import io
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ExceptionHandler

from . import __version__, images, pictures
from .engine import Answer, DeadlineExceeded, Engine, NotAPicture, Overloaded, Settings, Unavailable
from .errors import UsageError, UserError
from .gateway import Doors, Gateway, Options, Problem, error_response
from .metrics import Metrics

STATUS = {Overloaded: 429, Unavailable: 503, DeadlineExceeded: 504, NotAPicture: 415, UsageError: 422}
ASIDE = 64 * 1024  # bytes of JSON from which parsing leaves the event loop
PICTURE_SIDE = 1024  # pixels of the longer side of the pictures that maps are drawn on


class Asked(BaseModel):
    """Settings of a request. What is left out is the bundle's own."""

    model_config = ConfigDict(extra="forbid")
    max_steps: int | None = Field(None, ge=1, le=10**6, description="Stop after this many steps.")
    rule: str | None = Field(None, max_length=64, description="Exit rule.")
    kappa: float | None = Field(None, ge=0, allow_inf_nan=False, description="Safety factor of the contraction rules.")
    threshold: float | None = Field(None, allow_inf_nan=False, description="Threshold of any rule.")
    adaptive: bool = Field(True, description="false: full depth.")
    deadline_ms: float | None = Field(
        None, gt=0, le=86_400_000, allow_inf_nan=False, description="Give the best answer so far after this time."
    )
    priority: Literal["interactive", "bulk"] = "interactive"

    def settings(self) -> Settings:
        own = Settings.__dataclass_fields__.keys()
        return Settings(**{key: value for key, value in self.model_dump(exclude_unset=True).items() if key in own})


class AskedPrediction(Asked):
    top: int = Field(5, ge=1, le=100_000, description="How many of the likeliest classes to list.")
    trace: bool = Field(False, description="Give the numbers of every step.")


class AskedAttention(Asked):
    head: str = Field("mean", pattern="^(mean|[0-9]{1,4})$", description="`mean`, or a head counted from 1.")
    step: int | None = Field(None, ge=0, le=10**6, description="After which step; left out: where it exits.")


class Pictures(BaseModel):
    """Pictures in JSON: base64, one or several."""

    image: str | None = None
    images: list[str] | None = None

    def decode(self) -> list[bytes]:
        if (self.image is None) == (self.images is None):
            raise UsageError("give either image or images")
        try:
            texts = [self.image] if self.images is None else self.images
            return [base64.b64decode(text or "", validate=True) for text in texts]
        except (binascii.Error, ValueError):
            raise UsageError("image must be base64: file names and addresses are not opened") from None


class PredictionBody(Pictures, AskedPrediction):
    pass


class AttentionBody(Pictures, AskedAttention):
    pass


class ErrorBody(BaseModel):
    error: str
    request_id: str


class PredictionsBody(BaseModel):
    model: str
    request_id: str
    predictions: list[dict[str, Any]]


def create_app(engine: Engine, options: Options | None = None) -> FastAPI:
    """The application around an engine, which it starts and closes unless that was done before."""
    options = options or Options()
    metrics, doors = Metrics(engine), Doors()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        if engine.state == "new":
            engine.start(wait=False)  # in the background: /v2/health/live answers while it warms up
        yield
        doors.close()
        await asyncio.to_thread(engine.close, 5.0)

    app = FastAPI(
        title="odevit-serve",
        version=__version__,
        description="Image classification in which every image gets just the depth it needs.",
        lifespan=life,
        responses={code: {"model": ErrorBody, "description": text} for code, text in ERRORS.items()},
    )
    app.state.engine, app.state.options, app.state.doors, app.state.metrics = engine, options, doors, metrics
    app.add_middleware(Gateway, options=options, doors=doors, count=metrics.count)
    if options.cors:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors), allow_methods=["*"], allow_headers=["*"])
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    from .oip import router

    _routes(app, engine, options, metrics)
    app.include_router(router(engine, options))
    return app


ERRORS = {
    401: "A key is needed.",
    408: "The body took too long to arrive.",
    413: "The body is too large, or holds too many pictures.",
    415: "Not a picture.",
    422: "A parameter is wrong.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The computation failed.",
    503: "Warming up or shutting down.",
    504: "The deadline passed before the first step.",
}


def _routes(app: FastAPI, engine: Engine, options: Options, metrics: Metrics) -> None:
    @app.post("/v1/predict", response_model=PredictionsBody, openapi_extra=_accepts("PredictionBody"), tags=["v1"])
    async def predict(request: Request, query: Annotated[AskedPrediction, Query()]) -> Response:
        """Classify one or many pictures: a raw body, a multipart form, or JSON with base64.

        Of many pictures, those that cannot be answered have an `error` and a `status` in their place; when none can,
        that is the status of the whole.
        """
        asked, bodies, names = await _read(request, query, PredictionBody, engine, options)
        settings = dataclasses.replace(asked.settings(), trace=asked.trace)
        results = await answers(request, engine.submit_many(bodies, settings, names=names))
        entries = [_entry(result, name, asked.top) for result, name in zip(results, names)]
        note(request, results)
        if all(isinstance(result, BaseException) for result in results):
            raise results[0]  # type: ignore[misc]
        answer = {"model": engine.model.config.name, "request_id": request.state.request_id, "predictions": entries}
        return JSONResponse(answer)

    @app.post(
        "/v1/attention",
        response_class=Response,
        responses={200: {"content": {"image/png": {}}, "description": "The map on the picture."}},
        openapi_extra=_accepts("AttentionBody"),
        tags=["v1"],
    )
    async def attention(request: Request, query: Annotated[AskedAttention, Query()]) -> Response:
        """Where the model looks: the attention of its class token as heat on the picture, a PNG."""
        asked, bodies, names = await _read(request, query, AttentionBody, engine, options)
        if len(bodies) != 1:
            raise UsageError(f"one picture for one map, not {len(bodies)}")
        heads, full = engine.model.config.architecture.heads, engine.model.config.integration.steps
        if asked.head != "mean" and not 1 <= int(asked.head) <= heads:
            raise UsageError(f"head must be mean or a number from 1 to {heads}, not {asked.head}")
        settings = dataclasses.replace(asked.settings(), attention=True)
        if asked.step is not None:
            if asked.step > full:
                raise UsageError(f"step must lie between 0 and {full}, not {asked.step}")
            budget = max(1, asked.step)
            settings = dataclasses.replace(settings, states=True, adaptive=False, max_steps=budget)
        (result,) = await answers(request, engine.submit_many(bodies, settings, names=names))
        note(request, [result])
        if isinstance(result, BaseException):
            raise result
        if asked.step is not None and len(result.attention) <= asked.step:
            raise DeadlineExceeded(f"the deadline passed before step {asked.step}")
        picture = await asyncio.to_thread(_draw, engine, bodies[0], result, asked)
        own = {"X-Label": _header(result.prediction.label), "X-Steps": str(result.prediction.steps)}
        return Response(picture, media_type="image/png", headers=own)

    @app.get("/v1/model", tags=["v1"])
    async def model() -> dict[str, Any]:
        """What is served: labels, depth, exit rule and its guarantee, and the limits for requests."""
        return describe(engine, options)

    @app.get("/metrics", response_class=Response, tags=["operation"], responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Counts for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def describe(engine: Engine, options: Options) -> dict[str, Any]:
    config, limits = engine.model.config, engine.limits
    return {
        "name": config.name,
        "labels": list(engine.model.labels),
        "input_size": list(config.preprocessing.input_size),
        "steps": config.integration.steps,
        "horizon": config.integration.horizon,
        "solver": config.integration.solver,
        "exit": {
            "rule": config.exit.rule,
            "threshold": config.exit.threshold,
            "guarantee": None if config.exit.calibration is None else dataclasses.asdict(config.exit.calibration),
        },
        "license": config.license,
        "limits": {
            "max_body": options.max_body,
            "max_images": options.max_images,
            "slots": engine.core.capacity,
            "queue": engine.queue,
            "overload": engine.overload,
            "rules": None if limits.rules is None else list(limits.rules),
            "min_kappa": limits.min_kappa,
            "max_kappa": limits.max_kappa,
            "max_steps": limits.max_steps,
        },
    }


async def read_body(request: Request, engine: Engine) -> bytes:
    """The whole body; its limits are the gateway's. A full queue is told before the upload, not after it."""
    engine.check_accepting()
    return b"".join([chunk async for chunk in request.stream()])


async def _read(
    request: Request, query: Asked, kind: type[Any], engine: Engine, options: Options
) -> tuple[Any, list[bytes], list[str]]:
    """The settings and pictures of a request, whatever form it came in."""
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    given = query.model_dump(exclude_unset=True)
    names: list[str] = []
    if content == "multipart/form-data":
        engine.check_accepting()
        bodies, names, fields = await _form(request, options)
        asked = kind.model_validate({**given, **fields})
    else:
        body = await read_body(request, engine)
        if content == "application/json" or content.endswith("+json"):
            asked = await aside(len(body), kind.model_validate_json, body)
            asked = asked.model_copy(update={k: v for k, v in given.items() if k not in asked.model_fields_set})
            bodies = await aside(len(body), asked.decode)
        else:
            asked, bodies = kind.model_validate(given), [body]
    if not bodies:
        raise UsageError("no picture in the request")
    if len(bodies) > options.max_images:
        raise Problem(413, f"{len(bodies)} pictures in one request, {options.max_images} are allowed")
    return asked, bodies, names or [f"picture {i + 1}" for i in range(len(bodies))]


async def _form(request: Request, options: Options) -> tuple[list[bytes], list[str], dict[str, str]]:
    from starlette.formparsers import MultiPartException

    bodies, names, fields = [], [], {}
    try:
        form = await request.form(max_files=options.max_images + 1, max_fields=32, max_part_size=65536)
    except (HTTPException, MultiPartException) as error:
        raise UsageError(f"the form cannot be read: {getattr(error, 'detail', error)}") from None
    try:
        for key, value in form.multi_items():
            if isinstance(value, str):
                fields[key] = value
            else:
                bodies.append(await value.read())
                names.append(value.filename or f"picture {len(bodies)}")
    finally:
        await form.close()
    return bodies, names, fields


async def aside(size: int, function: Any, *args: Any) -> Any:
    """Call it, on another thread if it is work enough to hold up the event loop."""
    return await asyncio.to_thread(function, *args) if size > ASIDE else function(*args)


async def answers(request: Request, futures: Sequence[Future[Answer]]) -> list[Answer | BaseException]:
    """Wait for all, unless the client goes away first: then its slots are wanted by others."""
    everything: asyncio.Future[Any] = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({everything, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not everything.done():
            raise ClientDisconnect
        return list(everything.result())
    finally:
        gone.cancel()
        if not everything.done():
            for future in futures:
                future.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _entry(result: Answer | BaseException, name: str, top: int) -> dict[str, Any]:
    if isinstance(result, Answer):
        return result.to_dict(top)
    problem = as_problem(result)
    return {"source": name, "error": problem.message, "status": problem.status}


def note(request: Request, results: Sequence[Answer | BaseException]) -> None:
    """Fields for the log line."""
    good = [result for result in results if isinstance(result, Answer)]
    notes = {"images": len(results), "steps": [a.prediction.steps for a in good]}
    if len(good) < len(results):
        notes["failed"] = len(results) - len(good)
    request.state.notes.update(notes)


def _draw(engine: Engine, body: bytes, answer: Answer, asked: AskedAttention) -> bytes:
    picture = images.view(images.read(body), engine.model.config.preprocessing)
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    maps = answer.attention[0 if asked.step is None else asked.step]
    heat = maps.mean if asked.head == "mean" else maps.heads[int(asked.head) - 1]
    buffer = io.BytesIO()
    pictures.overlay(picture, heat).save(buffer, "PNG")
    return buffer.getvalue()


def _header(text: str) -> str:
    return text.encode("latin-1", "replace").decode("latin-1").replace("\r", " ").replace("\n", " ")


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


async def _on_known(request: Request, error: Exception) -> Response:
    return error_response(request.state.request_id, as_problem(error))  # type: ignore[no-any-return]


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError | ValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("query", "body", "path"))
    text = f"{where}: {first['msg']}" if where else str(first["msg"])
    return error_response(_id(request), Problem(422, text))  # type: ignore[no-any-return]


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = Problem(error.status_code, str(error.detail), dict(error.headers or {}))
    return error_response(_id(request), problem)  # type: ignore[no-any-return]


def _id(request: Request) -> str:
    return getattr(request.state, "request_id", "")


HANDLERS: dict[type[Exception], ExceptionHandler] = {
    Problem: _on_known,
    UserError: _on_known,
    RequestValidationError: _on_invalid,
    ValidationError: _on_invalid,
    HTTPException: _on_http,
}


def _accepts(body: str) -> dict[str, Any]:
    """The request body for OpenAPI: the forms that `_read` takes."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    models: dict[str, type[BaseModel]] = {"PredictionBody": PredictionBody, "AttentionBody": AttentionBody}
    settings = models[body].model_json_schema()["properties"]
    own = {key: value for key, value in settings.items() if key not in ("image", "images")}
    file = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    form = {"type": "object", "properties": {**own, "file": file}, "required": ["file"], "additionalProperties": False}
    text = {"type": "string", "format": "byte"}
    schema = models[body].model_json_schema()
    schema["properties"]["image"] = text
    schema["properties"]["images"] = {"type": "array", "items": text, "minItems": 1}
    schema["oneOf"] = [{"required": ["image"]}, {"required": ["images"]}]
    content = {"image/*": binary, "application/octet-stream": binary, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}, **content}}}
