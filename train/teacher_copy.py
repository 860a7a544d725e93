"""What a student copies of its teacher: patch embedding, position embedding, CLS token, head, and one block for psi."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import LayerScale, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..errors import UsageError
from .model import ODEViT
from .teacher import Teacher


def copy_into(teacher: Teacher, student: ODEViT, warm_start: int = -1) -> None:
    """Plug and play: the student gets its own copies of everything but psi; `warm_start` names a block for psi too."""
    vit: Any = teacher.vit
    shape = student.config.architecture
    with torch.no_grad():
        proj = vit.patch_embed.proj
        if (
            isinstance(student.patch, nn.Conv2d) and student.patch.weight.shape == proj.weight.shape
        ):  # a stem of convolutions has nothing to copy from
            student.patch.weight.copy_(proj.weight)
            bias: Any = student.patch.bias
            bias.copy_(proj.bias if proj.bias is not None else torch.zeros_like(bias))
        if vit.embed_dim != shape.width:
            return  # nothing fits: the student learns all of it, and reads the teacher's states off its own
        student.cls.copy_(vit.cls_token)
        student.position.copy_(resample_abs_pos_embed(vit.pos_embed, [shape.grid] * 2))
        head = vit.head
        if head.out_features != shape.classes:
            raise UsageError(f"the teacher's head has {head.out_features} classes, the student's {shape.classes}")
        student.head.weight.copy_(head.weight)
        student.head.bias.copy_(head.bias)
        if warm_start >= 0:
            _warm_start(vit, student, warm_start)


def _warm_start(vit: VisionTransformer, student: ODEViT, index: int) -> None:
    if index >= len(vit.blocks):
        raise UsageError(f"warm_start {index}: the teacher has blocks 0 to {len(vit.blocks) - 1}")
    block: Any = vit.blocks[index]
    attention, mlp = student.psi.attention, student.psi.mlp
    if attention.kind != "dot" or mlp.up.weight.shape != block.mlp.fc1.weight.shape:
        raise UsageError("warm_start needs dot-product attention and the teacher's own MLP ratio")
    query, key, value = block.attn.qkv.weight.chunk(3)
    for matrix, source in (
        (attention.query, query),
        (attention.key, key),
        (attention.value, value),
        (attention.output, block.attn.proj.weight),
        (mlp.up, block.mlp.fc1.weight),
        (mlp.down, block.mlp.fc2.weight),
    ):
        matrix.weight.copy_(source)
    attention.norm.weight.copy_(block.norm1.weight)
    mlp.norm.weight.copy_(block.norm2.weight)
    attention.norm.bias.copy_(block.norm1.bias)
    mlp.norm.bias.copy_(block.norm2.bias)
    if isinstance(block.ls1, LayerScale):
        attention.output.weight.mul_(block.ls1.gamma[:, None])
        mlp.down.weight.mul_(block.ls2.gamma[:, None])
