"""A bundle's graphs put together anew: by another solver, for any number of steps.

Everything that is exported, and every step by another solver than the bundle's own, is an arrangement of copies of what
lies in `stem.onnx` and `step.onnx`. The step graph names the values between its pieces (`NAMED`), so that `Parts` finds
them again.

This module and the two it is built on (`graph_builder`, `graph_files`) are the ones of the runtime that need the `onnx`
package. They are imported only where a graph is to be made or a file's metadata read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from .. import bundle, solvers, step_size
from ..bundle import ESTIMATE_INPUTS, ESTIMATE_OUTPUTS, STEP_OUTPUTS
from ..config import Config, Integration
from ..errors import UserError
from .graph_builder import Builder, Piece, Shape, Value, cut
from .graph_files import found_digest, properties, read, write_metadata

# Values of a step graph: what G and F give, G's maps, and the velocity. `evaluated` in the metadata says of what state.
NAMED = ("attention", "mlp", "maps", "velocity")


class Parts:
    """The pieces of a bundle, from its own `stem.onnx` and `step.onnx`."""

    def __init__(self, stem: onnx.ModelProto, step: onnx.ModelProto, config: Config, folder: Path = Path()):
        self.config = config
        own = config.integration
        found = properties(step)
        try:
            evaluated: dict[str, str] = json.loads(found["evaluated"])
            made = {name for node in stem.graph.node for name in node.output}
            self.begin = cut(stem, ["pixel_values"], ["tokens" if "tokens" in made else "state"])
            self.attention = cut(step, [evaluated["attention"]], ["attention", "maps"])
            self.mlp = cut(step, [evaluated["mlp"]], ["mlp"])
            self.maps = cut(step, [evaluated["attention"]], ["maps"])
            self.answer = cut(step, [evaluated["next"]], ["logits"])
            reads = [evaluated["point"], evaluated["next"], "logits"]
            self.readings = cut(step, reads, ["margin", "gain", "exponent"])
            self.speeds = cut(step, ["velocity"], ["speed", "cls_speed"])
        except (KeyError, ValueError, UserError):
            raise UserError(
                f"{folder / bundle.STEP} does not name its pieces, as one of an older version: {bundle.remake(folder)}"
            ) from None
        self.digests = {"stem": found_digest(stem), "step": found_digest(step)}
        self.weights_digest = found.get("weights", "")
        self.precision = found.get("precision", "fp32")
        self.own = own

    @classmethod
    def of(cls, folder: Path, config: Config) -> Parts:
        return cls(read(folder / bundle.STEM), read(folder / bundle.STEP), config, folder)

    def fields(self, builder: Builder, named: bool = False) -> tuple[Callable[[Value], Value], ...]:
        """G and F as functions of values; `named`: what the first evaluation of each gives keeps its name."""
        names = dict.fromkeys(("attention", "mlp"), named)

        def field(key: str, piece: Piece) -> Callable[[Value], Value]:
            def evaluate(x: Value) -> Value:
                first = names.pop(key, False)
                if first:
                    self.seen[key] = x.name
                return builder.place(piece, x, outputs=piece.outputs if first else ())[0]

            return evaluate

        self.seen: dict[str, str] = {}
        return field("attention", self.attention), field("mlp", self.mlp)

    @property
    def token_shape(self) -> tuple[int, int]:
        shape = self.config.architecture
        return shape.tokens, shape.width

    def rows(self, own: Integration) -> int:
        """Rows of a state: its tokens, and below them what the solver remembers.

        Where that is nothing, an error estimate needs one row more: the velocity of CLS one step earlier.
        """
        memories = solvers.memories(own.solver, own.splitting)
        return (1 + memories) * self.config.architecture.tokens + (own.tolerance > 0 and not memories)


def stem_graph(parts: Parts, own: Integration) -> onnx.ModelProto:
    """Pixels to the state that a solver starts with: zeros where it remembers nothing yet."""
    builder = Builder()
    pixels = builder.input("pixel_values", ["batch", *parts.config.preprocessing.input_size])
    rows, (tokens, width) = parts.rows(own), parts.token_shape
    x = builder.place(parts.begin, pixels, outputs=["tokens"] if rows > tokens else ())[0]
    nothing = [x * 0.0] * (rows // tokens - 1)
    if rows % tokens:
        nothing.append(_row(builder, x) * 0.0)
    state = join(builder, [x, *nothing], rows, width)
    return builder.model({"state": state}, {"state": ["batch", rows, width]})


def join(builder: Builder, values: Sequence[Value], rows: int, width: int) -> Value:
    if len(values) == 1:
        return values[0]
    return builder.node("Concat", *values, axis=1, shape=[builder.batch, rows, width])[0]


def advance(
    parts: Parts, builder: Builder, own: Integration, state: Value, h: Any, named: bool = False
) -> tuple[Value, Value, Value, Value]:
    """One step of any solver: the point it starts from, the next, the next state with its memory, and the velocity."""
    tokens, width = parts.token_shape
    rows = parts.rows(own)
    count = rows // tokens - 1
    point, memory, known = state, list[Value](), 1.0
    if count:
        sizes = builder.constant(np.full(1 + count, tokens, np.int64))
        point, *memory = builder.node(
            "Split", state, sizes, axis=1, count=1 + count, shape=[builder.batch, tokens, width]
        )
        known = _is_known(builder, memory[0])  # type: ignore[assignment]
    fields = parts.fields(builder, named)
    x, velocity, kept = solvers.advance(fields, point, h, memory, own.solver, own.splitting, known)  # type: ignore[arg-type]
    return point, x, join(builder, [x, *kept], rows, width), velocity


class GraphOps:
    """The functions of numpy that `step_size` calls, on values of a graph."""

    def __init__(self, builder: Builder):
        self.builder = builder

    def _node(self, op: str, *values: Any) -> Value:
        found = [v if isinstance(v, Value) else self.builder.constant(np.float32(v)) for v in values]
        return self.builder.node(op, *found, shape=found[0].shape)[0]

    def sqrt(self, x: Value) -> Value:
        return self._node("Sqrt", x)

    def floor(self, x: Value) -> Value:
        return self._node("Floor", x)

    def sign(self, x: Value) -> Value:
        return self._node("Sign", x)

    def maximum(self, x: Value, y: Any) -> Value:
        return self._node("Max", x, y)

    def minimum(self, x: Value, y: Any) -> Value:
        return self._node("Min", x, y)


def _row(builder: Builder, state: Value, first: int = 0) -> Value:
    """One row [B,1,D] of a state."""
    edges = (builder.constant(np.array([edge], np.int64)) for edge in (first, first + 1, 1))
    assert state.shape is not None
    return builder.node("Slice", state, *edges, shape=[builder.batch, 1, state.shape[-1]])[0]


def _column(builder: Builder, numbers: Value) -> Value:
    """Numbers of images [B] as [B,1,1]."""
    return builder.node(
        "Unsqueeze", numbers, builder.constant(np.array([1, 2], np.int64)), shape=[builder.batch, 1, 1]
    )[0]


class Estimated(NamedTuple):
    """A step of a size of its own choice."""

    point: Value
    x: Value
    after: Value  # the next state with its memory
    velocity: Value
    taken: Value  # [B]: its size
    change: Value  # [B]: of CLS's velocity since the step before


def advance_by_estimate(
    parts: Parts, builder: Builder, own: Integration, state: Value, numbers: Mapping[str, Value]
) -> Estimated:
    """One step of a solver whose size `step_size.choose` finds; the estimate is that of CLS, which has the answer."""
    tokens, width = parts.token_shape
    rows, ops = parts.rows(own), GraphOps(builder)
    sizes = builder.constant(np.array([tokens, rows - tokens], np.int64))
    point, memory = builder.node("Split", state, sizes, axis=1, count=2, shape=[builder.batch, tokens, width])
    memory.shape = [builder.batch, rows - tokens, width]
    builder.shapes.pop(memory.name)
    velocity = sum_of(parts.fields(builder, named=True), point)
    turn = _row(builder, velocity) - _row(builder, memory)
    axes = builder.constant(np.array([1, 2], np.int64))
    square = builder.node("ReduceSum", turn * turn, axes, keepdims=0, shape=[builder.batch])[0]
    change, before = ops.sqrt(square), numbers["before"]
    taken = step_size.choose(change, before, numbers["tolerance"], numbers["step_size"], numbers["left"], ops)
    ratio = ops.sign(before) * (taken / ops.maximum(before, step_size.TINY))  # 0 at the first step
    remembered = solvers.Memory(memory, _column(builder, ratio))
    x, _, kept = solvers.SOLVERS[own.solver].step(lambda _: velocity, point, _column(builder, taken), remembered)
    after = join(builder, [x, *(kept or [_row(builder, velocity)])], rows, width)
    return Estimated(point, x, after, velocity, taken, change)


def sum_of(fields: tuple[Callable[[Value], Value], ...], x: Value) -> Value:
    return fields[0](x) + fields[1](x)


def _is_known(builder: Builder, memory: Value) -> Value:
    """1 for images whose solver remembers a velocity; one of exact zeros means that there is none yet."""
    axes = builder.constant(np.array([1, 2], np.int64))
    largest = builder.node("ReduceMax", builder.node("Abs", memory, shape=memory.shape)[0], axes, keepdims=1)[0]
    some = builder.node("Greater", largest, builder.constant(np.float32(0)))[0]
    return builder.node("Cast", some, to=onnx.TensorProto.FLOAT, shape=[builder.batch, 1, 1])[0]


def step_graph(parts: Parts, own: Integration) -> onnx.ModelProto:
    """`step.onnx` for a solver and splitting: one step of a size of its own for each image, and what rules read."""
    builder = Builder()
    rows, width = parts.rows(own), parts.config.architecture.width
    state = builder.input("state", ["batch", rows, width])
    size = builder.input("step_size", ["batch"])
    more: dict[str, Value] = {}
    if own.tolerance:
        numbers = {"step_size": size} | {name: builder.input(name, ["batch"]) for name in ESTIMATE_INPUTS}
        point, x, after, velocity, *estimate = advance_by_estimate(parts, builder, own, state, numbers)
        more = dict(zip(ESTIMATE_OUTPUTS, estimate))
    else:
        point, x, after, velocity = advance(parts, builder, own, state, _column(builder, size), named=True)
    logits = builder.place(parts.answer, x)[0]
    margin, gain, exponent = builder.place(parts.readings, point, x, logits)
    named = builder.rename(velocity, "velocity") if velocity.name != "velocity" else velocity
    speed, cls_speed = builder.place(parts.speeds, named)
    evaluated = {**parts.seen, "point": point.name, "next": x.name}
    outputs = dict(zip(STEP_OUTPUTS, (after, logits, margin, gain, exponent, speed, cls_speed))) | more
    renamed = {value.name: name for name, value in outputs.items()}
    shapes = step_shapes(parts.config, rows)
    model = builder.model(outputs, shapes)
    model.metadata_props.add(
        key="evaluated", value=json.dumps({key: renamed.get(name, name) for key, name in evaluated.items()})
    )
    return model


def step_shapes(config: Config, rows: int) -> dict[str, Shape]:
    shape = config.architecture
    wide: dict[str, Shape] = {"next_state": ["batch", rows, shape.width], "logits": ["batch", shape.classes]}
    return {name: wide.get(name, ["batch"]) for name in (*STEP_OUTPUTS, *ESTIMATE_OUTPUTS)}


def unrolled_graph(parts: Parts, own: Integration, with_attention: bool = False) -> onnx.ModelProto:
    """A fixed number of steps, one after the other, all reading the same weights."""
    builder, shape = Builder(), parts.config.architecture
    x = builder.place(parts.begin, builder.input("pixel_values", ["batch", *parts.config.preprocessing.input_size]))[0]
    memory: list[Value] = []
    for _ in range(own.steps):
        fields = parts.fields(builder)
        x, _, memory = solvers.advance(fields, x, own.step_size, memory, own.solver, own.splitting)  # type: ignore[arg-type]
    outputs = {"logits": builder.place(parts.answer, x)[0]}
    shapes: dict[str, Shape] = {"logits": ["batch", shape.classes]}
    if with_attention:
        maps = builder.place(parts.maps, x)[0]  # [B,H,S,S]
        bounds = [np.array(edge, np.int64) for edge in ([0, 1], [1, 1 + shape.patches], [2, 3])]
        row = builder.node("Slice", maps, *(builder.constant(edge) for edge in bounds))[0]
        outputs["cls_attention"] = builder.node("Squeeze", row, builder.constant(np.array([2], np.int64)))[0]
        shapes["cls_attention"] = ["batch", shape.heads, shape.patches]
    return builder.model(outputs, shapes)


def rearrange(folder: Path, config: Config, wanted: Integration, target: Path) -> None:
    """The weights and graphs of a bundle in another folder, its stem and step put together for other integration."""
    parts = Parts.of(folder, config)
    precision = properties(read(folder / bundle.STEP)).get("precision", "fp32")
    graphs = {bundle.STEM: stem_graph(parts, wanted), bundle.STEP: step_graph(parts, wanted)}
    for name in (bundle.WEIGHTS, bundle.ATTENTION):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    for name, graph in graphs.items():
        plain = {"format": "parts", "part": name.removesuffix(".onnx"), "precision": precision}
        write_metadata(graph, config.replace(integration=wanted), **plain, weights=parts.weights_digest)
        onnx.save(graph, target / name)
