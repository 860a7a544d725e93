"""From torch modules to ONNX models, by torch's own exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence

import onnx
import torch
from torch import Tensor, nn

from ..runtime.graph_builder import IR_VERSION, OPSET, replace
from .onnx import clean


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
    replace(graph.node, kept)
    stored = {tensor.name for tensor in graph.initializer}  # their shapes are told once, by the tensors themselves
    replace(graph.value_info, [value for value in graph.value_info if value.name not in stored])
