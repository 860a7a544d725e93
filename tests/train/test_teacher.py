"""Teachers: loading, resampling, heads, the schedule, what the student copies."""

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
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from odevit_serve import costs
from odevit_serve.bundle import Architecture, Config, Integration, Preprocessing
from odevit_serve.errors import UsageError, UserError
from odevit_serve.train.model import ODEViT
from odevit_serve.train.recipe import Teaching
from odevit_serve.train.teacher import (
    TeacherCache,
    choose_classes,
    copy_into,
    layer_distances,
    layer_times,
    load_teacher,
    new_head,
    on_grid,
    to_timm_names,
)

SHAPE = Architecture(16, 4, 64, 1, 2.0, 7)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=3, num_heads=1, mlp_ratio=2, num_classes=7)
    path = tmp_path_factory.mktemp("teacher") / "vit.safetensors"
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_file(vit.state_dict(), path)
    return path


@torch.no_grad()
def test_the_last_state_is_the_one_the_head_reads(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights)), SHAPE).eval()
    pixels = torch.randn(2, 3, 16, 16)
    states = teacher.states(pixels)
    assert len(states) == 4
    torch.testing.assert_close(teacher.answer(states[-1][:, 0]), teacher(pixels))
    torch.testing.assert_close(states[2], teacher.hidden(pixels)[2])
    assert (teacher.facts.layers, teacher.facts.width, teacher.facts.heads, teacher.facts.mlp_ratio) == (3, 64, 1, 2.0)


def test_facts_count_the_teachers_parameters(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights)), SHAPE)
    assert costs.teacher_parameters(teacher.facts, SHAPE) == sum(p.numel() for p in teacher.parameters())


@torch.no_grad()
def test_other_picture_and_patch_sizes_are_resampled(weights: Path) -> None:
    shape = Architecture(24, 8, 64, 1, 2.0, 7)
    teacher = load_teacher(Teaching(weights=str(weights)), shape)
    assert teacher(torch.randn(1, 3, 24, 24)).shape == (1, 7)
    assert teacher.vit.pos_embed.shape == (1, 10, 64)


@torch.no_grad()
def test_a_teacher_can_see_the_pictures_in_a_size_of_its_own(weights: Path) -> None:
    shape = dataclasses.replace(SHAPE, image_size=8)
    plain = load_teacher(Teaching(weights=str(weights)), SHAPE).eval()
    teacher = load_teacher(Teaching(weights=str(weights), image_size=16), shape).eval()
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


def test_students_copies_are_equal_frozen_and_its_own(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights)), SHAPE)
    student = ODEViT(Config(SHAPE, Integration(3.0, 3), Preprocessing((3, 16, 16))))
    copy_into(teacher, student)
    student.freeze_copied()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(student.stem(pixels), teacher.hidden(pixels)[0])
        before = student.stem(pixels).clone()
        teacher.vit.pos_embed.add_(1)
        teacher.vit.head.weight.add_(1)
        torch.testing.assert_close(student.stem(pixels), before)
    assert not student.head.weight.requires_grad
    assert not torch.equal(student.head.weight, teacher.vit.head.weight)


@torch.no_grad()
def test_a_warm_start_is_the_teachers_block_up_to_its_norm_and_biases(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights)), SHAPE)
    student = ODEViT(Config(SHAPE, Integration(3.0, 3), Preprocessing((3, 16, 16))))
    copy_into(teacher, student, warm_start=1)
    block = teacher.vit.blocks[1]
    torch.testing.assert_close(student.psi.attention.key.weight, block.attn.qkv.weight[64:128])
    torch.testing.assert_close(student.psi.mlp.down.weight, block.mlp.fc2.weight)
    with pytest.raises(UsageError, match="blocks 0 to 2"):
        copy_into(teacher, student, warm_start=3)


def test_a_student_of_another_width_copies_nothing(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights)), Architecture(16, 4, 32, 1, 2.0, 7))
    student = ODEViT(Config(Architecture(16, 4, 32, 1, 2.0, 7), Integration(3.0, 3), Preprocessing((3, 16, 16))))
    before = {name: value.clone() for name, value in student.state_dict().items()}
    copy_into(teacher, student)
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, before[name], msg=name)


