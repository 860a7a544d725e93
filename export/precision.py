"""`--precision`: half and 8-bit weights, and what they cost on images.

Both are made of the two pieces of psi, by onnxruntime's own tools, before pieces are put together: so they work inside
loops as well, and weights stay stored once.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..config import Config, Integration
from ..data import datasets as data
from ..data import images
from ..errors import UsageError
from ..runtime.graph_builder import Piece, cut, every_graph, replace
from ..runtime.graphs import Parts
from ..runtime.sessions import Graphs
from ..solvers import evaluations
from .checks import Check, expect

PRECISIONS = ("fp32", "fp16", "int8")
BUNDLED = "calibration.zip"  # pictures that a bundle may bring along
MOST_IMAGES = 512  # to compare answers on
WATCHED = 128  # of them, to measure activations on
Array = np.ndarray[Any, Any]


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
            "int8 needs images to calibrate on and this bundle has none: give some with --calibration FOLDER"
        )
    return found


def noise(config: Config, count: int = 256) -> Pictures:
    """Random images, for a comparison where no real ones are at hand."""
    shape = (count, *config.preprocessing.input_size)
    return Pictures(np.random.default_rng(0).normal(size=shape).astype(np.float32), None, "random images")


def states(graphs: Graphs, pixels: Array, batch: int = 32) -> list[Array]:
    """States along the trajectories of the images: what G and F are given."""
    own, tokens = graphs.config.integration, graphs.config.architecture.tokens
    seen = []
    for start in range(0, len(pixels), batch):
        some = pixels[start : start + batch]
        state = graphs.stem.run(["state"], {"pixel_values": some})[0]
        size = np.full(len(some), own.step_size, np.float32)
        for _ in range(own.steps):
            seen.append(np.ascontiguousarray(state[:, :tokens]))
            state = graphs.step.run(["next_state"], {"state": state, "step_size": size})[0]
    return seen


def products(own: Integration) -> int:
    """Matrix products that an 8-bit graph must have per step: all of psi's, at every evaluation."""
    return 2 * sum(evaluations(own.solver, own.splitting))


def full_weights(piece: Piece) -> onnx.ModelProto:
    """The piece as a model whose weights are float32, whatever they are stored in, with plain matrix products."""
    model = piece.as_model()
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in stored:
            value = numpy_helper.to_array(stored[node.input[0]]).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        elif node.op_type == "Gemm":  # the quantised kernels want a MatMul
            product = f"{node.output[0]}.product"
            nodes.append(helper.make_node("MatMul", node.input[:2], [product], f"{node.name}.product"))
            nodes.append(helper.make_node("Add", [product, node.input[2]], node.output, node.name))
        else:
            nodes.append(node)
    replace(graph.node, nodes)
    read = {name for node in graph.node for name in node.input}
    replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])
    return model


def _as_piece(model: onnx.ModelProto) -> Piece:
    return cut(model, [value.name for value in model.graph.input], [value.name for value in model.graph.output])


def halve_fields(parts: Parts) -> None:
    """G and F in half precision; the state they are added to, the stem and the head lose nothing."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    for key in ("attention", "mlp"):
        piece: Piece = getattr(parts, key)
        half = convert_float_to_float16(full_weights(piece), keep_io_types=True, disable_shape_infer=True)
        setattr(parts, key, _as_piece(half))


def quantise_fields(parts: Parts, seen: Sequence[Array], symmetric: bool = False) -> None:
    """The matrix products of G and F in 8 bits, by onnxruntime's own quantiser, calibrated on the states given.

    Activations are uint8 with a zero point, which CPUs multiply fastest, or int8 without one, as TensorRT wants it.
    Weights have 7 bits: kernels for CPUs without VNNI add two products in 16 bits, where 8 would overflow unseen.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class States(CalibrationDataReader):
        def __init__(self, name: str):
            self.rows = iter([{name: state} for state in seen])

        def get_next(self) -> dict[str, Array] | None:
            return next(self.rows, None)

    for key in ("attention", "mlp"):
        model = full_weights(getattr(parts, key))
        stored = {tensor.name for tensor in model.graph.initializer}
        chosen = [node.name for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in stored]
        name = model.graph.input[0].name
        with tempfile.TemporaryDirectory() as folder, _quiet():
            target = str(Path(folder) / "int8.onnx")
            quantize_static(
                model, target, States(name), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul"],
                per_channel=True, reduce_range=True, activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
                weight_type=QuantType.QInt8, nodes_to_quantize=chosen,
                extra_options={"ActivationSymmetric": symmetric, "WeightSymmetric": True},
            )  # fmt: skip
            made = onnx.load(target)
        setattr(parts, key, _as_piece(made))


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantiser's advice to preprocess does not apply to a piece of a graph."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def count(model: onnx.ModelProto) -> int:
    """Matrix products in a finished graph, loops included, that read an 8-bit weight."""
    found = 0
    for graph in every_graph(model.graph):
        dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        found += sum(node.op_type == "MatMul" and set(node.input) <= dequantised for node in graph.node)
    return found


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
