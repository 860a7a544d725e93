"""From torch modules to ONNX models: one call of the exporter, cleaned of everything local, with our metadata."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from .. import __version__
from ..bundle import METADATA_KEY, Config

OPSET = 20  # 23 and above emit an Attention op that TensorRT takes neither in fp32 nor inside a Loop
PRODUCER = "odevit-serve"


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
    clean(model)
    return model


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


def clean(model: onnx.ModelProto) -> None:
    """Drop what the exporter notes down about its own run: stack traces, source files, module paths."""
    model.producer_name, model.producer_version, model.doc_string = PRODUCER, __version__, ""
    model.graph.name, model.graph.doc_string = PRODUCER, ""
    del model.metadata_props[:]
    _clean_graph(model.graph)
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]


def _clean_graph(graph: onnx.GraphProto) -> None:
    del graph.metadata_props[:]
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
        for attribute in node.attribute:
            attribute.doc_string = ""
            for inner in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():
                _clean_graph(inner)


def write_metadata(model: onnx.ModelProto, config: Config, **plain: Any) -> None:
    """The bundle's config under our key, and beside it the plain keys that other tools read."""
    size = config.architecture.image_size
    labels = config.labels or tuple(str(i) for i in range(config.architecture.classes))
    keys = {
        METADATA_KEY: config.to_json(),
        "description": f"ODE-ViT {config.name}",
        "author": PRODUCER,
        "version": __version__,
        "license": config.license,
        "task": "classify",
        "stride": str(config.architecture.patch_size),
        "imgsz": json.dumps([size, size]),
        "channels": str(config.architecture.channels),
        "names": str(dict(enumerate(labels))),
        **{key: str(value) for key, value in plain.items()},
    }
    del model.metadata_props[:]
    for key, value in keys.items():
        model.metadata_props.add(key=key, value=value)
