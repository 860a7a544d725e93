"""A bundle's graphs, cut into pieces and put together anew: by another solver, for any number of steps.

Everything that is exported, and every step by another solver than the bundle's own, is an arrangement of copies of what
lies in `stem.onnx` and `step.onnx`. The step graph names the values between its pieces (`NAMED`), so that `Parts` finds
them again; `Builder` copies pieces into a new graph, their weights stored once, and gives values that add and multiply,
so that the solvers of `odevit_serve.solvers` write graphs as they compute with arrays.

This is the one module of the runtime that needs the `onnx` package. It is imported only where a graph is to be made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from .. import __version__, bundle, solvers
from ..bundle import METADATA_KEY, STEP_OUTPUTS, Config, Integration
from ..errors import UserError

OPSET = 20  # 23 and above emit an Attention op that TensorRT takes neither in fp32 nor inside a Loop
IR_VERSION = 10
PRODUCER = "odevit-serve"
GRAPH, GRAPHS = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS
# Values of a step graph: what G and F give, G's maps, and the velocity. `evaluated` in the metadata says of what state.
NAMED = ("attention", "mlp", "maps", "velocity")
Shape = Sequence[int | str]


def replace(items: Any, new: Iterable[Any]) -> None:
    """Put other messages into a repeated field of a protobuf message."""
    kept = list(new)
    del items[:]
    items.extend(kept)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == GRAPH:
            yield attribute.g
        elif attribute.type == GRAPHS:
            yield from attribute.graphs


def every_graph(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from every_graph(inner)


@dataclass(frozen=True)
class Piece:
    """A part of a graph: the nodes between some values and others, with the weights they read."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[onnx.NodeProto, ...]  # what depends on the inputs
    constants: tuple[onnx.NodeProto, ...]  # what depends on weights alone, such as casts of half-precision ones
    weights: Mapping[str, onnx.TensorProto]
    shapes: Mapping[str, onnx.ValueInfoProto] = field(repr=False)

    def as_model(self) -> onnx.ModelProto:
        """The piece as a graph of its own."""
        builder = Builder()
        values = [builder.input(name, dimensions(self.shapes[name])) for name in self.inputs]
        made = builder.place(self, *values)
        return builder.model(dict(zip(self.outputs, made)))


