"""Plug and play: the blocks of any plain ViT replaced by one psi that is integrated over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from ..config import Architecture, Integration
from ..errors import UsageError, UserError
from ..solvers import advance
from .model import Psi

ViT = TypeVar("ViT", bound=nn.Module)


class ODELayer(nn.Module):
    """All blocks of a ViT as one: x' = psi(x), from time 0 to the number of blocks that it stands for."""

    def __init__(self, shape: Architecture, integration: Integration):
        super().__init__()
        self.psi, self.integration = Psi(shape), integration

    def trajectory(self, x: Tensor) -> Iterator[Tensor]:
        """The states after step 1, 2, ..., N."""
        own, memory = self.integration, list[Tensor]()
        for _ in range(own.steps):
            x, _, memory = advance(self.psi.fields, x, own.step_size, memory, own.solver, own.splitting)
            yield x

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        if any(isinstance(value, Tensor) for value in (*more, *named.values())):
            raise UsageError("psi takes the state alone: this ViT also hands its blocks a mask or position embedding")
        for state in self.trajectory(x):
            x = state
        return x


def ode_layer(
    vit: ViT, steps: int | None = None, solver: str = "euler", splitting: str = "parallel", attention: str = "dot"
) -> ViT:
    """Replace the blocks of a timm or transformers ViT by one psi, in place; gives the ViT back.

    Embedding, norm and head stay as they are. Time is counted in the blocks that were there; `steps` defaults to their
    number. Psi is new, so train it; `freeze_rest` leaves everything else as it is.
    """
    parent, name, blocks = _blocks(vit)
    block = blocks[0]
    norm = next((m for m in block.modules() if isinstance(m, nn.LayerNorm)), None)
    heads = next(
        (n for m in block.modules() for key in ("num_heads", "num_attention_heads") if (n := getattr(m, key, 0))), 0
    )
    if norm is None or not heads:
        raise UserError(f"{type(block).__name__} is not a block that psi can replace: it has no LayerNorm or no heads")
    width = norm.normalized_shape[-1]
    wide = [m.out_features for part, m in block.named_modules() if isinstance(m, nn.Linear) and _widens(part)]
    shape = Architecture(
        width=width, heads=int(heads), mlp_ratio=wide[0] / width if wide else 4.0, classes=1, attention=attention
    )
    layer = ODELayer(shape, Integration(float(len(blocks)), steps or len(blocks), solver, splitting))
    here = next(block.parameters())
    layer.to(here.device, here.dtype).train(vit.training)
    setattr(parent, name, type(blocks)(layer) if isinstance(blocks, nn.Sequential) else nn.ModuleList([layer]))
    return vit


def find_layer(vit: nn.Module) -> ODELayer:
    """The layer that `ode_layer` put in."""
    for module in vit.modules():
        if isinstance(module, ODELayer):
            return module
    raise UsageError(f"this {type(vit).__name__} has no ODELayer: call ode_layer on it first")


def freeze_rest(vit: nn.Module) -> None:
    """Train psi alone, and keep what the ViT already knows."""
    vit.requires_grad_(False)
    find_layer(vit).requires_grad_(True)


def _widens(part: str) -> bool:
    """Whether a linear map of a block, by its name, is the first one of its MLP."""
    return part.endswith(("fc1", "intermediate.dense", "weights_in", "w1"))


def _blocks(vit: nn.Module) -> tuple[nn.Module, str, nn.Sequential | nn.ModuleList]:
    """The one stack of equal blocks with attention, and where it is."""
    found: list[tuple[nn.Module, str, Any]] = []
    for parent in vit.modules():
        for name, stack in parent.named_children():
            if not isinstance(stack, nn.Sequential | nn.ModuleList) or not len(stack):
                continue
            kinds = {type(block) for block in stack}
            if len(kinds) == 1 and any(hasattr(stack[0], key) for key in ("attn", "attention")):
                found.append((parent, name, stack))
    if len(found) != 1:
        raise UserError(f"{type(vit).__name__} has {len(found)} stacks of attention blocks; a plain ViT has one")
    return found[0]
