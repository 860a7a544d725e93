"""Starting from another bundle, of the same shape or a smaller one: what was learned is kept, what is new is added.

A wider MLP or a wider stem begins by giving what the narrower one gave, since its new units have no say yet. A stem of
another shape first learns to give what that of the other bundle gives, which needs neither psi nor a teacher. For
pictures of another size, the position embedding is resampled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from ..config import Architecture
from ..errors import UsageError
from .batches import Batch, PictureDataset, loader
from .loop import Objective, Plan, fit
from .model import ODEViT, plain
from .progress import Say

GROWN = {"psi.mlp.up.weight": (0,), "psi.mlp.mix.weight": (0,), "psi.mlp.down.weight": (1,)}  # where their units are


def start_from(student: ODEViT, other: ODEViT) -> bool:
    """Copy the weights of a bundle; False where the stem is new and has to learn.

    Of a head for other classes, the rows of the classes that both have are copied.
    """
    wanted, given = student.config, other.config
    _check_shapes(wanted.architecture, given.architecture, given.name)
    state, own = other.state_dict(), student.state_dict()
    if (wanted.labels, wanted.architecture.classes) != (given.labels, given.architecture.classes):
        state |= _head(own, state, wanted.labels, given.labels)
    kept = _holds(wanted.architecture, given.architecture)
    if not kept:
        state = {k: v for k, v in state.items() if not k.startswith("patch.")}
    state["position"] = resample_abs_pos_embed(state["position"], [wanted.architecture.grid] * 2)
    stem = {k: (0, 1)[: state[k].dim()] for k in state if k.startswith("patch.")}  # outputs, and inputs of a kernel
    for name, axes in (GROWN | stem).items():
        if name in state and name in own:
            state[name] = _grown(state[name], own[name], axes)
    for name in sorted({k for k in own if kept or not k.startswith("patch.")} | set(state)):
        if name == "psi.mlp.mix.weight" and name not in state:
            continue  # begins as the identity
        if name not in state or name not in own or own[name].shape != state[name].shape:
            raise UsageError(f"training.start: {given.name} cannot become the recipe's model (see {name})")
    student.load_state_dict(state, strict=False)
    return kept


def _check_shapes(wanted: Architecture, given: Architecture, name: str) -> None:
    """What no weights can be carried over to is named, with the setting that would do."""
    for key in ("width", "heads", "registers", "attention", "channels"):
        old, new = getattr(given, key), getattr(wanted, key)
        if old != new:
            raise UsageError(
                f"training.start: {name} has {key} {old}, the recipe's model {new}, so its weights cannot be used: "
                f"set architecture.{key}={old!r}"
            )
    if given.convolution not in (0, wanted.convolution):
        raise UsageError(
            f"training.start: {name} has a convolution of {given.convolution} inside F, the recipe's model "
            f"{wanted.convolution or 'none'}: set architecture.convolution={given.convolution}"
        )


def _head(
    own: dict[str, Tensor], state: dict[str, Tensor], wanted: tuple[str, ...], given: tuple[str, ...]
) -> dict[str, Tensor]:
    """The student's head with the rows of the classes that the other has under the same name."""
    weight, bias = own["head.weight"].clone(), own["head.bias"].clone()
    for row, label in enumerate(wanted):
        if label in given:
            weight[row] = state["head.weight"][given.index(label)]
            bias[row] = state["head.bias"][given.index(label)]
    return {"head.weight": weight, "head.bias": bias}


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
    """The part of the variance over images and places, of all channels together, that is not explained.

    Patches of another size give another grid: what is expected is resampled to that which was found.
    """
    if expected.shape[-2:] != found.shape[-2:]:
        expected = F.interpolate(expected, found.shape[-2:], mode="bilinear", antialias=True)
    middle = expected.mean((0, 2, 3), keepdim=True)
    return (found - expected).square().sum() / (expected - middle).square().sum()


def imitate(
    stem: nn.Module,
    other: nn.Conv2d | nn.Sequential,
    machine: Accelerator,
    pictures: PictureDataset,
    held: PictureDataset,
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
            for pixels, expected in (
                objective.prepare(b._replace(pixel_values=b.pixel_values.to(machine.device)), 0, 0)
                for b in loader(held, plan.batch_size)
            )
        ]
        return {"explained": 1 - sum(parts) / len(parts)}

    fit(machine, objective, pictures, plan, folder, explained, lambda net, values: None, "explained", say)
