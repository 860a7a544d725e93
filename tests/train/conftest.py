"""A small teacher on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer


@pytest.fixture(scope="module")
def teacher_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=3, num_heads=1, mlp_ratio=2, num_classes=7)
    path = tmp_path_factory.mktemp("teacher") / "vit.safetensors"
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_file(vit.state_dict(), path)
    return path
