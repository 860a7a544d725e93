"""From torch modules to ONNX models: the exporter called once a piece, and pieces put together by name.

`trace` gives a model cleaned of everything local. `assemble` takes a graph written in ONNX's own text form, in which a
node like `state = piece.Stem (pixel_values)` stands for a traced piece, and puts the piece's nodes in its place.
Weights go to the outermost graph, once, however often a piece is used.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from .. import __version__
from ..bundle import METADATA_KEY, Config

OPSET = 20  # 23 and above emit an Attention op that TensorRT takes neither in fp32 nor inside a Loop
IR_VERSION = 10
PRODUCER = "odevit-serve"
GRAPH, GRAPHS = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS


def trace(
    module: nn.Module, examples: Mapping[str, Tensor], outputs: Sequence[str], opset: int = OPSET
) -> onnx.ModelProto:
    """The ONNX model of `module`; the first axis of every example is the batch, free in the graph."""
    batch = torch.export.Dim("batch", min=1)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module.eval(),
            tuple(examples.values()),
            dynamo=True,
            opset_version=opset,
            input_names=list(examples),
            output_names=list(outputs),
            dynamic_shapes={name: {0: batch} for name in examples},
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    model.ir_version = IR_VERSION
    clean(model)
    _lift_constants(model.graph)
    return model


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
    _replace(graph.node, [*casts, *graph.node])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's running commentary is for its developers."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Constant nodes become initialisers, which repeated pieces share."""
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
        else:
            kept.append(node)
    _replace(graph.node, kept)
    stored = {tensor.name for tensor in graph.initializer}  # their shapes are told once, by the tensors themselves
    _replace(graph.value_info, [value for value in graph.value_info if value.name not in stored])


def _replace(field: Any, items: list[Any]) -> None:
    del field[:]
    field.extend(items)


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
    _settle(graph)
    _replace(model.opset_import, [onnx.helper.make_opsetid("", OPSET)])
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
    _replace(graph.node, nodes)


def _settle(graph: onnx.GraphProto) -> None:
    """Move weights that only a loop reads into its body: onnxruntime lays out convolutions only where it sees them."""
    for node in graph.node:
        for inner in subgraphs(node):
            outside = {name for other in graph.node for name in other.input} | {v.name for v in graph.input}
            inside = {name for other in inner.node for name in other.input}
            moving = [t for t in graph.initializer if t.name in inside and t.name not in outside]
            inner.initializer.extend(moving)
            kept = {t.name for t in moving}
            _replace(graph.initializer, [t for t in graph.initializer if t.name not in kept])


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
        _replace(copy.input, [names.get(name, "") for name in node.input])
        _replace(copy.output, [names.get(name, "") for name in node.output])
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


def write_metadata(model: onnx.ModelProto, config: Config, **plain: object) -> None:
    """The bundle's config under our key, and beside it the plain keys that other tools read."""
    size = config.architecture.image_size
    labels = config.labels or tuple(str(i) for i in range(config.architecture.classes))
    keys: dict[str, object] = {
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
        **plain,
    }
    del model.metadata_props[:]
    for key, value in keys.items():
        model.metadata_props.add(key=key, value=str(value))
