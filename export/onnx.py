"""ONNX models put together by name, and what is stored in them.

`assemble` takes a graph written in ONNX's own text form, in which a node like `state = piece.Stem (pixel_values)`
stands for another graph, and puts that one's nodes in its place. Weights go to the outermost graph, once, however often
a piece is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from .. import __version__
from ..runtime.graph_builder import IR_VERSION, OPSET, PRODUCER, every_graph, replace, subgraphs


def halve(model: onnx.ModelProto, least: int = 1024) -> None:
    """Store weights that float16 holds exactly, as those of a bundle in float16 are, in half the bytes.

    A runtime casts them back once, when it loads the graph: the answers are the same to the last bit.
    """
    graph, casts = model.graph, []
    for tensor in graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.dtype != np.float32 or value.size < least:
            continue
        with np.errstate(over="ignore"):
            small = value.astype(np.float16)
        if np.array_equal(small.astype(np.float32), value):
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(small, f"{name}.half"))
            casts.append(onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=onnx.TensorProto.FLOAT))
    replace(graph.node, [*casts, *graph.node])


def clean(model: onnx.ModelProto) -> None:
    """Drop what the exporter notes down about its own run: stack traces, source files, module paths."""
    model.producer_name, model.producer_version, model.doc_string = PRODUCER, __version__, ""
    model.graph.name = PRODUCER
    del model.metadata_props[:]
    for graph in every_graph(model.graph):
        graph.doc_string = ""
        del graph.metadata_props[:]
        for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer, *graph.node):
            item.doc_string = ""
            del item.metadata_props[:]


def assemble(
    text: str,
    pieces: Mapping[str, onnx.ModelProto],
    constants: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> onnx.ModelProto:
    """The model written down in `text`, with `piece.Name (...)` replaced by the pieces and `constants` by name."""
    header = f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET}, "piece" : 1]>\n'
    model = onnx.parser.parse_model(header + text)
    graph = model.graph
    stored = _store(graph, pieces)
    for name, value in (constants or {}).items():
        graph.initializer.append(numpy_helper.from_array(value, name))
    _place(graph, pieces, stored, "batch")
    _drop(graph)
    _sink(graph)
    _settle(graph)
    replace(model.opset_import, [onnx.helper.make_opsetid("", OPSET)])
    clean(model)
    return model


def _store(graph: onnx.GraphProto, pieces: Mapping[str, onnx.ModelProto]) -> dict[tuple[str, str], str]:
    """Put the weights of all pieces into the graph, equal ones once: (piece, name there) -> name here."""
    stored: dict[tuple[str, str], str] = {}
    known: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    for name, piece in pieces.items():
        for tensor in piece.graph.initializer:
            content = (tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes())
            if content not in known:
                known[content] = f"{name}.{tensor.name}"
                copy = graph.initializer.add()
                copy.CopyFrom(tensor)
                copy.name = known[content]
            stored[name, tensor.name] = known[content]
    return stored


def _place(
    graph: onnx.GraphProto, pieces: Mapping[str, onnx.ModelProto], stored: Mapping[tuple[str, str], str], batch: str
) -> None:
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        for inner in subgraphs(node):
            _place(inner, pieces, stored, "active")  # the rows inside a loop are not those of the whole batch
        if node.domain == "piece":
            piece = pieces[node.op_type].graph
            weights = {tensor.name: stored[node.op_type, tensor.name] for tensor in piece.initializer}
            added, shapes = _instance(node, piece, weights, f"{node.op_type[0].lower()}{index}", batch)
            nodes.extend(added)
            graph.value_info.extend(shapes)
        else:
            nodes.append(node)
    replace(graph.node, nodes)


def _reads(node: onnx.NodeProto) -> set[str]:
    """The values that a node reads, by itself or in the graphs inside it."""
    inside = {name for inner in subgraphs(node) for name in _read(inner)}
    return {*node.input, *inside}


def _read(graph: onnx.GraphProto) -> set[str]:
    return {value.name for value in graph.output}.union(*(_reads(node) for node in graph.node))


def _drop(graph: onnx.GraphProto) -> None:
    """Leave out nodes and weights that nobody reads, such as numbers of a step that no rule of this graph looks at."""
    needed, kept = {value.name for value in graph.output}, list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if needed & set(node.output):
            for inner in subgraphs(node):
                _drop(inner)
            needed |= _reads(node)
            kept.append(node)
    _keep(graph, [*reversed(kept)])
    needed |= {value.name for value in graph.input}
    replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in needed])


def _keep(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> list[onnx.ValueInfoProto]:
    """Leave only these nodes in the graph, and the shapes of what they make; gives the shapes that went."""
    made = {name for node in nodes for name in node.output}
    replace(graph.node, nodes)
    gone = [value for value in graph.value_info if value.name not in made]
    replace(graph.value_info, [value for value in graph.value_info if value.name in made])
    return gone


def _sink(graph: onnx.GraphProto) -> None:
    """Move nodes that only one branch of an If reads into that branch, so that they run when it is taken."""
    for node in graph.node:
        for inner in subgraphs(node):
            _sink(inner)
    for made in [node.output[0] for node in graph.node if node.op_type == "If"]:
        for number in range(2):
            node = next(node for node in graph.node if made in node.output)
            branches = list(subgraphs(node))
            branch = branches.pop(number)
            needed = {value.name for value in graph.output}.union(node.input, _read(branches[0]))
            kept, moving = list[onnx.NodeProto](), list[onnx.NodeProto]()
            for other in reversed(graph.node):
                if made in other.output:
                    kept.append(other)
                elif needed & set(other.output):
                    kept.append(other)
                    needed |= _reads(other)
                else:
                    moving.append(other)
            replace(branch.node, [*reversed(moving), *branch.node])
            branch.value_info.extend(_keep(graph, [*reversed(kept)]))


def _settle(graph: onnx.GraphProto) -> None:
    """Move weights that only a loop reads into its body: onnxruntime lays out convolutions only where it sees them."""
    for node in graph.node:
        for inner in subgraphs(node):
            outside = {name for other in graph.node for name in other.input} | {v.name for v in graph.input}
            inside = _read(inner)
            moving = [t for t in graph.initializer if t.name in inside and t.name not in outside]
            inner.initializer.extend(moving)
            kept = {t.name for t in moving}
            replace(graph.initializer, [t for t in graph.initializer if t.name not in kept])


def _instance(
    call: onnx.NodeProto, piece: onnx.GraphProto, weights: dict[str, str], prefix: str, batch: str
) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto]]:
    """Nodes and shapes of one use of a piece, its inputs and outputs bound to those of the placeholder node."""
    names = weights | {own.name: given for own, given in zip(piece.input, call.input)}
    names |= {own.name: given for own, given in zip(piece.output, call.output)}
    bound = set(names)
    for node in piece.node:  # short names: they are most of what one more step adds to a file
        for name in node.output:
            names.setdefault(name, f"{prefix}.{len(names)}")
    nodes, shapes = [], []
    for number, node in enumerate(piece.node):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}.{node.op_type}{number}"
        replace(copy.input, [names.get(name, "") for name in node.input])
        replace(copy.output, [names.get(name, "") for name in node.output])
        nodes.append(copy)
    for value in piece.value_info:  # loading is about twice as slow without
        if value.name in names and value.name not in bound:
            info = onnx.ValueInfoProto()
            info.CopyFrom(value)
            info.name = names[value.name]
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_param == "batch":
                    dim.dim_param = batch
            shapes.append(info)
    return nodes, shapes
