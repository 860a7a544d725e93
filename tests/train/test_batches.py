"""Batches: the same for the same (seed, epoch), whatever ran before; unreadable pictures counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from odevit_serve.config import Preprocessing
from odevit_serve.data.datasets import Images, open_splits
from odevit_serve.errors import UserError
from odevit_serve.train.batches import CropFlip, Order, PictureDataset, Unreadable, loader, set_epoch, transform

SPEC = Preprocessing((3, 16, 16), (0.5, 0.4, 0.3), (0.5, 0.25, 0.2), "bicubic", 0.875)


def images(count: int = 12, bad: tuple[int, ...] = ()) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 20, 24, 3), dtype=np.uint8)

    def read(i: int) -> Image.Image:
        if i in bad:
            raise OSError("truncated")
        return Image.fromarray(pixels[i])

    return Images([f"{i}.png" for i in range(count)], np.arange(count) % 3, ("a", "b", "c"), read, in_memory=True)


def test_the_evaluation_transform_is_timms() -> None:
    from timm.data import create_transform

    theirs = create_transform(
        SPEC.input_size, is_training=False, mean=SPEC.mean, std=SPEC.std, interpolation="bicubic", crop_pct=0.875
    )
    picture = images().read(0).resize((60, 45))
    grey = (transform(SPEC)(picture) - theirs(picture)).abs() * torch.tensor(SPEC.std).view(3, 1, 1) * 255
    assert grey.max() <= 1.01


@pytest.mark.parametrize("augment", ["none", "flip", "crop-flip", "trivial", "randaugment", "imagenet"])
def test_augmentation_is_a_function_of_seed_epoch_and_image(augment: str) -> None:
    first, second = (PictureDataset(images(), SPEC, augment, seed=3) for _ in range(2))
    first.epoch = second.epoch = 4
    torch.manual_seed(1)
    a = first[5][0]
    torch.manual_seed(2)
    second[1], second[7]
    torch.testing.assert_close(second[5][0], a, rtol=0, atol=0)
    if augment != "none":
        variants = []
        for epoch in range(8):
            first.epoch = epoch
            variants.append(first[5][0])
        assert any(not torch.equal(variants[0], other) for other in variants[1:])


def test_crop_flip_shows_windows_of_the_picture_with_its_border_reflected() -> None:
    pictures = images()
    whole = np.asarray(pictures.read(0).resize((19, 16), Image.Resampling.BICUBIC).crop((1, 0, 17, 16)))
    wide = np.pad(whole, ((2, 2), (2, 2), (0, 0)), mode="reflect")
    windows = [wide[top : top + 16, left : left + 16] for top in range(5) for left in range(5)]
    known = {window.tobytes() for window in windows} | {window[:, ::-1].tobytes() for window in windows}
    shown = CropFlip(16)
    torch.manual_seed(0)
    seen = {np.asarray(shown(Image.fromarray(whole))).tobytes() for _ in range(300)}
    assert seen <= known
    assert len(seen) == 50  # all of them come up


def view_at(pictures: PictureDataset, epoch: int) -> torch.Tensor:
    pictures.epoch = epoch
    return pictures[0][0]


def test_views_come_back_mirrored_every_second_time() -> None:
    pictures = PictureDataset(images(), SPEC, "crop-flip", views=3)
    first, other, again, later = (view_at(pictures, epoch) for epoch in (1, 2, 4, 7))
    torch.testing.assert_close(again, first.flip(-1), rtol=0, atol=0)
    torch.testing.assert_close(later, first, rtol=0, atol=0)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("augment", "views"), [("none", 3), (None, 3), ("crop-flip", 0)])
def test_nothing_is_mirrored_that_was_not_asked_for(augment: str | None, views: int) -> None:
    pictures = PictureDataset(images(), SPEC, augment, views=views)
    fresh = PictureDataset(images(), SPEC, augment)
    torch.testing.assert_close(view_at(pictures, 4), view_at(fresh, 4), rtol=0, atol=0)


def test_reading_does_not_disturb_the_global_random_state() -> None:
    pictures = PictureDataset(images(), SPEC, "trivial")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    pictures[0]
    torch.testing.assert_close(torch.rand(3), expected)


def test_the_order_is_a_permutation_by_seed_and_epoch() -> None:
    order = Order(10, 3, seed=1, shuffle=True)
    first = list(order)
    assert len(first) == len(order) == 3
    assert len({row for batch in first for row in batch}) == 9
    order.epoch = 1
    assert list(order) != first
    order.epoch = 0
    assert list(order) == first
    assert [row for batch in Order(10, 3, 1, shuffle=False) for row in batch] == list(range(10))


def test_workers_give_the_same_batches() -> None:
    batches = []
    for workers in (0, 2):
        pictures = PictureDataset(images(), SPEC, "crop-flip")
        data = loader(pictures, 4, shuffle=True, workers=workers)
        set_epoch(data, pictures, 2)
        batches.append([b.pixel_values for b in data])
    torch.testing.assert_close(batches[0], batches[1], rtol=0, atol=0)


def test_an_unreadable_picture_is_named_and_replaced() -> None:
    pictures = PictureDataset(images(bad=(3, 4)), SPEC)
    pixels, label, row, problem = pictures[3]
    assert (label, row) == (5 % 3, 3)
    assert problem == "3.png (OSError)"
    torch.testing.assert_close(pixels, pictures[5][0])
    with pytest.raises(UserError, match="none of the images"):
        PictureDataset(images(bad=tuple(range(12))), SPEC)[0]


def test_more_than_one_percent_unreadable_ends_the_run() -> None:
    said: list[str] = []
    counter = Unreadable(300, said.append)
    counter.add(["a (OSError)"])
    counter.add(["a (OSError)", "b (OSError)", "c (OSError)"])
    assert said == [f"unreadable, left out: {name} (OSError)" for name in "abc"]
    with pytest.raises(UserError, match="4 of 300 images cannot be read, more than 1%"):
        counter.add(["d (OSError)"])


def test_too_few_images_for_a_batch() -> None:
    with pytest.raises(UserError, match="12 training images do not fill one batch of 64"):
        loader(PictureDataset(images(), SPEC), 64, shuffle=True)


def test_unlabelled_pictures_have_label_minus_one() -> None:
    bare = dataclasses.replace(images(), labels=None, classes=())
    assert PictureDataset(bare, SPEC)[0][1] == -1


def test_real_imagenette_is_read_from_its_zip(real_data: Path) -> None:
    splits = open_splits(real_data / "imagenette.zip")
    assert (len(splits["train"]), len(splits["val"])) == (9469, 3925)
    spec = Preprocessing((3, 160, 160))
    assert PictureDataset(splits["val"], spec)[7][0].shape == (3, 160, 160)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.05, 20), min_size=1, max_size=40), st.integers(1, 16), st.integers(1, 80), st.integers(0, 5)
)
def test_weights_say_how_often_a_row_is_drawn(weights: list[float], size: int, draws: int, epoch: int) -> None:
    given = np.array(weights)
    order = Order(len(given), size, 3, True, given, draws)
    order.epoch = epoch
    rows = [row for batch in order for row in batch]
    assert all(len(batch) == size for batch in order)
    assert rows == [row for batch in order for row in batch]
    assert len(rows) == len(order) * size
    expected = given / given.sum() * len(rows)
    counts = np.bincount(rows, minlength=len(given))
    assert (np.abs(counts - expected) < 1 + 1e-6).all()


def test_pictures_of_all_sizes_look_alike_once_they_are_made_small() -> None:
    """How sharp a view is must not tell how large its picture was: it does with `photo`, it hardly does with
    `small-photo`.
    """
    spec = Preprocessing((3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    large = Image.fromarray(noise)
    stored = large.resize((32, 32), Image.Resampling.NEAREST)

    def detail(name: str, picture: Image.Image) -> float:
        """Mean difference of neighbouring pixels, over views."""
        view = transform(spec, name)
        torch.manual_seed(0)
        return float(np.mean([view(picture).diff(dim=-1).abs().mean() for _ in range(60)]))

    told, hidden = (detail(name, stored) / detail(name, large) for name in ("photo", "small-photo"))
    assert told > 2.0
    assert hidden < 1.5
