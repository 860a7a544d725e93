"""The Open Inference Protocol over gRPC: health, metadata, inference, and the repository where that is allowed.

On the event loop of the HTTP server and with the same engines. The deadline of a call becomes that of its images, and
a call that its client cancels gives its slots to others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
from pydantic import ValidationError

from .. import __version__
from ..errors import UsageError, UserError
from .grpc_messages import SERVICE, TYPES
from .http import open_inference as protocol
from .http.exchange import Asked, as_problem, awake
from .http.middleware import Options, Problem, authorised
from .repository import NoModel, Repository, Served
from .requests import Answer

log = logging.getLogger("odevit_serve.grpc")
OPEN = ("ServerLive", "ServerReady")  # probes carry no key
SHARE = 0.9  # of the time that a call has left is for its images, the rest to send the best answer so far
CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED, 404: grpc.StatusCode.NOT_FOUND, 409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED, 415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT, 429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
Count = Callable[[str, int, float], None]


async def start(models: Repository, options: Options, count: Count) -> tuple[Any, int]:
    """A server that listens, and its port."""
    size = [(f"grpc.max_{way}_message_length", options.max_body) for way in ("receive", "send")]
    server = grpc.aio.server(options=size)
    service = Service(models, options, count)
    handlers = {name: service.handler(name) for name in service.methods()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    assert options.grpc is not None
    try:
        port = server.add_insecure_port(options.grpc)
    except RuntimeError:
        port = 0
    if not port:
        raise UserError(f"cannot listen on {options.grpc} for gRPC: try another --grpc-port")
    await server.start()
    log.info("serving gRPC", extra={"fields": {"port": port}})
    return server, port


class Service:
    """Every method takes its request and gives its response; errors are those of HTTP."""

    def __init__(self, models: Repository, options: Options, count: Count):
        self.models, self.options, self.count = models, options, count
        self.key = options.api_key.encode() if options.api_key else b""

    def methods(self) -> list[str]:
        repository = ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"]
        own = ["ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"]
        return [*own, *(repository if self.models.folder is not None else [])]

    def handler(self, name: str) -> Any:
        method: Callable[[Any, Any], Awaitable[Any]] = getattr(self, name)

        async def call(request: Any, context: Any) -> Any:
            began, problem = time.monotonic(), None
            try:
                if self.key and name not in OPEN and not authorised(dict(context.invocation_metadata()), self.key):
                    raise Problem(401, "a valid API key is needed: authorization: Bearer KEY")
                return await method(request, context)
            except (Problem, UserError) as error:
                problem = as_problem(error)
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False, include_input=False)[0]
                problem = Problem(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            except asyncio.CancelledError:
                problem = Problem(499, "cancelled")
                raise
            except Exception:
                log.exception("a call failed")
                problem = Problem(500, "the server failed")
            finally:
                self.count(f"grpc {name}", problem.status if problem else 200, time.monotonic() - began)
            await context.abort(CODES.get(problem.status, grpc.StatusCode.INTERNAL), problem.message)

        request, response = TYPES[f"{name}Request"], TYPES[f"{name}Response"]
        return grpc.unary_unary_rpc_method_handler(call, request.FromString, response.SerializeToString)

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return TYPES["ServerLiveResponse"](live=self.models.alive)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return TYPES["ServerReadyResponse"](ready=self.models.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return TYPES["ModelReadyResponse"](ready=self._find(request.name, request.version).ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        extensions = [] if self.models.folder is None else ["model_repository"]
        return TYPES["ServerMetadataResponse"](name="odevit-serve", version=__version__, extensions=extensions)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        config = self._find(request.name, request.version).view.model.config
        return TYPES["ModelMetadataResponse"](**protocol.described(request.name, config))

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        arrived = time.monotonic()
        served = await awake(self._find(request.model_name, request.model_version))
        tensors = protocol.outputs_of(served.view.model.config)
        wanted = [output.name for output in request.outputs] or list(tensors)
        for name in wanted:
            if name not in tensors:
                raise UsageError(f"unknown output {name[:80]!r}: choose of {', '.join(tensors)}")
        given, values = _input(request, self.options.max_images)
        asked = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in request.parameters.items()}
        left = context.time_remaining()
        if left is not None and "deadline_ms" not in asked and left < 86_400:
            asked["deadline_ms"] = max(0.001, 1000 * SHARE * left)
        futures = protocol.submit(served, given, values, Asked.model_validate(asked).options(), arrived)
        results = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return _response(request, wanted, tensors, results)  # type: ignore[arg-type]

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        rows = await asyncio.to_thread(self.models.index)
        chosen = [dict(row) for row in rows if not request.ready or row["state"] == "READY"]
        return TYPES["RepositoryIndexResponse"](models=chosen)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        if request.parameters:
            raise UsageError("parameters of a load are not supported: a model is what its folder holds")
        await self._change(self.models.load, request.model_name)
        return TYPES["RepositoryModelLoadResponse"]()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        await self._change(self.models.unload, request.model_name)
        return TYPES["RepositoryModelUnloadResponse"]()

    async def _change(self, change: Callable[[str], None], name: str) -> None:
        try:
            await asyncio.to_thread(change, name)
        except NoModel:
            raise
        except UserError as error:
            raise Problem(409, str(error)) from None

    def _find(self, name: str, version: str) -> Served:
        return protocol.find(self.models, name, version)


def _input(request: Any, most: int) -> tuple[str, Any]:
    """The name and the values of the one input."""
    if len(request.inputs) != 1:
        raise UsageError(f"give one input, not {len(request.inputs)}")
    own = request.inputs[0]
    shape = list(own.shape)
    if not shape or min(shape) < 0 or len(shape) > 8:
        raise UsageError(f"{own.name[:80]} has the shape {shape[:8]}")
    if shape[0] == 0:
        raise UsageError("no picture in the request")
    if shape[0] > most:
        raise Problem(413, f"{shape[0]} pictures in one request, {most} are allowed")
    if request.raw_input_contents:
        blob = b"".join(request.raw_input_contents)
    elif own.datatype == "BYTES":
        blob = protocol.packed("BYTES", own.contents.bytes_contents)
    else:
        blob = np.asarray(own.contents.fp32_contents, "<f4").tobytes()
    size = {"binary_data_size": len(blob)}
    given = protocol.Tensor(name=own.name[:256], shape=shape, datatype=own.datatype[:256], parameters=size)
    return own.name, protocol.tensor(given, blob)


def _response(request: Any, wanted: list[str], tensors: dict[str, Any], results: Sequence[Answer]) -> Any:
    made = {name: (tensors[name][0], tensors[name][2](results)) for name in wanted}
    answer = TYPES["ModelInferResponse"](
        model_name=request.model_name,
        model_version=protocol.VERSION,
        id=request.id,
        outputs=[{"name": n, "datatype": kind, "shape": list(v.shape)} for n, (kind, v) in made.items()],
        raw_output_contents=[protocol.packed(kind, values) for kind, values in made.values()],
    )
    lowered = [a.lowered_to for a in results if a.lowered_to is not None]
    if lowered:
        answer.parameters["depth_lowered_to"].int64_param = min(lowered)
    return answer
