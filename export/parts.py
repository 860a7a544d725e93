"""`parts`: the stem, step and attention graphs that the engine runs, inside the bundle."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch

from .. import bundle
from ..bundle import Config
from ..train.model import ODEViT
from .graph import ClsAttention, Folded, Stem, Step
from .onnx import trace, write_metadata

STEP_OUTPUTS = ("next_state", "logits", "margin", "speed", "cls_speed")


def graphs(folded: Folded) -> dict[str, onnx.ModelProto]:
    """File name -> graph, of the three parts."""
    shape = folded.shape
    images = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
    state, size = torch.randn(2, folded.rows, shape.width), torch.ones(2)
    return {
        bundle.STEM: trace(Stem(folded), {"pixel_values": images}, ["state"]),
        bundle.STEP: trace(Step(folded), {"state": state, "step_size": size}, STEP_OUTPUTS),
        bundle.ATTENTION: trace(ClsAttention(folded), {"state": state}, ["cls_attention"]),
    }


def parts(folder: Path, config: Config | None = None) -> list[Path]:
    """Write stem, step and attention graphs of the bundle in `folder` into it."""
    model = ODEViT.from_pretrained(folder)
    config = config or model.config
    written = []
    for name, graph in graphs(Folded(model, config.integration)).items():
        write_metadata(graph, config, format="parts", part=name.removesuffix(".onnx"))
        with bundle.atomic(folder / name) as path:
            onnx.save(graph, path)
        written.append(folder / name)
    return written
