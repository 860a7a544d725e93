"""The traced pieces that all graphs are put together from, and `parts`: three of them as files for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from .. import bundle
from ..train.model import ODEViT
from .graph import Advance, Answer, ClsAttention, Folded, Stem, Step
from .onnx import halve, trace, write_metadata

STEP_OUTPUTS = ("next_state", "logits", "margin", "speed", "cls_speed")


class Pieces:
    """Traces what it is asked for; `quantise` then makes matrices 8-bit and says how many it reached."""

    def __init__(self, folded: Folded, quantise: Callable[[onnx.ModelProto], int] | None = None):
        self.folded, self.quantise = folded, quantise
        self.quantised: dict[str, int] = {}

    def stem(self) -> onnx.ModelProto:
        shape = self.folded.shape
        images = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
        return trace(Stem(self.folded), {"pixel_values": images}, ["state"])

    def step(self) -> onnx.ModelProto:
        examples = {"state": self._state(), "step_size": torch.ones(2)}
        return self._moving("step", Step(self.folded), examples, STEP_OUTPUTS)

    def advance(self) -> onnx.ModelProto:
        return self._moving("advance", Advance(self.folded), {"state": self._state()}, ["next_state"])

    def answer(self, with_attention: bool) -> onnx.ModelProto:
        outputs = ["logits", "cls_attention"] if with_attention else ["logits"]
        return trace(Answer(self.folded, with_attention), {"state": self._state()}, outputs)

    def attention(self) -> onnx.ModelProto:
        return trace(ClsAttention(self.folded), {"state": self._state()}, ["cls_attention"])

    def parts(self) -> dict[str, onnx.ModelProto]:
        """File name -> graph."""
        return {bundle.STEM: self.stem(), bundle.STEP: self.step(), bundle.ATTENTION: self.attention()}

    def _state(self) -> Tensor:
        return torch.zeros(2, self.folded.rows, self.folded.shape.width)

    def _moving(
        self, name: str, module: nn.Module, examples: dict[str, Tensor], outputs: Sequence[str]
    ) -> onnx.ModelProto:
        model = trace(module, examples, outputs)
        if self.quantise is not None:
            self.quantised[name] = self.quantise(model)
        return model


def write_parts(folder: Path) -> list[Path]:
    model = ODEViT.from_pretrained(folder)
    graphs = Pieces(Folded(model)).parts()
    for name, graph in graphs.items():
        halve(graph)
        write_metadata(graph, model.config, format="parts", part=name.removesuffix(".onnx"), precision="fp32")
        with bundle.atomic(folder / name) as path:
            onnx.save(graph, path)
    return [folder / name for name in graphs]
