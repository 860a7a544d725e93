"""The traced pieces that all graphs are put together from, and `parts`: three of them as files for the engine."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch

from .. import bundle
from ..train.model import ODEViT
from .graph import Advance, Answer, ClsAttention, Folded, Stem, Step
from .onnx import trace, write_metadata

STEP_OUTPUTS = ("next_state", "logits", "margin", "speed", "cls_speed")


def images(folded: Folded, batch: int = 2) -> torch.Tensor:
    shape = folded.shape
    return torch.zeros(batch, shape.channels, shape.image_size, shape.image_size)


def _state(folded: Folded) -> torch.Tensor:
    return torch.zeros(2, folded.rows, folded.shape.width)


def stem(folded: Folded) -> onnx.ModelProto:
    return trace(Stem(folded), {"pixel_values": images(folded)}, ["state"])


def step(folded: Folded) -> onnx.ModelProto:
    return trace(Step(folded), {"state": _state(folded), "step_size": torch.ones(2)}, STEP_OUTPUTS)


def advance(folded: Folded) -> onnx.ModelProto:
    return trace(Advance(folded), {"state": _state(folded)}, ["next_state"])


def answer(folded: Folded, with_attention: bool) -> onnx.ModelProto:
    outputs = ["logits", "cls_attention"] if with_attention else ["logits"]
    return trace(Answer(folded, with_attention), {"state": _state(folded)}, outputs)


def attention(folded: Folded) -> onnx.ModelProto:
    return trace(ClsAttention(folded), {"state": _state(folded)}, ["cls_attention"])


def part_graphs(folded: Folded) -> dict[str, onnx.ModelProto]:
    """File name -> graph."""
    return {bundle.STEM: stem(folded), bundle.STEP: step(folded), bundle.ATTENTION: attention(folded)}


def write_parts(folder: Path, precision: str = "fp32") -> list[Path]:
    model = ODEViT.from_pretrained(folder)
    graphs = part_graphs(Folded(model, half=precision == "fp16"))
    for name, graph in graphs.items():
        write_metadata(graph, model.config, format="parts", part=name.removesuffix(".onnx"), precision=precision)
        with bundle.atomic(folder / name) as path:
            onnx.save(graph, path)
    return [folder / name for name in graphs]
