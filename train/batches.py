"""Pictures as training batches: augmentation, and an order that a resumed run repeats exactly.

Every random choice is a function of (seed, epoch, image), never of what ran before, so that a run can be cut at any
batch and go on as if nothing had happened, with any number of worker processes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torchvision.transforms import v2

from ..config import Preprocessing
from ..data.datasets import Images
from ..data.images import normalised, prepare
from ..errors import UserError

INTERPOLATION = {
    "nearest": v2.InterpolationMode.NEAREST,
    "bilinear": v2.InterpolationMode.BILINEAR,
    "bicubic": v2.InterpolationMode.BICUBIC,
    "lanczos": v2.InterpolationMode.LANCZOS,
}
TOLERATED = 0.01  # part of the images that may be unreadable


class Batch(NamedTuple):
    pixel_values: Tensor  # [B,3,H,W]
    labels: Tensor  # [B]; -1 where there are none
    rows: Tensor  # [B] position in the data
    unreadable: list[str]


MADE_SMALL = {"photo": 0.0, "mixed-photo": 0.5, "small-photo": 1.0}  # augmentation -> part of the larger pictures
FILTERS = tuple(Image.Resampling)  # nearest, box, bilinear, hamming, bicubic, lanczos
SMOOTH = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)


class Photo:
    """A random crop, resampled, compressed, blurred and sharpened at random, and mirrored.

    Pictures of different sets differ in sharpness, aliasing and compression, which tells the set, and a set has its own
    classes: what all share must not be told by them. So every picture is scaled down to a random size first, by a
    random filter, and up again. A part `small` of the larger pictures is first made as small as those of the smallest
    set, and as bad.
    """

    def __init__(self, size: int, scale: tuple[float, float] = (0.45, 1.0), least: float = 0.6, small: float = 0.0):
        self.size, self.scale, self.least, self.small = size, scale, least, small

    def __call__(self, picture: Image.Image) -> Image.Image:
        size = self.size
        if self.small and min(picture.size) > size and (self.small == 1 or _chance(self.small)):
            picture = _as_stored_small(picture, size)
        top, left, height, width = v2.RandomResizedCrop.get_params(picture, list(self.scale), [3 / 4, 4 / 3])
        side = size if _chance(0.25) else round(_between(self.least * size, size))
        box = (left, top, left + width, top + height)
        view = picture.resize((side, side), FILTERS[_below(len(FILTERS))], box=box)
        if _chance(0.25):
            view = view.filter(ImageFilter.GaussianBlur(_between(0.2, 1.0) * side / 64))
        elif _chance(0.25):
            view = view.filter(ImageFilter.UnsharpMask(_between(0.5, 1.5), round(_between(30, 120)), 0))
        if _chance(0.35):
            view = _recompressed(view, round(_between(35, 95)))
        if side != size:
            view = view.resize((size, size), SMOOTH[_below(len(SMOOTH))])
        for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            if _chance(0.4):
                view = change(view).enhance(_between(0.6, 1.4))
        return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if _chance(0.5) else view


class CropFlip:
    """A random crop of the picture with its border reflected, and mirrored; torchvision's takes three times as long."""

    def __init__(self, size: int):
        self.size, self.border = size, size // 8

    def __call__(self, picture: Image.Image) -> Image.Image:
        wide = np.pad(np.asarray(picture), ((self.border,) * 2, (self.border,) * 2, (0, 0)), mode="reflect")
        top, left = _below(2 * self.border + 1), _below(2 * self.border + 1)
        view = wide[top : top + self.size, left : left + self.size]
        return Image.fromarray(np.ascontiguousarray(view[:, ::-1] if _chance(0.5) else view))


def _as_stored_small(picture: Image.Image, size: int) -> Image.Image:
    """A picture as sets of small ones store it: often without antialiasing, and compressed."""
    scale = size / min(picture.size)
    filter = Image.Resampling.NEAREST if _chance(0.5) else FILTERS[_below(len(FILTERS))]
    small = picture.resize((max(size, round(scale * picture.width)), max(size, round(scale * picture.height))), filter)
    return _recompressed(small, round(_between(50, 95)))


def _chance(share: float) -> bool:
    return float(torch.rand(())) < share


