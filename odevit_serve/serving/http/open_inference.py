"""The Open Inference Protocol, version 2, as KServe and Triton clients speak it, with the binary tensor extension."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from ... import __version__
from ...config import Config
from ...errors import UsageError
from ...runtime.options import RequestOptions
from ..engine import Answer
from ..repository import NoModel, Repository, Served
from .exchange import MAX_KEYS, SETTINGS, Asked, ErrorBody, answers, aside, awake, note, parse_json, read_body
from .middleware import Options, Problem

PIXELS, IMAGE = "pixel_values", "image"
HEADER = "Inference-Header-Content-Length"
VERSION = "1"
EXTENSIONS = ["binary_tensor_data"]
_LENGTH = re.compile(r"[0-9]{1,15}")


Name = Annotated[str, Field(max_length=256)]
Size = Annotated[int, Field(ge=0, le=2**31)]
Parameters = Annotated[dict[str, Any], Field(max_length=MAX_KEYS)]


class Tensor(BaseModel):
    name: Name
    shape: list[Size] = Field(min_length=1, max_length=8, fail_fast=True)
    datatype: Name
    parameters: Parameters = {}
    data: list[Any] | None = None


class Output(BaseModel):
    name: Name
    parameters: Parameters = {}


class Inference(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: Name = ""
    parameters: Parameters = {}
    inputs: list[Tensor] = Field(min_length=1, max_length=1, fail_fast=True)
    outputs: list[Output] | None = Field(None, max_length=MAX_KEYS, fail_fast=True)


def outputs_of(config: Config) -> dict[str, tuple[str, list[int], Callable[[Sequence[Answer]], np.ndarray]]]:
    """Output tensors: data type, shape of a row, and how they are made of answers.

    `unsure` is there where calibration has proven a mark: a tensor has no third value for "nothing was proven".
    """
    classes = config.architecture.classes

    def text(of: Callable[[Answer], str]) -> Callable[[Sequence[Answer]], np.ndarray]:
        return lambda given: np.array([of(a).encode() for a in given], object)

    def flag(of: Callable[[Answer], bool | None]) -> Callable[[Sequence[Answer]], np.ndarray]:
        return lambda given: np.array([bool(of(a)) for a in given], bool)

    marked = config.confidence is not None and config.confidence.unsure is not None
    return {
        "probabilities": (
            "FP32", [classes], lambda given: np.stack([a.prediction.probabilities for a in given]).astype(np.float32),
        ),
        "label": ("BYTES", [], text(lambda a: a.prediction.label)),
        "steps": ("INT32", [], lambda given: np.array([a.prediction.steps for a in given], np.int32)),
        "exit": ("BYTES", [], text(lambda a: a.prediction.exit.short)),
        "margin": (
            "FP32", [], lambda given: np.array(
                [math.nan if a.prediction.margin is None else a.prediction.margin for a in given], np.float32
            ),
        ),
        "guaranteed": ("BOOL", [], flag(lambda a: a.prediction.guaranteed)),
        **({"unsure": ("BOOL", [], flag(lambda a: a.prediction.unsure))} if marked else {}),
    }  # fmt: skip


def described(name: str, config: Config) -> dict[str, Any]:
    """Inputs and outputs of a model."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "odevit_serve",
        "inputs": [
            {"name": PIXELS, "datatype": "FP32", "shape": [-1, *config.preprocessing.input_size]},
            {"name": IMAGE, "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": key, "datatype": kind, "shape": [-1, *shape]}
            for key, (kind, shape, _) in outputs_of(config).items()
        ],
    }


def find(models: Repository, name: str, version: str = VERSION) -> Served:
    served = models.find(name)
    if version not in (VERSION, ""):
        raise NoModel(f"no version {version[:80]!r} of model {name!r}: this server has {VERSION!r}")
    return served


