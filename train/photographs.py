"""Somebody's folder of photographs, looked through before any work: what cannot be used is named, copies are found.

Every picture is decoded once. What the model sees of it and a small copy for augmentation stay in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..config import Division, Preprocessing
from ..data.datasets import SPLITS, Images, open_splits
from ..data.division import divide
from ..data.images import SUFFIXES, prepare
from ..errors import UserError
from .progress import Say, counted

# Endings of files that hold pictures which Pillow does not read.
FOREIGN = frozenset(
    {".heic", ".heif", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raw", ".psd", ".svg", ".jxl"}
)
ROLES = ("calibration", "validation", "train")  # of two copies, the one in the earlier of these is used
CROPS = 1.5  # short side of the copies for augmentation, in sides of what the model sees
MEMORY = 2 * 2**30  # bytes of such copies that are held; beyond that pictures are read again
NAMED = 3  # examples in a sentence


@dataclass(frozen=True)
class Part:
    """Photographs of one role: to learn from, to choose the model by, or to calibrate and measure it."""

    images: Images  # as they are on disk
    small: Images  # their copies in memory
    pixels: np.ndarray  # uint8 [n,3,H,W]: what the model sees

    def __len__(self) -> int:
        return len(self.images)

    @property
    def labels(self) -> np.ndarray:
        assert self.images.labels is not None
        return self.images.labels

    def batches(self, spec: Preprocessing, size: int = 64) -> Iterator[Tensor]:
        """Normalised pixels, the very numbers that `prepare` gives."""
        mean, std = (np.array(x, np.float32).reshape(-1, 1, 1) for x in (spec.mean, spec.std))
        for start in range(0, len(self), size):
            part = self.pixels[start : start + size].astype(np.float32)
            yield torch.from_numpy(((part / 255 - mean) / std).astype(np.float32))


class _Look(NamedTuple):
    small: Image.Image | None
    pixels: np.ndarray
    digest: bytes
    problem: str


def open_parts(source: str, division: Division, say: Say) -> tuple[dict[str, Images], Division]:
    """The labelled parts of a source and how they were drawn; whatever cannot work ends here, in one sentence."""
    splits = open_splits(source)
    _name_foreign(source, say)
    if "train" not in splits:
        raise UserError(f"{source} has no photographs to learn from, only {', '.join(splits)}")
    whole = splits["train"]
    if whole.labels is None or len(whole.classes) < 2:
        raise UserError(
            f"{source} has no two class folders: put the photographs of each class into a folder of its own"
        )
    for name in whole.classes:
        if not name.isprintable() or not name.strip():
            raise UserError(f"the folder name {name!r} is not text that can be shown: rename it")
    counts = np.bincount(whole.labels)
    if counts.max() < 3 and not ("val" in splits and division.own_validation):
        raise UserError(f"{source}: no class has 3 photographs, so that none can be set aside to judge the model by")
    try:
        parts = divide(splits, division, source)
    except UserError:  # too few for a third part
        division = dataclasses.replace(division, calibration=0.0)
        parts = {**divide(splits, division, source), "calibration": whole.subset([])}
    low, high = int(counts.argmin()), int(counts.argmax())
    each = f"{counts[low]:,} each"
    if counts[low] < counts[high]:
        each = f"from {counts[low]:,} ({whole.classes[low]}) to {counts[high]:,} ({whole.classes[high]}) in a class"
    say(f"{len(whole):,} photographs of {len(whole.classes):,} classes, {each}")
    if counts[high] > 2 * counts[low]:
        say("classes differ in size: each is drawn equally often and counts the same in the choice of the model")
    return {role: parts[role] for role in ROLES}, division


def _name_foreign(source: str, say: Say) -> None:
    """Say which files Pillow does not read; a class folder that has no others ends the run."""
    names = _names(Path(source))
    foreign = [name for name in names if name.suffix.lower() in FOREIGN]
    if not foreign:
        return
    split = {alias for aliases in SPLITS.values() for alias in aliases}

    def folders(name: PurePosixPath) -> list[PurePosixPath]:
        return [parent for parent in name.parents if parent.parts and str(parent) not in split]

    used = {folder for name in names if name.suffix.lower() in SUFFIXES for folder in folders(name)}
    endings = ", ".join(sorted({name.suffix.lower() for name in foreign}))
    for name in foreign:
        if folders(name) and not used.intersection(folders(name)):
            raise UserError(f"{name.parent} has no picture that Pillow reads, only {endings}: convert them to JPEG")
    say(f"left out, since Pillow does not read {endings}: {_listed([str(name) for name in foreign])}")


def _names(path: Path) -> list[PurePosixPath]:
    if path.is_dir():
        found = [Path(folder, name) for folder, _, files in os.walk(path, followlinks=True) for name in files]
        return [PurePosixPath(file.relative_to(path).as_posix()) for file in found if not file.name.startswith(".")]
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return [PurePosixPath(name) for name in archive.namelist()]
    return []


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def look_through(parts: dict[str, Images], spec: Preprocessing, say: Say) -> dict[str, Part]:
    """Read every picture once; broken ones and copies are said and left out."""
    looks: dict[str, list[_Look]] = {}
    room = MEMORY
    with (
        counted(say, "reading", sum(map(len, parts.values()))) as advance,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        for role, images in parts.items():
            found = looks[role] = []
            for start in range(0, len(images), 64):
                rows = range(start, min(start + 64, len(images)))
                for look in pool.map(lambda row, images=images: _look(images, row, spec), rows):
                    room -= 0 if look.small is None else 3 * look.small.width * look.small.height
                    found.append(look if room > 0 else look._replace(small=None))
                advance(len(rows))
    kept = _without_copies(parts, looks, say)
    made = {role: _part(images, looks[role], kept[role]) for role, images in parts.items()}
    missing = set(range(len(parts["train"].classes))) - set(made["train"].labels.tolist())
    if missing:
        names = [parts["train"].classes[i] for i in sorted(missing)]
        raise UserError(f"no photograph that can be used is left to learn from in {_listed(names)}")
    if not len(made["validation"]):
        raise UserError("no photograph that can be used is left to choose the model by")
    unseen = sorted(set(made["train"].labels.tolist()) - set(made["validation"].labels.tolist()))
    if unseen:
        names = [parts["train"].classes[i] for i in unseen]
        say(f"warning: nothing is set aside to choose the model by in {_listed(names)}: too few photographs")
    return made


def _look(images: Images, row: int, spec: Preprocessing) -> _Look:
    try:
        picture = images.read(row).convert("RGB")
        seen = prepare(picture, spec)
    except Exception as error:  # decoders fail in every way there is
        return _Look(None, np.empty(0), b"", str(error) if isinstance(error, UserError) else type(error).__name__)
    digest = hashlib.blake2b(f"{picture.size}".encode() + picture.tobytes(), digest_size=16).digest()
    mean, std = (np.array(x, np.float32).reshape(-1, 1, 1) for x in (spec.mean, spec.std))
    pixels = np.rint((seen * std + mean) * 255).astype(np.uint8)
    scale = CROPS * max(spec.input_size[1:]) / min(picture.size)
    if scale < 1:
        size = (max(1, round(scale * picture.width)), max(1, round(scale * picture.height)))
        picture = picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
    return _Look(picture, pixels, digest, "")


def _without_copies(parts: dict[str, Images], looks: dict[str, list[_Look]], say: Say) -> dict[str, list[int]]:
    """The rows of each part that are used: those that could be read, each content once, none in two classes."""
    first: dict[bytes, tuple[str, int]] = {}
    kept: dict[str, list[int]] = {role: [] for role in parts}
    broken, copies, torn = [], [], []
    for role in ROLES:
        images = parts[role]
        assert images.labels is not None
        for row, look in enumerate(looks[role]):
            if look.problem:
                broken.append(f"{images.names[row]} ({look.problem.removeprefix(images.names[row]).strip()})")
                continue
            where = first.setdefault(look.digest, (role, row))
            if where == (role, row):
                kept[role].append(row)
                continue
            other, labels = parts[where[0]], parts[where[0]].labels
            assert labels is not None
            pair = f"{images.names[row]} is {other.names[where[1]]}"
            if labels[where[1]] == images.labels[row]:
                copies.append(pair)
                continue
            torn.append(pair)
            if where[1] in kept[where[0]]:
                kept[where[0]].remove(where[1])
    if broken:
        say(f"{len(broken):,} cannot be read and are left out: {_listed(broken)}")
    if copies:
        say(f"{len(copies):,} copies are left out, so that nothing is both learned and judged: {_listed(copies)}")
    if torn:
        say(f"{len(torn):,} pictures are in two classes and left out of both: {_listed(torn)}")
    return kept


def _part(images: Images, looks: list[_Look], kept: list[int]) -> Part:
    own = images.subset(kept)
    copies = [looks[row].small for row in kept]
    shape = looks[kept[0]].pixels.shape if kept else (3, 1, 1)
    pixels = np.stack([looks[row].pixels for row in kept]) if kept else np.empty((0, *shape), np.uint8)

    def read(row: int) -> Image.Image:
        small = copies[row]
        return own.read(row) if small is None else small

    return Part(own, dataclasses.replace(own, read=read, in_memory=all(c is not None for c in copies)), pixels)


def largest_share(labels: np.ndarray) -> float:
    """What answering the largest class alone would get."""
    return max(Counter(labels.tolist()).values()) / len(labels)
