"""Graphs cut into pieces, and graphs under construction.

`cut` finds the nodes between some values of a graph and others. `Builder` copies such pieces into a new graph, their
weights stored once, and gives values that add and multiply, so that the solvers of `odevit_serve.solvers` and the exit
rules write graphs as they compute with arrays. Nothing here knows what a graph is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .. import __version__
from ..errors import UserError

OPSET = 20  # 23 and above emit an Attention op that TensorRT takes neither in fp32 nor inside a Loop
IR_VERSION = 10
PRODUCER = "odevit-serve"
GRAPH, GRAPHS = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS
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

    @property
    def ndim(self) -> int:
        if self.shape is None:
            raise ValueError(f"the number of dimensions of {self.name} is not known")
        return len(self.shape)

    def sum(self, axis: Sequence[int], keepdims: bool = False) -> Value:
        """Over some axes, as an array's."""
        axes = {each % self.ndim for each in axis}
        assert self.shape is not None  # `ndim` has looked
        kept = [1 if i in axes else size for i, size in enumerate(self.shape) if keepdims or i not in axes]
        over = self.builder.constant(np.array(sorted(axes), np.int64))
        return self.builder.node("ReduceSum", self, over, keepdims=int(keepdims), shape=kept)[0]

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