def dimensions(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def cut(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> Piece:
    """The nodes of a graph that make `outputs` of `inputs`."""
    graph = model.graph
    maker = {name: node for node in graph.node for name in node.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    found: dict[int, onnx.NodeProto] = {}  # in an order in which each comes after those it reads
    waiting = [(name, False) for name in reversed(outputs) if name not in inputs]
    while waiting:
        name, ready = waiting.pop()
        if name in weights or name in inputs or not name:
            continue
        if name not in maker:
            raise UserError(f"the graph cannot be cut: {name!r} is neither a weight nor made by a node")
        node = maker[name]
        if ready:
            found.setdefault(id(node), node)
        elif id(node) not in found:
            waiting.append((name, True))
            waiting.extend((read, False) for read in reversed(node.input))
    nodes, constants, moving = [], [], set(inputs)
    for node in found.values():
        if moving & set(node.input):
            nodes.append(node)
            moving.update(node.output)
        else:
            constants.append(node)
    read = {name for node in found.values() for name in node.input}
    used = {name: tensor for name, tensor in weights.items() if name in read}
    return Piece(tuple(inputs), tuple(outputs), tuple(nodes), tuple(constants), used, shapes)


class Value:
    """A value of a graph under construction, with the arithmetic of an array."""

    __array_ufunc__ = None  # a numpy number on the left leaves the operation to us

    def __init__(self, builder: Builder, name: str, shape: Shape | None = None):
        self.builder, self.name, self.shape = builder, name, shape

    def _with(self, op: str, other: Any, swapped: bool = False) -> Value:
        right = other if isinstance(other, Value) else self.builder.constant(np.float32(other))
        first, second = (right, self) if swapped else (self, right)
        shapes = [value.shape for value in (first, second) if value.shape is not None]
        wide = max(shapes, key=lambda shape: (len(shape), sum(size != 1 for size in shape)), default=None)
        return self.builder.node(op, first, second, shape=wide)[0]

    def __add__(self, other: Any) -> Value:
        return self._with("Add", other)

    def __radd__(self, other: Any) -> Value:
        return self._with("Add", other, swapped=True)

    def __sub__(self, other: Any) -> Value:
        return self._with("Sub", other)

    def __mul__(self, other: Any) -> Value:
        return self._with("Mul", other)

    def __rmul__(self, other: Any) -> Value:
        return self._with("Mul", other, swapped=True)

    def __truediv__(self, other: Any) -> Value:
        return self._with("Div", other)


class Builder:
    """A graph under construction. Weights and constants are stored once, however many copies read them."""

    def __init__(self, batch: str = "batch"):
        self.batch = batch
        self.inputs: list[onnx.ValueInfoProto] = []
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.shapes: dict[str, onnx.ValueInfoProto] = {}
        self._stored: dict[int, str] = {}  # by identity: tensors and constant nodes of pieces are shared objects
        self._alive: list[Any] = []
        self._numbers: dict[tuple[str, bytes, tuple[int, ...]], Value] = {}
        self._copies = self._named = 0

    def input(self, name: str, shape: Shape, kind: int = onnx.TensorProto.FLOAT) -> Value:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return Value(self, name, shape)

    def constant(self, value: Any, name: str | None = None) -> Value:
        array = np.asarray(value)
        key = (array.dtype.str, array.tobytes(), array.shape)
        if name is not None or key not in self._numbers:
            known = Value(self, name or f"c{len(self._numbers)}", array.shape)
            self.weights.append(numpy_helper.from_array(array, known.name))
            self._numbers[key] = known
            return known
        return self._numbers[key]

    def node(
        self,
        op: str,
        *inputs: Value,
        outputs: Sequence[str] = (),
        count: int = 1,
        shape: Shape | None = None,
        **attributes: Any,
    ) -> list[Value]:
        """One node; its outputs are named or numbered."""
        names = list(outputs) or [self._fresh() for _ in range(count)]
        label = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [value.name for value in inputs], names, label, **attributes))
        values = [Value(self, name, shape) for name in names]
        if shape is not None:
            for value in values:
                self.shapes[value.name] = helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, shape)
        return values

    def place(self, piece: Piece, *inputs: Value, outputs: Sequence[str] = ()) -> list[Value]:
        """A copy of a piece that reads the given values."""
        names = {tensor.name: self._store(tensor) for tensor in piece.weights.values()}
        for node in piece.constants:
            self._place_constant(node, names)
        names |= {own: given.name for own, given in zip(piece.inputs, inputs)}
        if outputs:
            names |= dict(zip(piece.outputs, outputs))
        prefix, self._copies = f"p{self._copies}", self._copies + 1
        fresh = 0
        for number, node in enumerate(piece.nodes):
            for name in node.output:  # short names: they are most of what one more step adds to a file
                if name and name not in names:
                    names[name] = f"{prefix}.{fresh}"
                    fresh += 1
            self.nodes.append(_renamed(node, names, f"{prefix}.{node.op_type}{number}"))
            for name in node.output:
                if name in piece.shapes:  # loading is about twice as slow without
                    self._note(names[name], piece.shapes[name])
        return [self._value(names[name]) for name in piece.outputs]

    def rename(self, value: Value, name: str) -> Value:
        """Give a value of the graph the name it is to have outside."""
        return self.node("Identity", value, outputs=[name], shape=value.shape)[0]

    def model(self, outputs: Mapping[str, Value], shapes: Mapping[str, Shape] | None = None) -> onnx.ModelProto:
        """The finished graph with these outputs, by the names they are to have."""
        renamed = {value.name: name for name, value in outputs.items()}
        if len(renamed) < len(outputs) or any(i.name in renamed for i in self.inputs):
            outputs = {name: self.rename(value, name) for name, value in outputs.items()}
            renamed = {}
        for node in self.nodes:
            replace(node.input, [renamed.get(name, name) for name in node.input])
            replace(node.output, [renamed.get(name, name) for name in node.output])
        found = []
        for name, value in outputs.items():
            info = onnx.ValueInfoProto()
            if shapes and name in shapes:
                info = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shapes[name])
            else:
                info.CopyFrom(self.shapes[value.name])
                info.name = name
            found.append(info)
        known = [info for name, info in self.shapes.items() if name not in renamed and name not in outputs]
        graph = helper.make_graph(self.nodes, PRODUCER, self.inputs, found, self.weights, value_info=known)
        return finished(graph)

    def _fresh(self) -> str:
        self._named += 1
        return f"v{self._named}"

    def _value(self, name: str) -> Value:
        info = self.shapes.get(name)
        return Value(self, name, None if info is None else dimensions(info))

    def _note(self, name: str, like: onnx.ValueInfoProto) -> None:
        info = onnx.ValueInfoProto()
        info.CopyFrom(like)
        info.name = name
        for size in info.type.tensor_type.shape.dim:
            if size.dim_param:  # `batch`, or a product with it
                size.dim_param = size.dim_param.replace("batch", self.batch)
        self.shapes[name] = info

    def _store(self, tensor: onnx.TensorProto) -> str:
        if id(tensor) not in self._stored:
            self._stored[id(tensor)] = f"w{len(self.weights)}.{tensor.name}"
            self._alive.append(tensor)
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = self._stored[id(tensor)]
            self.weights.append(copy)
        return self._stored[id(tensor)]

    def _place_constant(self, node: onnx.NodeProto, names: dict[str, str]) -> None:
        if id(node) not in self._stored:
            prefix = f"k{len(self._stored)}"
            self._alive.append(node)
            self._stored[id(node)] = prefix
            own = dict(names) | {name: f"{prefix}.{i}" for i, name in enumerate(node.output)}
            self.nodes.append(_renamed(node, own, f"{prefix}.{node.op_type}"))
        names |= {name: f"{self._stored[id(node)]}.{i}" for i, name in enumerate(node.output)}


