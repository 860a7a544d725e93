"""What an export must pass before a file is left behind. Each check either adds a line to the report or raises."""

from __future__ import annotations

import getpass
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message

from .. import solvers
from ..bundle import METADATA_KEY
from ..config import Config
from ..errors import UserError
from ..runtime.graph_builder import every_graph
from ..runtime.graphs import Parts
from ..runtime.sessions import open_session

BATCHES = (1, 3, 8)
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-2, "int8": float("inf")}  # int8 answers to agreement on images instead
NODE_BYTES = 6_000  # names and shapes of one evaluation of psi, generously
FIXED_BYTES = 48_000  # the rest of the graph: rules, tables, bookkeeping
Array = np.ndarray[Any, Any]
Runner = Callable[[Array], Mapping[str, Array]]


@dataclass(frozen=True)
class Check:
    """One thing that was checked: the number found and the number allowed."""

    name: str
    found: float | str
    allowed: float | str

    def __str__(self) -> str:
        return f"{self.name} {_short(self.found)} (allowed {_short(self.allowed)})"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}" if isinstance(value, float) else f"{value:,}"


class CheckFailed(UserError):
    """An export that is not the model it was made from, or not fit to be given away."""


def expect(name: str, good: bool, found: float | str, allowed: float | str, hint: str = "") -> Check:
    check = Check(name, found, allowed)
    if not good:
        raise CheckFailed(f"check failed, nothing was written: {check}{': ' + hint if hint else ''}")
    return check


def structure(model: onnx.ModelProto, opset: int) -> list[Check]:
    """The ONNX checker, and the opset as it stands in the file."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckFailed(f"check failed, nothing was written: the ONNX checker says {reason}") from None
    found = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    return [Check("ONNX checker", "valid", "valid"), expect("opset", found == opset, found, opset)]


def size(found: int, parts: Parts, config: Config, evaluations: int) -> Check:
    """File size against that of the parts' weights: nothing missing, nothing stored twice."""
    metadata = 3 * len(config.to_json().encode())
    return _bytes("bytes", found, parts, NODE_BYTES * (1 + evaluations) + FIXED_BYTES + metadata)


def weights(found: int, parts: Parts) -> Check:
    """The same of a file that holds weights alone."""
    return _bytes("bytes of weights", found, parts, FIXED_BYTES)


def _bytes(name: str, found: int, parts: Parts, beside: int) -> Check:
    pieces = (parts.begin, parts.attention, parts.mlp, parts.answer)
    kept = {id(t): t.ByteSize() for piece in pieces for t in piece.weights.values()}
    more = {id(t): t.ByteSize() for piece in (parts.readings, parts.maps) for t in piece.weights.values()}
    least, most = int(0.9 * sum(kept.values())), int(1.05 * sum((kept | more).values()) + beside)
    return expect(name, least <= found <= most, found, f"{least:,} to {most:,}")


def evaluations(config: Config, steps: int) -> int:
    """Evaluations of F and G, halved, that the graph spells out for so many steps."""
    own = config.integration
    return steps * max(solvers.evaluations(own.solver, own.splitting))


def privacy(model: onnx.ModelProto, more: Iterable[str] = ()) -> Check:
    """No path of this machine, user name or stack trace in any text of the file, or in what else was made of it."""
    labels, user = _labels(model), _user()
    places = {place for place in (os.getcwd(), str(Path.home()), sys.prefix) if len(place) > 1}
    name = re.compile(rf"(?<![\w-]){re.escape(user)}(?![\w-])") if user and user not in labels else None
    for text in {*texts(model), *more}:
        for what, found in _private(text, places, name):
            raise CheckFailed(f"check failed, nothing was written: the file would hold a {what}: {found[:80]!r}")
    return Check("private text", "none", "none")


def texts(message: Message) -> Iterator[str]:
    """Every string in a protobuf message, weights left out."""
    for field, value in message.ListFields():
        if field.name in ("raw_data", "dims", "float_data", "int64_data", "int32_data", "double_data"):
            continue
        for item in value if field.is_repeated else [value]:
            if isinstance(item, Message):
                yield from texts(item)
            elif isinstance(item, str):
                yield item
            elif isinstance(item, bytes):
                yield item.decode("utf-8", "replace")


TRACE = re.compile(r"Traceback \(most recent|File \"[^\"]+\", line \d+|\.pyc?[:\"'(]|site-packages")
PATH = re.compile(
    r"(?<![\w.:/])/(?:home|Users|root|tmp|var|usr|opt|mnt|etc|srv|data|work|workspace)/[\w.-]+|\b[A-Za-z]:\\\w+"
)


def _private(text: str, places: set[str], user: re.Pattern[str] | None) -> Iterator[tuple[str, str]]:
    for what, pattern in (("stack trace", TRACE), ("local path", PATH)):
        if match := pattern.search(text):
            yield what, match.group()
    for place in places:
        if place in text:
            yield "local path", place
    if user is not None and (match := user.search(text)):
        yield "user name", match.group()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def _labels(model: onnx.ModelProto) -> set[str]:
    """Words that the model itself says and that a user may happen to be called."""
    props = {entry.key: entry.value for entry in model.metadata_props}
    words = set(props)
    if METADATA_KEY in props:
        config = Config.from_json(props[METADATA_KEY])
        words |= {word for text in (*config.labels, config.name) for word in re.findall(r"[\w-]+", text)}
    return words | {node.op_type for graph in every_graph(model.graph) for node in graph.node}


def load(path: Path) -> tuple[Any, float]:
    """An onnxruntime session of the file, and the seconds it took to open."""
    began = time.perf_counter()
    try:
        session = open_session(path)
    except UserError as error:
        raise CheckFailed(f"check failed, nothing was written: {str(error).replace(str(path), 'the file')}") from None
    return session, time.perf_counter() - began


def values(
    expected: Runner, found: Runner, images: Callable[[int], Array], precision: str, reference: str
) -> list[Check]:
    """Largest difference of every output from the reference, at each batch size; in proportion for those above 1."""
    worst: dict[str, tuple[float, float, int]] = {}
    for batch in BATCHES:
        pixels = images(batch)
        right, ours = expected(pixels), found(pixels)
        for name, value in right.items():
            if ours[name].shape != value.shape:
                expect(f"shape of {name}", False, str(list(ours[name].shape)), str(list(value.shape)))
            if not np.isfinite(ours[name]).all():
                expect(f"{name} at batch {batch}", False, "not finite", "finite")
            error = float(np.abs(ours[name] - value).max())
            scale = max(1.0, float(np.abs(value).max()))
            if error / scale >= worst.get(name, (-1.0, 1.0, 0))[0]:
                worst[name] = (error / scale, scale, batch)
    checks = []
    for name, (error, scale, batch) in worst.items():
        tolerance = TOLERANCE[precision]
        checks.append(
            expect(
                f"{name} against {reference}, off by",
                error <= tolerance,
                error * scale,
                tolerance * scale,
                f"batch {batch}",
            )
        )
    return checks


def depths(reference: Mapping[str, Array], found: Mapping[str, Array], batch: int) -> Check:
    """Class and number of steps of each image, where rounding could not have decided otherwise."""
    sure = reference["sure"]
    wrong = sure & (
        (reference["steps"] != found["steps"])
        | (reference["exit_reason"] != found["exit_reason"])
        | (reference["logits"].argmax(-1) != found["logits"].argmax(-1))
    )
    return expect(
        f"images at batch {batch} that end differently from the runtime's rule", not wrong.any(), int(wrong.sum()), 0
    )
