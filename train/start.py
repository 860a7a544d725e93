"""Starting from another bundle, of the same shape or a smaller one: what was learned is kept, what is new is added.

A wider MLP or a wider stem begins by giving what the narrower one gave, since its new units have no say yet. A stem of
another shape first learns to give what that of the other bundle gives, which needs neither psi nor a teacher. For
pictures of another size, the position embedding is resampled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from ..bundle import Architecture
from ..errors import UsageError
from .data import Batch, Pictures, loader
from .loop import Objective, Plan, Say, fit
from .model import ODEViT, plain

GROWN = {"psi.mlp.up.weight": (0,), "psi.mlp.mix.weight": (0,), "psi.mlp.down.weight": (1,)}  # where their units are


def mean_of(sources: Sequence[str]) -> ODEViT:
    """The mean of the weights of bundles: runs that began alike and ended apart do better in the middle."""
    first, *others = [ODEViT.from_pretrained(source) for source in sources]
    for source, other in zip(sources[1:], others):
        if (other.config.architecture, other.config.labels) != (first.config.architecture, first.config.labels):
            raise UsageError(f"training.start_with: {source} is not of the shape and the classes of {sources[0]}")
    states = [model.state_dict() for model in (first, *others)]
    first.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
    return first


def start_from(student: ODEViT, other: ODEViT) -> bool:
    """Copy the weights of a bundle, but for a head of other classes; False where the stem is new and has to learn."""
    wanted, given = student.config, other.config
    state, own = other.state_dict(), student.state_dict()
    if (wanted.labels, wanted.architecture.classes) != (given.labels, given.architecture.classes):
        state = {k: v for k, v in state.items() if not k.startswith("head.")}
    kept = _holds(wanted.architecture, given.architecture)
    if not kept:
        state = {k: v for k, v in state.items() if not k.startswith("patch.")}
    state["position"] = resample_abs_pos_embed(state["position"], [wanted.architecture.grid] * 2)
    stem = {k: (0, 1)[: state[k].dim()] for k in state if k.startswith("patch.")}  # outputs, and inputs of a kernel
    for name, axes in (GROWN | stem).items():
        if name in state and name in own:
            state[name] = _grown(state[name], own[name], axes)
    optional = ("head.",) if kept else ("head.", "patch.")
    for name in sorted({k for k in own if not k.startswith(optional)} | set(state)):
        if name not in state or name not in own or own[name].shape != state[name].shape:
            raise UsageError(f"training.start: {given.name} cannot become the recipe's model (see {name})")
    student.load_state_dict(state, strict=False)
    return kept


def _holds(wanted: Architecture, given: Architecture) -> bool:
    """Whether the one stem is the other, perhaps with more channels between its layers or for larger pictures."""
    pairs = list(zip(wanted.convolutions(), given.convolutions()))
    same = wanted.stem == given.stem and len(wanted.convolutions()) == len(given.convolutions()) == len(pairs)
    return same and all(new[2:4] == old[2:4] and new[0] >= old[0] and new[1] >= old[1] for new, old in pairs)


def _grown(old: Tensor, fresh: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The old units followed by new ones: as they were drawn where they write (axis 0), zero where they are read."""
    spread = [axis for axis in range(old.dim()) if old.shape[axis] != fresh.shape[axis]]
    if old.dim() != fresh.dim() or any(i not in axes or old.shape[i] > fresh.shape[i] for i in spread):
        return old  # differs by more than new units: the caller says so
    grown = fresh.clone()
    if 1 in spread:
        grown[:, old.shape[1] :] = 0
    grown[tuple(slice(n) for n in old.shape)] = old
    return grown


@torch.no_grad()
def with_norms(stack: nn.Sequential, batches: Iterable[Tensor]) -> nn.Sequential:
    """The stack with batch norms that change nothing yet: they undo what they measure on the given pixels."""
    layers: list[nn.Module] = []
    signals = list(batches)
    for layer in stack:
        layers.append(layer)
        signals = [layer(x) for x in signals]
        if isinstance(layer, nn.Conv2d):
            values = torch.cat([x.transpose(0, 1).flatten(1) for x in signals], 1)  # [C, images and places]
            norm = nn.BatchNorm2d(layer.out_channels)
            norm.running_mean, norm.running_var = values.mean(1), values.var(1)
            norm.weight.copy_((norm.running_var + norm.eps).sqrt())
            norm.bias.copy_(norm.running_mean)
            layers.append(norm)
    return nn.Sequential(*layers)


class Imitation(Objective):
    """A stem learns what another one gives for the same pixels, as a share of how much that varies."""

    def __init__(self, stem: nn.Module, other: nn.Module):
        super().__init__()
        self.net, self.weights = stem, {"missed": 1.0}
        self.other = [other.eval().requires_grad_(False)]  # in a list: not a part of what is trained

    def prepare(self, batch: Batch, view: int, step: int) -> tuple[Any, ...]:
        pixels = batch.pixel_values.contiguous(memory_format=torch.channels_last)
        return pixels, self.other[0].to(pixels.device)(pixels)

    def forward(self, pixels: Tensor, expected: Tensor) -> dict[str, Tensor]:
        return {"missed": missed(self.net(pixels), expected)}


def missed(found: Tensor, expected: Tensor) -> Tensor:
    """The part of the variance over images and places, of all channels together, that is not explained."""
    middle = expected.mean((0, 2, 3), keepdim=True)
    return (found - expected).square().sum() / (expected - middle).square().sum()


def imitate(
    stem: nn.Module,
    other: nn.Conv2d | nn.Sequential,
    machine: Accelerator,
    pictures: Pictures,
    held: Pictures,
    plan: Plan,
    folder: Path,
    say: Say,
) -> None:
    """Train a stem alone, to give what the other gives; `held` are pictures to judge it by."""
    objective = Imitation(stem, plain(other))

    @torch.no_grad()
    def explained(net: nn.Module) -> dict[str, float]:
        judged = copy.deepcopy(net).eval()
        parts = [
            missed(judged(pixels), expected).item()
            for pixels, expected in (objective.prepare(b, 0, 0) for b in loader(held, plan.batch_size))
        ]
        return {"explained": 1 - sum(parts) / len(parts)}

    fit(machine, objective, pictures, plan, folder, explained, lambda net, values: None, "explained", say)
