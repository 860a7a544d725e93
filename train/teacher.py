"""The pretrained ViT that a student follows: its states, its head, when each layer is due, its remembered answers.

Whatever its source, a teacher is held as timm's VisionTransformer, so that other image and patch sizes, heads and
fine-tuning are the same for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..config import Preprocessing, TeacherFacts
from ..data.datasets import Images
from ..errors import UsageError, UserError
from ..files import PART, atomic
from .batches import PictureDataset
from .class_names import class_rows


class Teacher(nn.Module):
    """A plain ViT with a CLS token. `forward` gives logits, `states` what the student is to follow."""

    def __init__(self, vit: VisionTransformer, facts: TeacherFacts, preprocessing: Preprocessing | None = None):
        super().__init__()
        self.vit, self.facts, self.preprocessing = vit, facts, preprocessing

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.vit(self.sized(pixel_values))
        return logits

    def sized(self, pixel_values: Tensor) -> Tensor:
        """The pictures in the size that the teacher is for."""
        own: Any = self.vit.patch_embed.img_size
        if pixel_values.shape[-2:] == own:
            return pixel_values
        return F.interpolate(pixel_values, own, mode="bicubic", antialias=True)

    def hidden(self, pixel_values: Tensor) -> list[Tensor]:
        """States [B,1+M,D] after the embedding and after each layer."""
        states = [self.vit._pos_embed(self.vit.patch_embed(self.sized(pixel_values)))]
        for block in self.vit.blocks:
            states.append(block(states[-1]))
        return states

    def states(self, pixel_values: Tensor) -> list[Tensor]:
        """What the student is to follow: the hidden states, the last one normalised, as the head reads it."""
        states = self.hidden(pixel_values)
        states[-1] = self.vit.norm(states[-1])
        return states

    def answer(self, cls: Tensor) -> Tensor:
        logits: Tensor = self.vit.head(cls)
        return logits

    def at(self, pixel_values: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """CLS after the given layers [B,layers,D], and logits [B,C]."""
        states = self.states(pixel_values)
        return torch.stack([states[layer][:, 0] for layer in layers], 1), self.answer(states[-1][:, 0])

    def digest(self) -> str:
        """Of all weights, the head included."""
        known = hashlib.sha256()
        for name, value in self.vit.state_dict().items():
            known.update(name.encode() + value.detach().cpu().numpy().tobytes())
        return known.hexdigest()

    def save(self, path: Path) -> None:
        """Weights in timm's names, as a file that `--teacher-weights` takes."""
        with atomic(path) as scratch:
            save_file({k: v.detach().cpu().contiguous().clone() for k, v in self.vit.state_dict().items()}, scratch)


def choose_classes(teacher: Teacher, classes: Sequence[str]) -> None:
    """Cut the teacher's own head down to the given of its classes, by index or by ImageNet name."""
    head = teacher.vit.head
    if not isinstance(head, nn.Linear):
        raise UserError(f"{teacher.facts.name} has no head to choose classes from: use head = 'probe' or 'finetune'")
    rows = class_rows(classes, head.out_features)
    small = nn.Linear(head.in_features, len(rows))
    with torch.no_grad():
        small.weight.copy_(head.weight[rows])
        small.bias.copy_(head.bias[rows])
    teacher.vit.head = small
    teacher.vit.num_classes = len(rows)


def new_head(teacher: Teacher, classes: int) -> None:
    """A fresh linear head, to be trained as a probe or together with the rest."""
    head = nn.Linear(teacher.facts.width, classes)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    teacher.vit.head = head
    teacher.vit.num_classes = classes


@torch.no_grad()
def layer_distances(teacher: Teacher, batches: Sequence[Tensor]) -> np.ndarray:
    """Mean distance between the CLS of consecutive layers, over the given batches.

    The last layer is taken before its normalisation, which changes the scale and would claim most of the time.
    """
    total = np.zeros(teacher.facts.layers)
    count = 0
    for pixels in batches:
        cls = torch.stack([state[:, 0] for state in teacher.hidden(pixels)])
        total += (cls[1:] - cls[:-1]).norm(dim=-1).sum(1).double().cpu().numpy()
        count += len(pixels)
    return total / count


