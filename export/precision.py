"""`--precision`: half and 8-bit weights, and what they cost on images.

fp16 is made in torch (`Folded(half=True)`). int8 puts QuantizeLinear and DequantizeLinear around the four matrices of
psi in a traced piece, before pieces are put together: so it works inside loops as well, and weights stay stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from .. import data, images
from ..bundle import SOLVERS, Config
from ..errors import UsageError
from .checks import Check, expect
from .graph import Folded
from .onnx import every_graph

PRECISIONS = ("fp32", "fp16", "int8")
MATRICES = ("attention.project", "attention.output", "mlp.up", "mlp.down")
BUNDLED = "calibration.zip"  # pictures that a bundle may bring along
WEIGHT_LEVELS = 63  # 7 bits: kernels for CPUs without VNNI add two products in 16 bits, where 8 would overflow unseen
MOST_IMAGES = 512  # to compare answers on
WATCHED = 128  # of them, to measure activations on
Array = np.ndarray[Any, Any]
Ranges = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Pictures:
    """Images to calibrate and compare on, ready for the model."""

    pixels: Array  # [n,3,H,W]
    labels: Array | None
    source: str


def pictures(config: Config, folder: Path, given: str | None, seed: int = 0) -> Pictures | None:
    """The images asked for, else the bundle's own, else None."""
    source = Path(given) if given else folder / BUNDLED
    if not given and not source.is_file():
        return None
    found = data.held_out(data.open_splits(source))
    chosen = np.random.default_rng(seed).permutation(len(found))[:MOST_IMAGES]
    pixels = np.stack([images.prepare(found.read(int(i)), config.preprocessing) for i in chosen])
    labels = found.labels
    if labels is not None and config.labels and set(found.classes) <= set(config.labels):
        own = np.array([config.labels.index(name) for name in found.classes])
        return Pictures(pixels, own[labels[chosen]], source.name)
    return Pictures(pixels, None, source.name)


def needed(found: Pictures | None) -> Pictures:
    if found is None:
        raise UsageError(
            "int8 needs images to calibrate on and this bundle brings none: give some with --calibration FOLDER"
        )
    return found


def noise(config: Config, count: int = 256) -> Pictures:
    """Random images, for a comparison where no real ones are at hand."""
    shape = (count, *config.preprocessing.input_size)
    return Pictures(np.random.default_rng(0).normal(size=shape).astype(np.float32), None, "random images")


@torch.no_grad()
def ranges(folded: Folded, pixels: Array, batch: int = 32) -> Ranges:
    """Smallest and largest value that each matrix of psi is given along the trajectories of the images."""
    with _watched(folded) as seen:
        for start in range(0, len(pixels), batch):
            state = folded.begin(torch.from_numpy(pixels[start : start + batch]))
            for _ in range(folded.integration.steps):
                state, _ = folded.advance(state, folded.integration.step_size)
    return seen


@contextmanager
def _watched(folded: Folded) -> Iterator[Ranges]:
    seen: Ranges = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            low, high = seen.get(name, (0.0, 0.0))  # zero must be exact, for padding and empty rows
            seen[name] = (min(low, float(inputs[0].min())), max(high, float(inputs[0].max())))

        return note

    hooks = [folded.get_submodule(name).register_forward_pre_hook(watch(name)) for name in MATRICES]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def quantised(folded: Folded) -> int:
    """Matrix products that an 8-bit graph must have per step: all of psi's, at every evaluation."""
    own = folded.integration
    attention = 2 if own.splitting == "strang" else 1
    return SOLVERS[own.solver] * (2 * attention + 2)