def _between(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def _below(count: int) -> int:
    return int(torch.randint(count, ()))


def _recompressed(picture: Image.Image, quality: int) -> Image.Image:
    with io.BytesIO() as file:
        picture.save(file, "JPEG", quality=quality)
        with Image.open(file) as again:
            again.load()
            return again


def _augment(name: str, spec: Preprocessing) -> list[Any]:
    size, mode = spec.input_size[-1], INTERPOLATION[spec.interpolation]
    flip = v2.RandomHorizontalFlip()
    if name in MADE_SMALL:
        return [Photo(size, small=MADE_SMALL[name])]
    if name == "imagenet":
        return [v2.RandomResizedCrop(size, (0.35, 1.0), interpolation=mode), flip]
    whole = [v2.Resize(size, mode), v2.CenterCrop(size)]
    crop = v2.RandomCrop(size, padding=size // 8, padding_mode="reflect")
    return {
        "none": whole,
        "flip": [*whole, flip],
        "crop-flip": [*whole, CropFlip(size)],
        "trivial": [*whole, crop, flip, v2.TrivialAugmentWide()],
        "randaugment": [*whole, crop, flip, v2.RandAugment(2, 9)],
    }[name]


def transform(spec: Preprocessing, augment: str | None = None) -> Callable[[Image.Image], Tensor]:
    """PIL picture -> normalised tensor; `augment` None is the evaluation transform, the very one of serving."""
    if augment is None:
        return lambda picture: torch.from_numpy(prepare(picture, spec))
    change = v2.Compose(_augment(augment, spec))
    return lambda picture: torch.from_numpy(normalised(change(picture), spec))


class PictureDataset(Dataset[tuple[Tensor, int, int, str]]):
    """Images behind a transform. An unreadable one is named, and the next readable one stands in for it."""

    def __init__(self, images: Images, spec: Preprocessing, augment: str | None = None, seed: int = 0, views: int = 0):
        self.images, self.seed, self.views = images, seed, views
        self.random = augment is not None
        self.flips = augment not in (None, "none")
        self.transform = transform(spec, augment)
        self.weights: np.ndarray | None = None  # how often each is drawn, relative to the others; None: once an epoch
        self.draws = 0  # how many are drawn in an epoch; 0: as many as there are
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)

    @property
    def view(self) -> int:
        """Which augmented view of the images this epoch shows: a new one each time, or one of `views`."""
        return self.epoch % self.views if self.views else self.epoch

    @property
    def mirrored(self) -> bool:
        """Every second time that a remembered view comes round it is mirrored: what was said of it is taken to hold."""
        return self.flips and bool(self.views) and self.epoch // self.views % 2 == 1

    def __getitem__(self, row: int) -> tuple[Tensor, int, int, str]:
        problem = ""
        for index in chain(range(row, len(self)), range(row)):
            try:
                picture = self.images.read(index)
            except Exception as error:  # decoders fail in every way there is
                reason = error if isinstance(error, UserError) else type(error).__name__
                problem = problem or f"{self.images.names[index]} ({reason})"
                continue
            label = -1 if self.images.labels is None else int(self.images.labels[index])
            if not self.random:
                return self.transform(picture), label, row, problem
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(_mix(self.seed, self.view, index))  # not the GPUs': 3 ms an image
                pixels = self.transform(picture)
            return pixels.flip(-1) if self.mirrored else pixels, label, row, problem
        raise UserError("none of the images can be read")


def _mix(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def collate(samples: list[tuple[Tensor, int, int, str]]) -> Batch:
    pixels, labels, rows, problems = zip(*samples)
    return Batch(torch.stack(pixels), torch.tensor(labels), torch.tensor(rows), [p for p in problems if p])


class Order(BatchSampler):
    """Batches in an order given by (seed, epoch); the last incomplete batch of a shuffled epoch is dropped.

    With weights, `draws` rows an epoch are drawn as often as their weights say, or one time more or less.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        weights: np.ndarray | None = None,
        draws: int = 0,
    ):
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.weights, self.draws = weights, draws or count
        self.drop_last, self.epoch = shuffle, 0
        self.sampler = range(count)

    def __len__(self) -> int:
        if self.weights is not None:
            return max(1, self.draws // self.batch_size)
        return self.count // self.batch_size if self.shuffle else -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rows = np.arange(self.count)
        random = np.random.default_rng((self.seed, self.epoch))
        if self.weights is not None:
            rows = _drawn(self.weights, len(self) * self.batch_size, random)
        elif self.shuffle:
            rows = random.permutation(self.count)
        for start in range(len(self)):
            yield rows[start * self.batch_size : (start + 1) * self.batch_size].tolist()


def _drawn(weights: np.ndarray, draws: int, random: np.random.Generator) -> np.ndarray:
    """Systematic sampling: each row comes up its expected number of times, rounded up or down, in random order."""
    order = random.permutation(len(weights))
    ends = np.cumsum(weights[order])
    places = (np.arange(draws) + random.random()) / draws * ends[-1]
    return random.permutation(order[np.searchsorted(ends, places, side="right").clip(max=len(order) - 1)])


def loader(
    pictures: PictureDataset, batch_size: int, seed: int = 0, shuffle: bool = False, workers: int = -1
) -> DataLoader[Batch]:
    if shuffle and pictures.weights is None and len(pictures) < batch_size:
        raise UserError(f"{len(pictures)} training images do not fill one batch of {batch_size}")
    if workers < 0:
        workers = 0 if pictures.images.in_memory else min(4, os.cpu_count() or 1)
    source: Any = pictures  # its samples are single; `collate` makes the batches
    return DataLoader(
        source,
        batch_sampler=Order(
            len(pictures), batch_size, seed, shuffle, pictures.weights if shuffle else None, pictures.draws
        ),
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=False,
    )


def set_epoch(data: DataLoader[Batch], pictures: PictureDataset, epoch: int) -> None:
    pictures.epoch = epoch
    order = data.batch_sampler
    while not isinstance(order, Order):  # accelerate wraps it
        order = order.batch_sampler  # type: ignore[union-attr]
    order.epoch = epoch


class Unreadable:
    """Counts the pictures that could not be read, and ends the run when they are too many."""

    def __init__(self, total: int, say: Callable[[str], None]):
        self.total, self.say, self.names = total, say, set[str]()

    def add(self, names: list[str]) -> None:
        for name in sorted(set(names) - self.names):
            self.names.add(name)
            self.say(f"unreadable, left out: {name}")
            if len(self.names) > TOLERATED * self.total:
                raise UserError(
                    f"{len(self.names)} of {self.total} images cannot be read, more than {TOLERATED:.0%}; "
                    f"the last was {name}"
                )