def layer_times(
    distances: np.ndarray, horizon: float, temperature: float = 1.0, layers: Sequence[int] = ()
) -> dict[int, float]:
    """Teacher layer -> time by which it should be reached: the horizon is shared by a softmax of the distances.

    Times rise with the layers, and the last layer is reached at the horizon.
    """
    share = np.exp((distances - distances.max()) / (temperature * distances.mean()))
    when = np.minimum(np.cumsum(share / share.sum()), 1.0) * horizon  # of rounded shares the sum may exceed 1
    depth = len(distances)
    wanted = set(layers) | {depth} if layers else set(range(1, depth + 1))
    unknown = sorted(wanted - set(range(1, depth + 1)))
    if unknown:
        raise UsageError(f"teacher.layers names layer {unknown[0]} of a teacher with {depth}")
    return {layer: float(horizon if layer == depth else when[layer - 1]) for layer in sorted(wanted)}


def on_grid(times: Mapping[int, float], steps: int) -> dict[int, int]:
    """Step -> layer it should have reached, on a grid of so many steps: the one that ends nearest to the layer's time.

    Where several layers fall on one step, the deepest is kept, so that the schedule is strictly rising.
    """
    horizon = max(times.values())
    return {max(1, min(steps, round(time / horizon * steps))): layer for layer, time in sorted(times.items())}


class TeacherCache:
    """What a teacher said of each image (of `views` augmented views of it), kept on disk as it is first computed.

    `key` stands for everything that decides an answer: another key is another folder, so that no answer of another
    teacher, augmentation, seed or list of layers is ever taken for this one's.
    """

    def __init__(self, folder: Path, key: object, images: int, views: int, layers: int, width: int, classes: int):
        rows = images * views
        whole = [key, rows, layers, width, classes]  # arrays of another shape are other files, too
        name = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.folder, self.images = folder / name, images
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known = self._array("known", (rows,), np.bool_)
        self.cls = self._array("cls", (rows, layers, width), np.float16)
        self.logits = self._array("logits", (rows, classes), np.float32)

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A file of zeros where there is none yet; of several processes that ask at once, one makes it."""
        path = self.folder / f"{name}.npy"
        if not path.exists():
            scratch = path.with_name(f".{name}.{os.getpid()}{PART}")
            try:
                np.lib.format.open_memmap(scratch, mode="w+", dtype=dtype, shape=shape)
                if hasattr(os, "posix_fallocate"):  # a disk that is full later would end the process without a word
                    with scratch.open("rb+") as file:
                        os.posix_fallocate(file.fileno(), 0, scratch.stat().st_size)
                with contextlib.suppress(FileExistsError):
                    os.link(scratch, path)
            except OSError as error:
                size = math.prod(shape) * np.dtype(dtype).itemsize
                raise UserError(
                    f"{path} could not be written: the teacher's answers take {size:,} bytes ({error.strerror})"
                ) from None
            finally:
                scratch.unlink(missing_ok=True)
        return np.lib.format.open_memmap(path, mode="r+")

    def answer(self, rows: Tensor, view: int, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """CLS states [B,layers,D] and logits [B,C], from disk if all of the batch is there."""
        where = view * self.images + rows.cpu().numpy()
        if not self.known[where].all():
            cls, logits = compute()
            self.cls[where], self.logits[where] = cls.half().cpu().numpy(), logits.float().cpu().numpy()
            self.known[where] = True  # last: a row is known only once it is whole
        device = rows.device
        return torch.from_numpy(self.cls[where]).float().to(device), torch.from_numpy(self.logits[where]).to(device)


class WholePictures:
    """Asks about rows of the data, each picture whole and in the teacher's own size.

    Those without labels may have a teacher of their own.
    """

    def __init__(self, images: Images, seen: Sequence[tuple[Teacher, Preprocessing]], layers: Sequence[int]):
        self.labels, self.layers = images.labels, list(layers)
        self.seen = [(teacher, PictureDataset(images, spec)) for teacher, spec in seen]

    def __call__(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """CLS states [B,layers,D] and logits [B,C]."""
        if self.labels is None or len(self.seen) == 1:
            kinds = np.zeros(len(rows), bool)
        else:
            kinds = self.labels[rows.cpu().numpy()] < 0
        parts, order = [], []
        for kind, (teacher, pictures) in enumerate(self.seen):
            where = np.flatnonzero(kinds == bool(kind))
            if len(where):
                pixels = torch.stack([pictures[int(rows[i])][0] for i in where]).to(device)
                parts.append(teacher.at(pixels, self.layers))
                order.append(where)
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(device)
        cls, logits = (torch.cat(both)[back] for both in zip(*parts))
        return cls, logits


def with_accuracy(facts: TeacherFacts, accuracy: float | None, note: str = "") -> TeacherFacts:
    return dataclasses.replace(facts, accuracy=accuracy, note=note or facts.note)
