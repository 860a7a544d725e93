"""Starting from another bundle, of the same shape or a smaller one: what was learned is kept, what is new is added.

A wider MLP begins by giving what the narrower one gave, since its new units have no say yet. A stem of another shape
first learns to give what that of the other bundle gives, which needs neither psi nor a teacher.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..errors import UsageError
from .data import Batch, Pictures, loader
from .loop import Objective, Plan, Say, fit
from .model import ODEViT, plain

GROWN = {"psi.mlp.up.weight": 0, "psi.mlp.mix.weight": 0, "psi.mlp.down.weight": 1}  # and where their units are


def start_from(student: ODEViT, other: ODEViT) -> bool:
    """Copy the weights of a bundle, but for a head of other classes; False where the stem is new and has to learn."""
    wanted, given = student.config, other.config
    state, own = other.state_dict(), student.state_dict()
    if (wanted.labels, wanted.architecture.classes) != (given.labels, given.architecture.classes):
        state = {k: v for k, v in state.items() if not k.startswith("head.")}
    same = wanted.architecture.convolutions() == given.architecture.convolutions()
    if not same:
        state = {k: v for k, v in state.items() if not k.startswith("patch.")}
    for name, axis in GROWN.items():
        if name in state and name in own:
            state[name] = _grown(state[name], own[name], axis)
    optional = ("head.",) if same else ("head.", "patch.")
    for name in sorted({k for k in own if not k.startswith(optional)} | set(state)):
        if name not in state or name not in own or own[name].shape != state[name].shape:
            raise UsageError(f"training.start: {given.name} cannot become the recipe's model (see {name})")
    student.load_state_dict(state, strict=False)
    return same


def _grown(old: Tensor, fresh: Tensor, axis: int) -> Tensor:
    """The old units followed by new ones: as they were drawn where they read, zero where they write."""
    grown = fresh.clone() if axis == 0 else torch.zeros_like(fresh)
    kept = grown.narrow(axis, 0, min(old.shape[axis], fresh.shape[axis]))
    if kept.shape != old.shape:
        return old  # differs by more than new units: the caller says so
    kept.copy_(old)
    return grown


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
