"""Teachers: their states, their heads, the schedule of their layers, their remembered answers."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from odevit_serve import costs
from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.data.datasets import Images
from odevit_serve.data.images import prepare
from odevit_serve.errors import UsageError, UserError
from odevit_serve.train.model import ODEViT
from odevit_serve.train.recipe import Teaching
from odevit_serve.train.teacher import (
    TeacherCache,
    WholePictures,
    choose_classes,
    layer_distances,
    layer_times,
    new_head,
    on_grid,
)
from odevit_serve.train.teacher_copy import copy_into
from odevit_serve.train.teacher_sources import load_teacher

SHAPE = Architecture(16, 4, 64, 1, 2.0, 7)  # of the teacher in conftest.py


@torch.no_grad()
def test_the_last_state_is_the_one_the_head_reads(teacher_weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), SHAPE).eval()
    pixels = torch.randn(2, 3, 16, 16)
    states = teacher.states(pixels)
    assert len(states) == 4
    torch.testing.assert_close(teacher.answer(states[-1][:, 0]), teacher(pixels))
    torch.testing.assert_close(states[2], teacher.hidden(pixels)[2])
    assert (teacher.facts.layers, teacher.facts.width, teacher.facts.heads, teacher.facts.mlp_ratio) == (3, 64, 1, 2.0)


def test_facts_count_the_teachers_parameters(teacher_weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), SHAPE)
    assert costs.teacher_parameters(teacher.facts, SHAPE) == sum(p.numel() for p in teacher.parameters())


@torch.no_grad()
def test_a_teacher_can_see_the_pictures_in_a_size_of_its_own(teacher_weights: Path) -> None:
    shape = dataclasses.replace(SHAPE, image_size=8)
    plain = load_teacher(Teaching(weights=str(teacher_weights)), SHAPE).eval()
    teacher = load_teacher(Teaching(weights=str(teacher_weights), image_size=16), shape).eval()
    small = torch.randn(2, 3, 8, 8)
    large = torch.nn.functional.interpolate(small, (16, 16), mode="bicubic", antialias=True)
    torch.testing.assert_close(teacher(small), plain(large))
    torch.testing.assert_close(teacher.states(small)[-1], plain.states(large)[-1])
    torch.testing.assert_close(teacher(large), plain(large))  # already of its size
    student = ODEViT(Config(shape, Integration(3.0, 3), Preprocessing((3, 8, 8))))
    teacher.vit.pos_embed[:, 1:] = 3.0
    copy_into(teacher, student)
    assert student.position.shape == (1, 5, 64)
    torch.testing.assert_close(student.position[:, 1:], torch.full((1, 4, 64), 3.0))
    torch.testing.assert_close(student.position[:, :1], teacher.vit.pos_embed[:, :1])


@torch.no_grad()
def test_a_head_cut_down_to_some_of_its_classes(teacher_weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), SHAPE).eval()
    pixels = torch.randn(2, 3, 16, 16)
    whole = teacher(pixels)
    choose_classes(teacher, ("4", "0"))
    torch.testing.assert_close(teacher(pixels), whole[:, [4, 0]])
    with pytest.raises(UsageError, match="2 classes has none called 'zebra'"):
        choose_classes(teacher, ("zebra",))
    new_head(teacher, 3)
    assert teacher(pixels).shape == (2, 3)


def test_distances_are_measured_between_layers_before_the_last_norm(teacher_weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(teacher_weights)), SHAPE).eval()
    batches = [torch.randn(3, 3, 16, 16), torch.randn(1, 3, 16, 16)]
    distances = layer_distances(teacher, batches)
    with torch.no_grad():
        cls = [h[:, 0] for h in teacher.hidden(torch.cat(batches))]
    expected = [(b - a).norm(dim=-1).mean().item() for a, b in itertools.pairwise(cls)]
    np.testing.assert_allclose(distances, expected, rtol=1e-5)


DISTANCES = st.lists(st.floats(0.1, 100), min_size=1, max_size=24).map(np.array)


@given(distances=DISTANCES, horizon=st.floats(0.5, 48), temperature=st.floats(0.05, 50))
def test_times_of_layers_rise_and_end_at_the_horizon(distances: np.ndarray, horizon: float, temperature: float) -> None:
    times = layer_times(distances, horizon, temperature)
    assert list(times) == list(range(1, len(distances) + 1))
    assert list(times.values()) == sorted(times.values())
    assert min(times.values()) >= 0
    assert times[len(distances)] == horizon


@given(distances=DISTANCES, steps=st.integers(1, 64), temperature=st.floats(0.05, 50))
def test_every_grid_meets_each_layer_at_the_step_that_ends_nearest_to_its_time(
    distances: np.ndarray, steps: int, temperature: float
) -> None:
    times = layer_times(distances, 12.0, temperature)
    plan = on_grid(times, steps)
    assert list(plan) == sorted(plan)
    assert list(plan.values()) == sorted(set(plan.values()))
    assert plan[steps] == len(distances)
    size = 12.0 / steps
    for step, layer in plan.items():
        assert abs(step * size - times[layer]) <= size / 2 + 1e-9 or step == 1
    places = np.array(list(times.values())) / size
    assume(np.abs(places % 1 - 0.5).min() > 1e-9)  # half way between two steps, either is the nearest
    assert set(on_grid(times, 3 * steps).values()) >= set(plan.values())  # a finer grid meets no fewer


def test_equal_distances_share_time_equally() -> None:
    assert layer_times(np.ones(4), 8.0) == {1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0}
    times = layer_times(np.ones(4), 8.0, layers=(2,))
    assert times == {2: 4.0, 4: 8.0}
    assert [on_grid(times, n) for n in (1, 2, 4, 8)] == [{1: 4}, {1: 2, 2: 4}, {2: 2, 4: 4}, {4: 2, 8: 4}]
    with pytest.raises(UsageError, match="layer 9 of a teacher with 4"):
        layer_times(np.ones(4), 8.0, layers=(9,))


def test_the_cache_asks_the_teacher_once_for_each_view_of_the_same_key(tmp_path: Path) -> None:
    calls = 0

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        return torch.full((2, 1, 4), float(calls)), torch.full((2, 3), float(calls))

    def opened(key: object) -> TeacherCache:
        return TeacherCache(tmp_path, key, images=6, views=2, layers=1, width=4, classes=3)

    cache = opened({"teacher": "a"})
    rows = torch.tensor([5, 1])
    first = cache.answer(rows, 1, compute)
    again = cache.answer(rows, 1, compute)
    other = cache.answer(rows, 0, compute)
    assert calls == 2
    assert first[1][0, 0] == again[1][0, 0] == 1.0
    assert other[1][0, 0] == 2.0
    assert opened({"teacher": "a"}).answer(rows, 1, compute)[0][1, 0, 0] == 1.0
    assert calls == 2
    assert opened({"teacher": "b"}).answer(rows, 1, compute)[0][1, 0, 0] == 3.0  # of the same shape, and not the same


def test_the_cache_of_more_views_is_another(tmp_path: Path) -> None:
    """A later stage may remember more views: the arrays of the first have no place for them."""
    rows = torch.tensor([1])
    for views in (1, 3):
        cache = TeacherCache(tmp_path, "same", images=2, views=views, layers=1, width=4, classes=3)
        cls, _ = cache.answer(rows, views - 1, lambda: (torch.ones(1, 1, 4), torch.ones(1, 3)))
        assert cls.shape == (1, 1, 4)


def test_a_disk_without_room_for_the_answers_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are mapped into memory: a disk that fills up while they are written to ends the process by a signal."""

    def full(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"take 12 bytes \(No space left on device\)"):
        TeacherCache(tmp_path, "key", images=6, views=2, layers=1, width=4, classes=3)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_photographs_without_labels_are_shown_to_a_teacher_of_their_own(teacher_weights: Path) -> None:
    small, large = (
        load_teacher(Teaching(weights=str(teacher_weights), image_size=size), Architecture(16, 4)) for size in (16, 32)
    )
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    read = [Image.fromarray(x) for x in pixels]
    labelled = Images(["a", "b", "c"], np.array([0, 2, 1]), ("x", "y", "z"), lambda i: read[i])
    images = labelled.with_unlabelled(Images(["d", "e"], None, (), lambda i: read[3 + i]))
    assert images.labels is not None
    assert images.labels.tolist() == [0, 2, 1, -1, -1]
    assert images.digest() != labelled.digest()
    specs = [Preprocessing((3, size, size)) for size in (16, 32)]
    rows = torch.tensor([4, 0, 3, 1])
    with torch.no_grad():
        cls, logits = WholePictures(images, [(small, specs[0]), (large, specs[1])], [1, 3])(rows, torch.device("cpu"))
        for i, row in enumerate(rows.tolist()):
            teacher, spec = (large, specs[1]) if row > 2 else (small, specs[0])
            known = teacher.at(torch.from_numpy(prepare(read[row], spec))[None], [1, 3])
            torch.testing.assert_close((cls[i], logits[i]), (known[0][0], known[1][0]))
        only = WholePictures(images, [(small, specs[0])], [1, 3])(rows, torch.device("cpu"))[1]
    assert not torch.allclose(only[0], logits[0])
    torch.testing.assert_close(only[1], logits[1])