@torch.no_grad()
def test_a_teacher_can_keep_patches_of_its_own_size(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights), image_size=24, patch_size=4), Architecture(16, 8, 64, 1))
    assert teacher.vit.patch_embed.proj.weight.shape == (64, 3, 4, 4)
    assert teacher.vit.pos_embed.shape == (1, 37, 64)


def test_files_that_are_no_teacher(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_teacher(Teaching(weights=str(tmp_path / "none.safetensors")), SHAPE)
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"not a safetensors file at all")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_teacher(Teaching(weights=str(junk)), SHAPE)
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="plain ViT in timm's names"):
        load_teacher(Teaching(weights=str(tmp_path / "other.safetensors")), SHAPE)
    with pytest.raises(UsageError, match="timm:NAME or hf:NAME"):
        load_teacher(Teaching(source="vit_tiny"), SHAPE)
    with pytest.raises(UserError, match="timm could not load"):
        load_teacher(Teaching(source="timm:no_such_model"), SHAPE)


@torch.no_grad()
def test_transformers_weights_give_the_same_answers_under_timms_names(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-12,
    )  # fmt: skip
    original = ViTForImageClassification(config).eval()
    for parameter in original.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    original.save_pretrained(tmp_path / "hf")
    shape = Architecture(16, 4, 64, 2, 2.0, 5)
    teacher = load_teacher(Teaching(source=f"hf:{tmp_path / 'hf'}"), shape).eval()
    pixels = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(teacher(pixels), original(pixels).logits, atol=1e-5, rtol=1e-4)
    assert teacher.facts.heads == 2


def test_the_older_names_of_transformers_are_read_too() -> None:
    state = {
        "embeddings.cls_token": torch.zeros(1, 1, 4),
        "embeddings.position_embeddings": torch.zeros(1, 2, 4),
        "layernorm.weight": torch.ones(4),
        "layernorm.bias": torch.zeros(4),
    }
    for kind, size in (("weight", (4, 4)), ("bias", (4,))):
        state[f"embeddings.patch_embeddings.projection.{kind}"] = torch.zeros(size)
        for name in ("attention.attention.query", "attention.attention.key", "attention.attention.value"):
            state[f"encoder.layer.0.{name}.{kind}"] = torch.full(size, float(len(name)))
        for name in (
            "attention.output.dense",
            "intermediate.dense",
            "output.dense",
            "layernorm_before",
            "layernorm_after",
        ):
            state[f"encoder.layer.0.{name}.{kind}"] = torch.zeros(size)
    named = to_timm_names(state, 1)
    assert named["blocks.0.attn.qkv.bias"].tolist() == [25.0] * 4 + [23.0] * 4 + [25.0] * 4
    del state["layernorm.bias"]
    with pytest.raises(UserError, match=r"no tensor layernorm\.bias"):
        to_timm_names(state, 1)


@torch.no_grad()
def test_a_head_cut_down_to_some_of_its_classes(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights)), SHAPE).eval()
    pixels = torch.randn(2, 3, 16, 16)
    whole = teacher(pixels)
    choose_classes(teacher, ("4", "0"))
    torch.testing.assert_close(teacher(pixels), whole[:, [4, 0]])
    with pytest.raises(UsageError, match="2 classes has none called 'zebra'"):
        choose_classes(teacher, ("zebra",))
    new_head(teacher, 3)
    assert teacher(pixels).shape == (2, 3)


def test_distances_are_measured_between_layers_before_the_last_norm(weights: Path) -> None:
    teacher = load_teacher(Teaching(weights=str(weights)), SHAPE).eval()
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


@torch.no_grad()
def test_the_real_teacher(real_data: Path) -> None:
    spec = Teaching(weights=str(real_data / "vit_tiny_patch16_224.safetensors"))
    teacher = load_teacher(spec, Architecture(224, 16, 192, 3)).eval()
    assert sum(p.numel() for p in teacher.parameters()) == 5_717_416
    small = load_teacher(spec, Architecture(32, 4, 192, 3))
    assert small.vit.patch_embed.proj.weight.shape == (192, 3, 4, 4)