def _renamed(node: onnx.NodeProto, names: Mapping[str, str], label: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = label
    replace(copy.input, [names.get(name, "") for name in node.input])
    replace(copy.output, [names.get(name, "") for name in node.output])
    return copy


def finished(graph: onnx.GraphProto) -> onnx.ModelProto:
    """A model around a graph, under our name."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    model.producer_name, model.producer_version = PRODUCER, __version__
    return model


class Parts:
    """The pieces of a bundle, from its own `stem.onnx` and `step.onnx`."""

    def __init__(self, stem: onnx.ModelProto, step: onnx.ModelProto, config: Config):
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
                f"{bundle.STEP} does not name its pieces, as one of an older version: "
                "run odevit-serve export --format parts on the bundle"
            ) from None
        self.digests = {"stem": found_digest(stem), "step": found_digest(step)}
        self.weights_digest = found.get("weights", "")
        self.own = own

    @classmethod
    def of(cls, folder: Path, config: Config) -> Parts:
        return cls(read(folder / bundle.STEM), read(folder / bundle.STEP), config)

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
        """Rows of a state: its tokens, and below them what the solver remembers."""
        return (1 + solvers.memories(own.solver, own.splitting)) * self.config.architecture.tokens


def stem_graph(parts: Parts, own: Integration) -> onnx.ModelProto:
    """Pixels to the state that a solver starts with: zeros where it remembers nothing yet."""
    builder = Builder()
    pixels = builder.input("pixel_values", ["batch", *parts.config.preprocessing.input_size])
    memories = solvers.memories(own.solver, own.splitting)
    x = builder.place(parts.begin, pixels, outputs=["tokens"] if memories else ())[0]
    rows, width = parts.rows(own), parts.config.architecture.width
    state = join(builder, [x] + [x * 0.0] * memories, rows, width)
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


def _is_known(builder: Builder, memory: Value) -> Value:
    """1 for images whose solver remembers a velocity; a memory of exact zeros means that there is none yet."""
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
    h = builder.node("Unsqueeze", size, builder.constant(np.array([1, 2], np.int64)), shape=["batch", 1, 1])[0]
    point, x, after, velocity = advance(parts, builder, own, state, h, named=True)
    logits = builder.place(parts.answer, x)[0]
    margin, gain, exponent = builder.place(parts.readings, point, x, logits)
    named = builder.rename(velocity, "velocity") if velocity.name != "velocity" else velocity
    speed, cls_speed = builder.place(parts.speeds, named)
    evaluated = {**parts.seen, "point": point.name, "next": x.name}
    outputs = dict(zip(STEP_OUTPUTS, (after, logits, margin, gain, exponent, speed, cls_speed)))
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
    return {name: wide.get(name, ["batch"]) for name in STEP_OUTPUTS}


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


def read(path: Path) -> onnx.ModelProto:
    """An ONNX file, without the data of others that it may point to."""
    try:
        if not path.stat().st_size:
            raise UserError(f"{path} is empty")
        return onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}: run odevit-serve export --format parts on it") from None
    except (DecodeError, OSError) as error:
        raise UserError(f"{path} is no readable ONNX file: it is damaged or cut short ({error})") from None


def properties(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def digest(model: onnx.ModelProto) -> str:
    """Of the graph alone, without metadata."""
    return hashlib.sha256(model.graph.SerializeToString(deterministic=True)).hexdigest()


def found_digest(model: onnx.ModelProto) -> str:
    """The digest that a file carries, or that of its graph."""
    return properties(model).get("graph") or digest(model)


def write_metadata(model: onnx.ModelProto, config: Config, **plain: object) -> None:
    """The bundle's config under our key, beside it the plain keys that other tools read; other keys stay."""
    size = config.architecture.image_size
    labels = config.labels or tuple(str(i) for i in range(config.architecture.classes))
    keys: dict[str, object] = {
        **properties(model),
        METADATA_KEY: config.to_json(),
        "description": f"ODE-ViT {config.name}",
        "author": PRODUCER,
        "version": __version__,
        "license": config.license,
        "task": "classify",
        "stride": config.architecture.patch_size,
        "imgsz": json.dumps([size, size]),
        "channels": config.architecture.channels,
        "names": dict(enumerate(labels)),
        "graph": digest(model),
        **plain,
    }
    del model.metadata_props[:]
    for key, value in keys.items():
        model.metadata_props.add(key=key, value=str(value))


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
