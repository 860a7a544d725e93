"""The HTTP server: `/v1` for people with curl, and `/metrics`; the Open Inference Protocol is in `open_inference`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ExceptionHandler

from ... import __version__
from ...config import Config
from ...data import images
from ...errors import UsageError, UserError
from ...runtime import drawing as pictures
from ..engine import Answer, DeadlineExceeded, Engine, Limits
from ..metrics import Metrics
from ..repository import Repository, Served
from . import audit, open_inference, repository
from .direct import Direct
from .exchange import (
    SETTINGS,
    Asked,
    ErrorBody,
    answers,
    as_problem,
    aside,
    awake,
    decoded,
    in_time,
    note,
    parse_json,
    read_body,
)
from .middleware import Doors, Gateway, Options, Problem, error_response

MAX_NAME = 255  # characters of a file's name that an answer repeats
PICTURE_SIDE = 1024  # pixels of the longer side of the pictures that maps are drawn on


class AskedPrediction(Asked):
    top: int = Field(5, ge=1, le=100_000, description="How many of the likeliest classes to list.")
    trace: bool = Field(False, description="Give the numbers of every step.")


class AskedAttention(Asked):
    head: str = Field("mean", pattern="^(mean|[0-9]{1,4})$", description="`mean`, or a head counted from 1.")
    step: int | None = Field(None, ge=0, le=10**6, description="After which step; left out: where it exits.")


class PicturesBody(BaseModel):
    """Pictures in JSON: base64, one or several."""

    image: str | None = None
    images: list[str] | None = Field(None, fail_fast=True)

    def decode(self) -> list[bytes]:
        if (self.image is None) == (self.images is None):
            raise UsageError("give either image or images")
        try:
            texts = [self.image] if self.images is None else self.images
            return [base64.b64decode(text or "", validate=True) for text in texts]
        except (binascii.Error, ValueError):
            raise UsageError("image must be base64: file names and addresses are not opened") from None


class PredictionBody(PicturesBody, AskedPrediction):
    pass


class AttentionBody(PicturesBody, AskedAttention):
    pass


class PredictionsBody(BaseModel):
    model: str
    request_id: str
    predictions: list[dict[str, Any]]


def create_app(engine: Engine | Repository, options: Options | None = None) -> FastAPI:
    """The application around an engine or several, which it starts and closes unless that was done before."""
    options = options or Options()
    models = engine if isinstance(engine, Repository) else Repository.of(engine)
    if models.folder is not None and not options.api_key:
        raise UsageError("loading and unloading models over HTTP needs a key: set ODEVIT_API_KEY or --api-key")
    metrics, doors = Metrics(models), Doors()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        models.start()  # in the background: /v2/health/live answers while they warm up
        by_grpc = None
        if options.grpc is not None:
            from ..grpc import start

            by_grpc, app.state.grpc_port = await start(models, options, metrics.count)
        yield
        doors.close()
        if by_grpc is not None:
            await by_grpc.stop(1.0)
        await asyncio.to_thread(models.close, 5.0)

    app = FastAPI(
        title="odevit-serve",
        version=__version__,
        description="Image classification in which every image gets just the depth it needs.",
        lifespan=life,
        docs_url=None,  # pages that take their scripts from other hosts
        redoc_url=None,
        responses={code: {"model": ErrorBody, "description": text} for code, text in ERRORS.items()},
    )
    app.state.models, app.state.options, app.state.doors, app.state.metrics = models, options, doors, metrics
    app.add_middleware(Direct, models=models)  # inside of the gateway
    app.add_middleware(Gateway, options=options, doors=doors, count=metrics.count)
    if options.cors:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors), allow_methods=["*"], allow_headers=["*"])
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    _routes(app, models, options, metrics)
    app.include_router(open_inference.router(models, options))
    if models.folder is not None:
        app.include_router(repository.router(models))
    app.include_router(audit.router(models, options))
    return app


ERRORS = {
    401: "A key is needed.",
    404: "There is no such model, or no such path.",
    408: "The body took too long to arrive.",
    413: "The body is too large, or holds too many pictures or values.",
    414: "The query is too long.",
    415: "Not a picture.",
    422: "A parameter is wrong.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The computation failed.",
    503: "Warming up or shutting down.",
    504: "The deadline passed before there was an answer.",
}


def _routes(app: FastAPI, models: Repository, options: Options, metrics: Metrics) -> None:
    prediction: dict[str, Any] = {"response_model": PredictionsBody, "openapi_extra": _accepts("PredictionBody")}
    drawn: dict[str, Any] = {
        "response_class": Response,
        "responses": {200: {"content": {"image/png": {}}, "description": "The map on the picture."}},
        "openapi_extra": _accepts("AttentionBody"),
    }

    @app.post("/v1/predict", tags=["v1"], **prediction)
    async def predict(request: Request, query: Annotated[AskedPrediction, Query()]) -> Response:
        """Classify one or many pictures: a raw body, a multipart form, or JSON with base64.

        Of many pictures, those that cannot be answered have an `error` and a `status` in their place; when none can,
        that is the status of the whole.
        """
        return await _predict(request, query, models.first, options)

    @app.post("/v1/models/{name}/predict", tags=["v1"], **prediction)
    async def predict_by(request: Request, name: str, query: Annotated[AskedPrediction, Query()]) -> Response:
        """The same by the model of that name."""
        return await _predict(request, query, models.find(name), options)

    @app.post("/v1/attention", tags=["v1"], **drawn)
    async def attention(request: Request, query: Annotated[AskedAttention, Query()]) -> Response:
        """Where the model looks: the attention of its class token as heat on the picture, a PNG."""
        return await _attention(request, query, models.first, options)

    @app.post("/v1/models/{name}/attention", tags=["v1"], **drawn)
    async def attention_by(request: Request, name: str, query: Annotated[AskedAttention, Query()]) -> Response:
        """The same by the model of that name."""
        return await _attention(request, query, models.find(name), options)

    @app.get("/v1/model", tags=["v1"])
    async def model() -> dict[str, Any]:
        """What is served: labels, depth, exit rule and its guarantee, and the limits for requests."""
        return {**describe(models.first.view, options), "name": models.first.name}

    @app.get("/v1/models", tags=["v1"])
    async def list_models() -> dict[str, Any]:
        """The models of this server; the first answers where none is named."""
        return {"models": [{"name": s.name, "state": s.state, "loaded": s.engine is not None} for s in models]}

    @app.get("/v1/models/{name}", tags=["v1"])
    async def model_by(name: str) -> dict[str, Any]:
        """What is served under that name."""
        return {**describe(models.find(name).view, options), "name": name}

    @app.get("/metrics", response_class=Response, tags=["operation"], responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Counts for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _predict(request: Request, query: AskedPrediction, served: Served, options: Options) -> Response:
    asked, bodies, names = await _read(request, query, PredictionBody, served, options)
    wanted, arrived = asked.options(trace=asked.trace), request.state.arrived
    served = await awake(served)
    futures = served.submit(lambda engine: engine.submit_many(bodies, wanted, names=names, arrived=arrived))
    results = await answers(request, futures)
    entries = [_entry(result, name, asked.top) for result, name in zip(results, names)]
    note(request, results)
    if all(isinstance(result, BaseException) for result in results):
        raise results[0]  # type: ignore[misc]
    return JSONResponse({"model": served.name, "request_id": request.state.request_id, "predictions": entries})


async def _attention(request: Request, query: AskedAttention, served: Served, options: Options) -> Response:
    asked, bodies, names = await _read(request, query, AttentionBody, served, options)
    if len(bodies) != 1:
        raise UsageError(f"give one picture for a map, not {len(bodies)}")
    config = served.view.model.config
    heads, full = config.architecture.heads, config.integration.steps
    if asked.head != "mean" and not 1 <= int(asked.head) <= heads:
        raise UsageError(f"head must be mean or a number from 1 to {heads}, not {asked.head}")
    wanted = asked.options(attention=True)
    if asked.step is not None:
        if asked.step > full:
            raise UsageError(f"step must lie between 0 and {full}, not {asked.step}")
        budget = max(1, asked.step)
        wanted = dataclasses.replace(wanted, states=True, adaptive=False, max_steps=budget)
    arrived = request.state.arrived
    served = await awake(served)
    engine, futures = served.submit(lambda e: (e, e.submit_many(bodies, wanted, names=names, arrived=arrived)))
    (result,) = await answers(request, futures)
    note(request, [result])
    if isinstance(result, BaseException):
        raise result
    if asked.step is not None and len(result.attention) <= asked.step:
        raise DeadlineExceeded(f"the deadline passed before step {asked.step}")
    async with in_time(request, asked.deadline_ms, "the map was drawn"):
        own = engine.model.config  # of the model that answered: it may have been replaced since
        picture = await decoded(served, _draw, own, bodies[0], result, asked, engine.limits)
    headers = {"X-Label": _header(result.prediction.label), "X-Steps": str(result.prediction.steps)}
    return Response(picture, media_type="image/png", headers=headers)


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
        "audit": None if engine.audit is None else engine.audit.describe(),
        "license": config.license,
        "limits": {
            "max_body": options.max_body,
            "max_images": options.max_images,
            "slots": engine.capacity,
            "queue": engine.queue,
            "overload": engine.overload,
            "rules": None if limits.rules is None else list(limits.rules),
            "min_threshold": limits.min_threshold,
            "max_threshold": limits.max_threshold,
            "max_steps": limits.max_steps,
            "max_pixels": limits.max_pixels,
        },
    }


async def _read(
    request: Request, query: Asked, kind: type[Any], served: Served, options: Options
) -> tuple[Any, list[bytes], list[str]]:
    """The settings and pictures of a request, whatever form it came in."""
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    given = query.model_dump(exclude_unset=True)
    names: list[str] = []
    if content == "multipart/form-data":
        (await awake(served)).submit(Engine.check_accepting)
        async with in_time(request, query.deadline_ms, "the request had arrived"):
            bodies, names, fields = await _form(request, options)
        asked = kind.model_validate({**given, **fields})
    else:
        async with in_time(request, query.deadline_ms, "the request had arrived"):
            body = await read_body(request, served)
        if content == "application/json" or content.endswith("+json"):
            asked = kind.model_validate(await aside(len(body), parse_json, body, options.max_images + SETTINGS))
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
                names.append((value.filename or f"picture {len(bodies)}")[:MAX_NAME])
    finally:
        await form.close()
    return bodies, names, fields


def _entry(result: Answer | BaseException, name: str, top: int) -> dict[str, Any]:
    if isinstance(result, Answer):
        return result.to_dict(top)
    problem = as_problem(result)
    return {"source": name, "error": problem.message, "status": problem.status}


def _draw(config: Config, body: bytes, answer: Answer, asked: AskedAttention, limits: Limits) -> bytes:
    picture = images.shown(body, config.preprocessing, PICTURE_SIDE, limits.max_pixels)
    maps = answer.attention[0 if asked.step is None else asked.step]
    heat = maps.mean if asked.head == "mean" else maps.heads[int(asked.head) - 1]
    buffer = io.BytesIO()
    pictures.overlay(picture, heat).save(buffer, "PNG")
    return buffer.getvalue()


def _header(text: str) -> str:
    return text.encode("latin-1", "replace").decode("latin-1").replace("\r", " ").replace("\n", " ")


async def _on_known(request: Request, error: Exception) -> Response:
    return error_response(request.state.request_id, as_problem(error))  # type: ignore[no-any-return]


async def _on_invalid(request: Request, error: Exception) -> Response:
    if isinstance(error, ValidationError):
        first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    else:
        assert isinstance(error, RequestValidationError)
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