def router(models: Repository, options: Options) -> APIRouter:
    routes = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"])
    missing = {404: {"model": ErrorBody, "description": "No such model."}}
    extensions = [*EXTENSIONS, *([] if models.folder is None else ["model_repository"])]

    def health(good: bool, reason: str) -> dict[str, bool]:
        if not good:
            raise Problem(503, reason, {"Retry-After": "1"})
        return {}

    @routes.get("")
    async def server() -> dict[str, Any]:
        """The server."""
        return {"name": "odevit-serve", "version": __version__, "extensions": extensions}

    @routes.get("/health/live")
    async def live() -> dict[str, Any]:
        """Whether the process works at all."""
        return {**health(models.alive, "the engine has stopped"), "live": True}

    @routes.get("/health/ready")
    async def ready() -> dict[str, Any]:
        """Whether requests are accepted: after warm-up and before shutdown."""
        return {**health(models.ready, f"the server is {models.state}"), "ready": True}

    @routes.get("/models/{name}", responses=missing)  # type: ignore[arg-type]
    @routes.get("/models/{name}/versions/{version}", responses=missing)  # type: ignore[arg-type]
    async def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        """Inputs and outputs of the model. Give one of the two inputs."""
        return described(name, find(models, name, version).view.model.config)

    @routes.get("/models/{name}/ready", responses=missing)  # type: ignore[arg-type]
    @routes.get("/models/{name}/versions/{version}/ready", responses=missing)  # type: ignore[arg-type]
    async def model_ready(name: str, version: str = VERSION) -> dict[str, Any]:
        """Whether the model accepts requests."""
        served = find(models, name, version)
        return {**health(served.ready, f"the model is {served.view.state}"), "name": name, "ready": True}

    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema()}}}}

    @routes.post("/models/{name}/infer", responses=missing, openapi_extra=body)  # type: ignore[arg-type]
    @routes.post("/models/{name}/versions/{version}/infer", responses=missing, openapi_extra=body)  # type: ignore[arg-type]
    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        """Classify: `image` (encoded pictures; base64 in JSON) or `pixel_values` (prepared already)."""
        served = find(models, name, version)
        if request.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise Problem(415, "compressed bodies are not supported")
        raw = await read_body(request, served)
        config = served.view.model.config
        tensors = outputs_of(config)
        values = options.max_images * math.prod(config.preprocessing.input_size) + SETTINGS  # in JSON
        asked, blobs = await aside(len(raw), parse, raw, request.headers.get(HEADER), values)
        wanted = _wanted(asked, list(tensors))
        given = {k: v for k, v in asked.parameters.items() if k != "binary_data_output"}
        own, arrived = Asked.model_validate(given).options(), request.state.arrived
        rows = asked.inputs[0].shape[0]
        if rows == 0:
            raise UsageError("no picture in the request")
        if rows > options.max_images:
            raise Problem(413, f"{rows} pictures in one request, {options.max_images} are allowed")
        images = await aside(len(raw), tensor, asked.inputs[0], blobs)
        futures = submit(await awake(served), asked.inputs[0].name, images, own, arrived)
        results = await answers(request, futures)
        note(request, results)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        made = {key: (tensors[key][0], tensors[key][2](results)) for key in wanted}  # type: ignore[arg-type]
        lowered = [a.lowered_to for a in results if isinstance(a, Answer)]
        head = {"model_name": name, "model_version": VERSION, "id": asked.id or request.state.request_id}
        if any(value is not None for value in lowered):
            head["parameters"] = {"depth_lowered_to": min(v for v in lowered if v is not None)}
        return respond(head, made, wanted)

    return routes


def submit(served: Served, kind: str, values: Any, own: RequestOptions, arrived: float) -> list[Future[Answer]]:
    """Hand the values of an input to the engine: encoded pictures, or pixels."""
    if kind == PIXELS:
        return served.submit(lambda engine: engine.submit_pixels(values, own, arrived=arrived))
    names = [f"picture {i + 1}" for i in range(len(values))]
    return served.submit(lambda engine: engine.submit_many(values, own, names=names, arrived=arrived))


def parse(raw: bytes, length: str | None, values: int) -> tuple[Inference, bytes]:
    """The JSON head of a body and the tensors that follow it."""
    if length is None:
        return Inference.model_validate(parse_json(raw, values)), b""
    if not _LENGTH.fullmatch(length) or not 0 < int(length) <= len(raw):
        raise UsageError(f"{HEADER} must be between 1 and the {len(raw)} bytes of the body, not {length[:40]!r}")
    return Inference.model_validate(parse_json(raw[: int(length)], values)), raw[int(length) :]


