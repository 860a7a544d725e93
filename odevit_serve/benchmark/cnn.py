"""A CNN of ResNet-20's size, as an ONNX file of random weights: what somebody else would deploy for small pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..bundle import METADATA_KEY
from ..config import Config

WIDTHS, BLOCKS, OPSET = (16, 32, 64), 3, 17


class _Graph:
    """Nodes and weights, in the order in which they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def add(self, kind: str, inputs: list[str], name: str = "", **settings: Any) -> str:
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **settings))
        return name

    def weight(self, *shape: int) -> str:
        values = self.random.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def convolution(self, value: str, given: int, width: int, stride: int = 1, size: int = 3) -> str:
        """With its batch normalisation folded in."""
        inputs = [value, self.weight(width, given, size, size), self.bias(width)]
        return self.add("Conv", inputs, strides=[stride] * 2, pads=[size // 2] * 4)

    def bias(self, width: int) -> str:
        self.weights.append(numpy_helper.from_array(np.zeros(width, np.float32), f"w{len(self.weights)}"))
        return self.weights[-1].name


def write(path: Path, config: Config) -> Path:
    """The file, with the configuration of the model that it stands beside: same pictures, same classes."""
    graph, given = _Graph(), WIDTHS[0]
    value = graph.add("Relu", [graph.convolution("pixel_values", 3, given)])
    for width in WIDTHS:
        for _ in range(BLOCKS):
            stride = 1 if width == given else 2
            inner = graph.add("Relu", [graph.convolution(value, given, width, stride)])
            inner = graph.convolution(inner, width, width)
            if stride == 2:
                value = graph.convolution(value, given, width, 2, size=1)
            value, given = graph.add("Relu", [graph.add("Add", [inner, value])]), width
    pooled = graph.add("Flatten", [graph.add("GlobalAveragePool", [value])])
    graph.add("Gemm", [pooled, graph.weight(config.architecture.classes, given)], "logits", transB=1)
    size = list(config.preprocessing.input_size)
    pixels = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["B", *size])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", config.architecture.classes])
    made = helper.make_graph(graph.nodes, "cnn", [pixels], [logits], graph.weights)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    helper.set_model_props(model, {METADATA_KEY: config.to_json()})
    onnx.save(model, path)
    return path
