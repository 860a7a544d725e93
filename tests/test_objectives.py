"""What is trained: gradients through all or the last steps, recomputed or not; random depths; the teacher's part."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from odevit_serve import bundle
from odevit_serve.bundle import Architecture, Config, Integration, Preprocessing
from odevit_serve.train.data import Batch
from odevit_serve.train.model import ODEViT
from odevit_serve.train.objectives import Distillation, FineTuning
from odevit_serve.train.recipe import Training
from odevit_serve.train.teacher import Memory, Teacher

SHAPE = Architecture(16, 4, 24, 3, 2.0, 5, 1, convolution=3)
PIXELS = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(5))
LABELS = torch.tensor([0, 1, 2, 3])


def objective(
    weights: dict[str, float] | None = None, teacher: Teacher | None = None, **settings: object
) -> Distillation:
    torch.manual_seed(0)
    student = ODEViT(Config(SHAPE, Integration(4.0, 4), Preprocessing((3, 16, 16))))
    with torch.no_grad():
        student.head.weight.normal_()
    training = dataclasses.replace(Training(), **settings)  # type: ignore[arg-type]
    return Distillation(student, training, weights or {"cross_entropy": 1.0}, teacher, lambda steps: {steps: 3})


@pytest.fixture
def teacher() -> Teacher:
    torch.manual_seed(1)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=3, mlp_ratio=2, num_classes=5)
    return Teacher(vit, bundle.Teacher("test", 3, 24, 3, 2.0)).eval().requires_grad_(False)


def gradients(which: Distillation, steps: int = 4) -> dict[str, torch.Tensor]:
    which.zero_grad()
    which(PIXELS, LABELS, None, {}, steps, float(steps))["cross_entropy"].backward()
    return {n: p.grad.clone() for n, p in which.net.named_parameters() if p.grad is not None}


def test_recomputing_steps_changes_no_gradient() -> None:
    plain, recomputed = gradients(objective()), gradients(objective(checkpointing=True))
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


def test_truncated_gradients_are_those_of_the_last_steps_alone() -> None:
    truncated = gradients(objective(truncate=2))
    student = objective().student
    with torch.no_grad():
        states = [p.state for p in student.trajectory(student.stem(PIXELS), 4, 4.0)]
    x = states[1].detach()
    for point in student.trajectory(x, 2, 2.0):
        x = point.state
    torch.nn.functional.cross_entropy(student.answer(x), LABELS, label_smoothing=0.05).backward()
    weight = student.psi.mlp.up.weight.grad
    assert weight is not None
    torch.testing.assert_close(truncated["psi.mlp.up.weight"], weight)
    assert "cls" not in truncated  # nothing before the last two steps
    assert not torch.allclose(gradients(objective())["psi.mlp.up.weight"], weight)


def test_jitter_changes_the_step_size_within_its_part() -> None:
    drawn = [objective(random_depth=(3, 6), step_jitter=0.3).depth(step) for step in range(60)]
    sizes = [horizon / steps for steps, horizon, _ in drawn]
    assert 0.7 <= min(sizes) < 0.8
    assert 1.2 < max(sizes) <= 1.3
    assert [d[0] for d in drawn] == [objective(random_depth=(3, 6)).depth(step)[0] for step in range(60)]


def test_random_depth_keeps_the_step_size_and_random_resolution_the_horizon() -> None:
    deep, fine = objective(random_depth=(3, 6)), objective(random_resolution=(3, 6))
    depths = [deep.depth(step) for step in range(60)]
    assert {d[0] for d in depths} == {3, 4, 5, 6}
    assert all(horizon == pytest.approx(steps) and reached == 3 for steps, horizon, reached in depths)
    grids = [fine.depth(step) for step in range(60)]
    assert {g[0] for g in grids} == {3, 4, 5, 6}
    assert all(horizon == 4.0 and reached == steps for steps, horizon, reached in grids)
    assert depths == [objective(random_depth=(3, 6)).depth(step) for step in range(60)]
    assert objective().depth(9) == (4, 4.0, 4)


def test_the_teacher_answers_in_prepare_without_gradients(teacher: Teacher) -> None:
    which = objective({"trajectory": 1.0, "patches": 1.0, "distillation": 1.0}, teacher)
    batch = Batch(PIXELS, LABELS, torch.arange(4), [])
    with torch.no_grad():
        arguments = which.prepare(batch, 0, 0)
    target = arguments[2]
    expected = teacher.states(PIXELS)
    torch.testing.assert_close(target.cls[3], expected[3][:, 0])
    torch.testing.assert_close(target.patches[3], expected[3][:, 1:])
    torch.testing.assert_close(target.logits, teacher(PIXELS))
    terms = which(*arguments)
    assert set(terms) == {"trajectory", "patches", "distillation"}
    sum(terms.values()).backward()  # type: ignore[union-attr]
    assert all(p.grad is None for p in teacher.parameters())


def test_the_teacher_is_no_part_of_what_is_saved(teacher: Teacher) -> None:
    which = objective({"distillation": 1.0}, teacher)
    assert not any("vit" in name for name in which.state_dict())


def test_muons_matrices_are_those_of_psi() -> None:
    which = objective()
    assert {tuple(p.shape) for p in which.matrices()} == {(24, 24), (48, 24), (24, 48)}
    assert len(which.matrices()) == 6


def test_the_bound_is_watched() -> None:
    assert objective().watch()["bound"] > 0


def test_fine_tuning_is_cross_entropy(teacher: Teacher) -> None:
    loss = FineTuning(teacher, 0.1)(PIXELS, LABELS)["cross_entropy"]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(teacher(PIXELS), LABELS, label_smoothing=0.1))


@pytest.mark.parametrize("remembered", [True, False])
def test_mixed_images_are_asked_for_what_the_teacher_says_of_them(
    teacher: Teacher, remembered: bool, tmp_path: Path
) -> None:
    """Answers it remembers are mixed alike; a teacher that answers live is shown the mixture."""
    which = objective({"cross_entropy": 1.0, "distillation": 1.0}, teacher, mixup=0.5, distillation_temperature=3.0)
    which.memory = Memory(tmp_path, 4, 1, 1, 24, 5) if remembered else None
    batch = Batch(PIXELS, LABELS, torch.arange(4), [])
    pixels, labels, target, *_ = which.prepare(batch, 0, 7)
    share = labels.gather(1, LABELS.unsqueeze(1)).squeeze(1)  # four classes: each label's share is its image's
    assert share.min() < 0.5 < share.max()
    torch.testing.assert_close(labels.sum(1), torch.ones(4))
    torch.testing.assert_close(labels.gather(1, LABELS.flip(0).unsqueeze(1)).squeeze(1), 1 - share)
    wide = share.view(-1, 1, 1, 1)
    torch.testing.assert_close(pixels, wide * PIXELS + (1 - wide) * PIXELS.flip(0))
    soft = (teacher(PIXELS) / 3).softmax(-1)
    mixed = share.unsqueeze(1) * soft + (1 - share.unsqueeze(1)) * soft.flip(0)
    shown = (teacher(pixels) / 3).softmax(-1)
    assert target is not None
    assert not torch.allclose(mixed, shown)
    torch.testing.assert_close((target.logits / 3).softmax(-1), mixed if remembered else shown)
    unmixed = objective({"cross_entropy": 1.0}, teacher).prepare(batch, 0, 7)
    torch.testing.assert_close(unmixed[0], PIXELS, rtol=0, atol=0)


def test_images_mixed_with_themselves_cost_what_they_did() -> None:
    """Two copies of one image: whatever the shares, the loss is that of the image."""
    which = objective({"cross_entropy": 1.0}, mixup=0.4)
    batch = Batch(PIXELS[:1].repeat(2, 1, 1, 1), LABELS[:1].repeat(2), torch.arange(2), [])
    mixed = which(*which.prepare(batch, 0, 0))["cross_entropy"]
    plain = which(batch.pixel_values, batch.labels, None, {}, 4, 4.0)["cross_entropy"]
    torch.testing.assert_close(mixed, plain)
