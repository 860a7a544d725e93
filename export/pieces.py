"""`parts`: from weights to the three graphs that everything else is made of. The only export that needs torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import onnx
import torch

from .. import bundle
from ..bundle import STEP_OUTPUTS
from ..config import Integration
from ..files import atomic
from ..runtime.graph_files import write_metadata
from ..runtime.graphs import NAMED, Parts, stem_graph, step_graph
from ..train.model import ODEViT
from .graph import ClsAttention, Folded, Stem, StepGraph
from .onnx import halve
from .tracing import trace

CANONICAL = Integration(12.0, 12)  # an Euler step: the pieces of all others are cut from it


def traced(model: ODEViT) -> dict[str, onnx.ModelProto]:
    """Stem, Euler step and attention of a model, by file name."""
    folded, shape = Folded(model.eval()), model.config.architecture
    state = torch.zeros(2, shape.tokens, shape.width)
    images = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
    stem = trace(Stem(folded), {"pixel_values": images}, ["state"])
    step = trace(StepGraph(folded), {"state": state, "step_size": torch.ones(2)}, [*STEP_OUTPUTS, *NAMED])
    _hide(step, NAMED)
    evaluated = {"attention": "state", "mlp": "state", "point": "state", "next": "next_state"}
    step.metadata_props.add(key="evaluated", value=json.dumps(evaluated))
    return {
        bundle.STEM: stem,
        bundle.STEP: step,
        bundle.ATTENTION: trace(ClsAttention(folded), {"state": state}, ["cls_attention"]),
    }


def _hide(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Make outputs of a graph plain values of it, under the same names."""
    graph = model.graph
    hidden = [value for value in graph.output if value.name in names]
    for value in hidden:
        graph.output.remove(value)
    graph.value_info.extend(hidden)


def make(model: ODEViT) -> dict[str, onnx.ModelProto]:
    """The three graphs of a bundle, for its own solver and splitting."""
    graphs, config = traced(model), model.config
    for graph in graphs.values():
        halve(graph)
    own = config.integration
    if (own.solver, own.splitting) != (CANONICAL.solver, CANONICAL.splitting):
        parts = Parts(graphs[bundle.STEM], graphs[bundle.STEP], config)
        graphs |= {bundle.STEM: stem_graph(parts, own), bundle.STEP: step_graph(parts, own)}
    return graphs


def write_parts(folder: Path) -> list[Path]:
    """Make the graphs of the bundle in `folder`, with the digest of the weights they were made from."""
    model = ODEViT.from_pretrained(folder)
    weights = bundle.digest(folder / bundle.WEIGHTS)
    graphs = make(model)
    for name, graph in graphs.items():
        part = name.removesuffix(".onnx")
        write_metadata(graph, model.config, format="parts", part=part, precision="fp32", weights=weights)
        with atomic(folder / name) as path:
            onnx.save(graph, path)
    return [folder / name for name in graphs]