def tensor(given: Tensor, blob: bytes) -> Any:
    """The pixels [B,3,H,W], or the encoded pictures, of an input."""
    expected = {PIXELS: "FP32", IMAGE: "BYTES"}.get(given.name)
    if expected is None:
        raise UsageError(f"unknown input {given.name!r}: give {PIXELS} or {IMAGE}")
    if given.datatype != expected:
        raise UsageError(f"{given.name} must be of datatype {expected}, not {given.datatype!r}")
    count = math.prod(given.shape)
    size = given.parameters.get("binary_data_size")
    if size is not None:
        if given.data is not None:
            raise UsageError(f"{given.name} has both data and binary_data_size")
        if not isinstance(size, int) or size != len(blob):
            raise UsageError(f"{given.name}: binary_data_size is not the {len(blob)} bytes that follow")
        values = _strings(blob, count) if given.name == IMAGE else _floats(blob)
    elif given.data is None:
        raise UsageError(f"{given.name} has neither data nor binary_data_size")
    else:
        values = _from_json(given)
    if len(values) != count:
        raise UsageError(f"{given.name} has {len(values)} values, its shape {given.shape} says {count}")
    return values.reshape(given.shape) if isinstance(values, np.ndarray) else values


def _floats(blob: bytes) -> np.ndarray:
    if len(blob) % 4:
        raise UsageError(f"{len(blob)} bytes are no whole number of FP32 values")
    return np.frombuffer(blob, "<f4").astype(np.float32)


def _from_json(given: Tensor) -> Any:
    try:
        if given.name == PIXELS:
            return np.asarray(given.data, np.float32).reshape(-1)
        texts = np.asarray(given.data, object).reshape(-1).tolist()
        return [base64.b64decode(text, validate=True) for text in texts]
    except (TypeError, ValueError, OverflowError, binascii.Error):
        kind = "numbers" if given.name == PIXELS else "base64 text"
        raise UsageError(f"the data of {given.name} must be {kind}") from None


def _strings(blob: bytes, count: int) -> list[bytes]:
    """Elements with their lengths before them, four bytes each; of those that are too many, one."""
    values: list[bytes] = []
    at = 0
    while at < len(blob) and len(values) <= count:
        if at + 4 > len(blob):
            raise UsageError("a BYTES tensor ends inside a length")
        (length,) = struct.unpack_from("<I", blob, at)
        at += 4
        if at + length > len(blob):
            raise UsageError(f"a BYTES element of {length} bytes ends past the tensor")
        values.append(blob[at : at + length])
        at += length
    return values


def _wanted(asked: Inference, known: list[str]) -> dict[str, bool]:
    """The outputs asked for, and whether each is to be binary."""
    default = asked.parameters.get("binary_data_output", False) is True
    if not asked.outputs:
        return dict.fromkeys(known, default)
    wanted = {}
    for output in asked.outputs:
        if output.name not in known:
            raise UsageError(f"unknown output {output.name!r}: choose of {', '.join(known)}")
        if output.parameters.get("classification"):
            raise UsageError("the classification extension is not supported: ask for probabilities")
        wanted[output.name] = output.parameters.get("binary_data", default) is True
    return wanted


def packed(kind: str, values: Sequence[bytes] | np.ndarray) -> bytes:
    """A tensor in its binary form."""
    if isinstance(values, np.ndarray) and kind != "BYTES":
        return values.tobytes()
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def respond(head: dict[str, Any], made: dict[str, tuple[str, np.ndarray]], binary: dict[str, bool]) -> Response:
    described, blobs = [], []
    for name, (kind, values) in made.items():
        entry: dict[str, Any] = {"name": name, "datatype": kind, "shape": list(values.shape)}
        if binary[name]:
            blob = packed(kind, values)
            entry["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        elif kind == "BYTES":
            entry["data"] = [value.decode() for value in values]
        else:
            entry["data"] = [v if math.isfinite(v) else None for v in values.reshape(-1).tolist()]
        described.append(entry)
    answer = {**head, "outputs": described}
    if not blobs:
        return JSONResponse(answer)
    text = json.dumps(answer).encode()
    return Response(text + b"".join(blobs), media_type="application/octet-stream", headers={HEADER: str(len(text))})


def _schema() -> dict[str, Any]:
    """For OpenAPI, with what `tensor` checks beyond the types."""
    schema = Inference.model_json_schema()
    definitions = schema.pop("$defs")
    definitions["Tensor"]["properties"]["name"]["enum"] = [PIXELS, IMAGE]
    definitions["Tensor"]["properties"]["datatype"]["enum"] = ["FP32", "BYTES"]
    schema["properties"]["inputs"]["items"] = definitions["Tensor"]
    schema["properties"]["outputs"] = {"type": "array", "items": definitions["Output"], "maxItems": MAX_KEYS}
    schema["properties"]["parameters"] = {**Asked.model_json_schema(), "title": "Parameters"}
    schema["properties"]["parameters"]["properties"]["binary_data_output"] = {"type": "boolean"}
    return schema
