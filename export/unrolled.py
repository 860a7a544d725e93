"""`onnx`: a fixed number of steps, one after the other, all reading the same weights."""

from __future__ import annotations

import onnx

from .graph import Folded
from .onnx import assemble
from .pieces import Pieces


def unrolled(pieces: Pieces, with_attention: bool = False) -> onnx.ModelProto:
    parts = {
        "Stem": pieces.stem(),
        "Advance": pieces.advance(),
        "Answer": pieces.answer(with_attention),
    }
    return assemble(text(pieces.folded, with_attention), parts)


def text(folded: Folded, with_attention: bool) -> str:
    shape, steps = folded.shape, folded.integration.steps
    state = f"float[batch, {folded.rows}, {shape.width}]"
    logits = f"float[batch, {shape.classes}] logits"
    maps = f", float[batch, {shape.heads}, {shape.patches}] cls_attention" if with_attention else ""
    shapes = ", ".join(f"{state} state_{n}" for n in range(steps + 1))
    lines = [f"state_{n} = piece.Advance (state_{n - 1})" for n in range(1, steps + 1)]
    return f"""
    unrolled (float[batch, {shape.channels}, {shape.image_size}, {shape.image_size}] pixel_values)
        => ({logits}{maps}) <{shapes}> {{
        state_0 = piece.Stem (pixel_values)
        {chr(10).join(lines)}
        logits{", cls_attention" if with_attention else ""} = piece.Answer (state_{steps})
    }}"""
