"""`ode_layer` on the real ViTs of timm and transformers: plain, with registers, and with LayerScale as in DINOv2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2ForImageClassification, ViTForImageClassification
from transformers import Dinov2WithRegistersConfig as RegistersConfig
from transformers import Dinov2WithRegistersForImageClassification as RegistersModel
from transformers import ViTConfig as PlainConfig

from odevit_serve.errors import UserError
from odevit_serve.train.ode_layer import find_layer, freeze_rest, ode_layer

SHAPE: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 4, "image_size": 16, "patch_size": 4,
    "num_labels": 5,
}  # fmt: skip


def from_timm(**more: Any) -> nn.Module:
    return VisionTransformer(16, 4, embed_dim=24, depth=4, num_heads=3, mlp_ratio=2, num_classes=5, **more)


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "timm, plain": from_timm,
    "timm, registers": lambda: from_timm(reg_tokens=4, no_embed_class=True),
    "timm, LayerScale": lambda: from_timm(init_values=1e-5),
    "transformers, plain": lambda: ViTForImageClassification(PlainConfig(**SHAPE, intermediate_size=48)),
    "transformers, registers": lambda: RegistersModel(RegistersConfig(**SHAPE, mlp_ratio=2)),
    "transformers, LayerScale": lambda: Dinov2ForImageClassification(Dinov2Config(**SHAPE, mlp_ratio=2)),
}


def logits(vit: nn.Module, pixels: Tensor) -> Tensor:
    output = vit(pixels)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_one_psi_takes_the_place_of_the_blocks(kind: str) -> None:
    torch.manual_seed(0)
    vit = ARCHITECTURES[kind]().eval()
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    assert ode_layer(vit, steps=6) is vit
    layer = find_layer(vit)
    assert (layer.integration.horizon, layer.integration.steps) == (4.0, 6)
    assert layer.psi.mlp.up.weight.shape == (48, 24)
    assert layer.psi.attention.heads == 3
    after = vit.state_dict()
    kept = [name for name in after if ".psi." not in name]
    assert any("head" in name or "classifier" in name for name in kept)
    assert all(torch.equal(after[name], before[name]) for name in kept)  # embedding, norm and head
    assert not any(".1." in name for name in after if "block" in name or "layer." in name or "layers." in name)

    # The state enters at the first block and leaves after the last: what is computed is the trajectory of psi.
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    with torch.no_grad():
        answer = logits(vit, torch.randn(2, 3, 16, 16))
        x = seen[0]
        for _ in range(6):
            x = x + 4 / 6 * layer.psi(x)
    handle.remove()
    assert answer.shape == (2, 5)
    assert torch.allclose(seen[1], x, atol=1e-5)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_psi_learns_and_the_rest_stays(kind: str) -> None:
    torch.manual_seed(0)
    vit = ode_layer(ARCHITECTURES[kind]().eval())
    with torch.no_grad():  # heads start near zero, and then tell psi nothing
        head = next(m for m in reversed(list(vit.modules())) if isinstance(m, nn.Linear) and m.out_features == 5)
        head.weight.normal_()
    freeze_rest(vit)
    own = [value for value in vit.parameters() if value.requires_grad]
    assert {id(value) for value in own} == {id(value) for value in find_layer(vit).parameters()}
    optimizer = torch.optim.Adam(own, 1e-2)
    pixels, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 5
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(logits(vit, pixels), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_solvers_and_attention_of_the_toolkit() -> None:
    vit = ode_layer(from_timm().eval(), steps=3, solver="ab2", splitting="strang", attention="l2")
    assert vit(torch.randn(1, 3, 16, 16)).isfinite().all()
    with pytest.raises(UserError, match="unknown solver 'magic'"):
        ode_layer(from_timm(), solver="magic")


def test_what_is_no_plain_vit() -> None:
    with pytest.raises(UserError, match="ResNet has 0 stacks of attention blocks"):
        ode_layer(timm.create_model("resnet10t"))
    with pytest.raises(UserError, match=r"SwinTransformer has \d stacks"):
        ode_layer(timm.create_model("swin_s3_tiny_224", depths=(1, 1, 2, 1)))
    rotary = ode_layer(timm.create_model("vit_small_patch16_rope_224", depth=2, num_classes=5))
    with pytest.raises(UserError, match="takes the state alone"):  # its position embedding goes into each block
        rotary(torch.randn(1, 3, 224, 224))
    with pytest.raises(UserError, match="call ode_layer on it first"):
        find_layer(from_timm())
