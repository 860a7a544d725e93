"""The load of `benchmark serve`: what its clients send, over HTTP, by gRPC or without a server, and what they see."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import random
import struct
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .. import bundle
from ..data import images
from ..runtime.model import Model
from ..runtime.results import Prediction
from .load import Load, generate
from .servers import BY_LITSERVE, cpu_seconds

MANY = 32  # pictures in one request, where there are many
BOUNDARY = "odevit-serve-pictures"
T = TypeVar("T")


@dataclass(frozen=True)
class Messages:
    """What the clients of a system send."""

    bodies: Sequence[bytes]
    path: str = "/v1/predict"
    kind: str = "application/octet-stream"
    headers: str = ""
    images: int = 1


def messages(system: str, model: Path, pictures: Sequence[bytes]) -> Messages:
    if system in BY_LITSERVE:
        bodies = [json.dumps({"image": base64.b64encode(picture).decode()}).encode() for picture in pictures]
        return Messages(bodies, "/predict", "application/json")
    if system == "many":
        return Messages([_form(some) for some in _several(pictures)], kind=f"multipart/form-data; boundary={BOUNDARY}",
                     images=MANY)  # fmt: skip
    if system == "tensors":
        config = bundle.read_config(model)
        values = [images.prepare(images.open_picture(picture), config.preprocessing) for picture in pictures]
        blobs = [np.stack(some).tobytes() for some in _several(values)]
        shape = [MANY, *config.preprocessing.input_size]
        given = {"name": "pixel_values", "shape": shape, "datatype": "FP32",
                 "parameters": {"binary_data_size": len(blobs[0])}}  # fmt: skip
        head = json.dumps({"inputs": [given]}).encode()
        length = f"Inference-Header-Content-Length: {len(head)}\r\n"
        path = f"/v2/models/{config.name}/infer"
        return Messages([head + blob for blob in blobs], path, headers=length, images=MANY)
    return Messages(pictures)


def _several(items: Sequence[T], count: int = 8) -> list[list[T]]:
    chance = np.random.default_rng(0)
    return [[items[i] for i in chance.integers(0, len(items), MANY).tolist()] for _ in range(count)]


def _form(pictures: Sequence[bytes]) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
    return b"".join(head + picture + b"\r\n" for picture in pictures) + f"--{BOUNDARY}--\r\n".encode()


def by_http(server: tuple[str, int], system: str, asked: Messages, clients: int, seconds: float) -> dict[str, Any]:
    address, session = server
    own = dict(vars(asked))
    at_once = clients if asked.images == 1 else max(1, clients // 16)
    before, counted = cpu_seconds(session), _audited(address, system)
    load = asyncio.run(generate(address, own.pop("bodies"), at_once, seconds, **own))
    found = {**load.summary(), "cpu_ms": _each(cpu_seconds(session) - before, load.answered)}
    return found | {name: count - counted[name] for name, count in _audited(address, system).items()}


def _audited(address: str, system: str) -> dict[str, int]:
    """Images drawn for the audit so far that were followed to full depth, and those that were dropped."""
    if system != "audited":
        return {}
    with urllib.request.urlopen(f"{address}/v1/model", timeout=30) as answer:
        audit = json.load(answer)["audit"]
    return {"audited": audit["audited"], "dropped": sum(audit["dropped"].values())}


def by_grpc(
    session: int, port: int, name: str, pictures: Sequence[bytes], clients: int, seconds: float
) -> dict[str, Any]:
    before = cpu_seconds(session)
    load = asyncio.run(_call(port, name, pictures, clients, seconds))
    return {**load.summary(), "cpu_ms": _each(cpu_seconds(session) - before, load.answered)}


async def _call(port: int, name: str, pictures: Sequence[bytes], clients: int, seconds: float) -> Load:
    """The same load as calls of `ModelInfer`."""
    import grpc

    from ..serving.grpc_messages import SERVICE, TYPES

    made = []
    for picture in pictures:
        request = TYPES["ModelInferRequest"](
            model_name=name, raw_input_contents=[struct.pack("<I", len(picture)) + picture]
        )
        request.inputs.add(name="image", datatype="BYTES", shape=[1])
        made.append(request.SerializeToString())
    load, end = Load(clients), time.monotonic() + seconds

    async def client(seed: int) -> None:
        choose = random.Random(seed)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer", None, TYPES["ModelInferResponse"].FromString)
            while time.monotonic() < end:
                began = time.monotonic()
                try:
                    answer = await call(choose.choice(made))
                except grpc.aio.AioRpcError:
                    load.lost += 1
                    continue
                load.latencies.append(time.monotonic() - began)
                at = [output.name for output in answer.outputs].index("steps")
                load.steps.append(int.from_bytes(answer.raw_output_contents[at], "little"))

    began = time.monotonic()
    await asyncio.gather(*map(client, range(clients)))
    load.seconds = time.monotonic() - began
    return load


def in_process(model: Model, pictures: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """The same pictures without a server: one after the other for one client, all the slots for more."""
    load, began, before = Load(clients), time.monotonic(), time.process_time()
    given = itertools.takewhile(lambda _: time.monotonic() < began + seconds, itertools.cycle(pictures))
    results = map(model.predict, given) if clients == 1 else model.stream(given)
    for result in results:
        if isinstance(result, Prediction):
            load.latencies.append(result.read_seconds + result.compute_seconds)
            load.steps.append(result.steps)
    load.seconds = time.monotonic() - began
    return {**load.summary(), "cpu_ms": _each(time.process_time() - before, len(load.latencies))}


def _each(seconds: float, images: int) -> float:
    return 1000 * seconds / images if images else math.nan