def quantise(model: onnx.ModelProto, seen: Ranges, symmetric: bool = False) -> int:
    """Make psi's matrices in a traced piece 8-bit, in place; the number of products this reached.

    Activations are uint8 with a zero point, which CPUs multiply fastest, or int8 without one, as TensorRT wants it.
    """
    graph = model.graph
    weights = {t.name: name for t in graph.initializer for name in MATRICES if t.name.endswith(f"{name}.weight")}
    nodes: list[onnx.NodeProto] = []
    activations: dict[tuple[str, tuple[float, float]], str] = {}
    count = 0
    for node in graph.node:
        matrix = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if matrix is not None:
            key = (node.input[0], seen[matrix])
            if key not in activations:
                activations[key] = f"{node.input[0]}.{matrix}.rounded"
                nodes.extend(_activation(graph, node.input[0], activations[key], matrix, seen[matrix], symmetric))
            node.input[0] = activations[key]
            node.input[1] = _dequantised(node.input[1])
            count += 1
        nodes.append(node)
    dequantised = [_weight(graph, name) for name in weights]
    del graph.node[:]
    graph.node.extend([*dequantised, *nodes])
    return count


def count(model: onnx.ModelProto) -> int:
    """Matrix products in a finished graph, loops included, that read an 8-bit weight."""
    found = 0
    for graph in every_graph(model.graph):
        dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        found += sum(node.op_type == "MatMul" and set(node.input) <= dequantised for node in graph.node)
    return found


def _dequantised(name: str) -> str:
    return f"{name}.float"


def _weight(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    """A weight as 8-bit integers with a scale for each output column."""
    tensor = next(t for t in graph.initializer if t.name == name)
    value = numpy_helper.to_array(tensor)
    scale = np.maximum(np.abs(value).max(0), 1e-12) / WEIGHT_LEVELS
    graph.initializer.remove(tensor)
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.rint(value / scale).astype(np.int8), f"{name}.int8"),
            numpy_helper.from_array(scale.astype(np.float32), f"{name}.scale"),
            numpy_helper.from_array(np.zeros(len(scale), np.int8), f"{name}.zero"),
        ]
    )
    inputs = [f"{name}.int8", f"{name}.scale", f"{name}.zero"]
    return helper.make_node("DequantizeLinear", inputs, [_dequantised(name)], f"{name}.dequantise", axis=1)


def _activation(
    graph: onnx.GraphProto, source: str, target: str, matrix: str, seen: tuple[float, float], symmetric: bool
) -> list[onnx.NodeProto]:
    low, high = seen
    if symmetric:
        scale, zero = max(-low, high, 1e-12) / 127, np.array(0, np.int8)
    else:
        scale = max(high - low, 1e-12) / 255
        zero = np.array(round(-low / scale), np.uint8)
    names = [f"{target}.scale", f"{target}.zero"]
    graph.initializer.extend(
        [numpy_helper.from_array(np.array(scale, np.float32), names[0]), numpy_helper.from_array(zero, names[1])]
    )
    return [
        helper.make_node("QuantizeLinear", [source, *names], [f"{target}.int8"], f"{target}.quantise"),
        helper.make_node("DequantizeLinear", [f"{target}.int8", *names], [target], f"{target}.dequantise"),
    ]


def compare(
    before: Callable[[Array], Array],
    after: Callable[[Array], Array],
    found: Pictures,
    precision: str,
    max_drop: float,
    batch: int = 32,
) -> tuple[Check, dict[str, float | str]]:
    """Accuracy (or, without labels, agreement) of the lower precision and the full one; refused above `max_drop`."""
    starts = range(0, len(found.pixels), batch)
    first = np.concatenate([before(found.pixels[i : i + batch]).argmax(-1) for i in starts])
    second = np.concatenate([after(found.pixels[i : i + batch]).argmax(-1) for i in starts])
    agreement = 100 * float((first == second).mean())
    figures: dict[str, float | str] = {"images": str(len(first)), "source": found.source, "agreement": agreement}
    drop, what = 100 - agreement, "disagreement with fp32"
    if found.labels is not None:
        figures["before"] = 100 * float((first == found.labels).mean())
        figures["after"] = 100 * float((second == found.labels).mean())
        drop, what = float(figures["before"]) - float(figures["after"]), "loss of accuracy"
    hint = f"{precision} on {len(first)} images of {found.source}; allow more with --max-drop"
    return expect(f"{what} in points", drop <= max_drop, drop, max_drop, hint), figures
