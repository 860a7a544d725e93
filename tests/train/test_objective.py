"""What is trained: random depths, mixed images, the teacher's part. Gradients are in test_gradients.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from odevit_serve.config import Architecture, Config, Integration, Preprocessing, TeacherFacts
from odevit_serve.train.batches import Batch
from odevit_serve.train.model import ODEViT
from odevit_serve.train.objective import Distillation, FineTuning
from odevit_serve.train.recipe import Training
from odevit_serve.train.teacher import Teacher, TeacherCache

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
    return Distillation(student, training, weights or {"cross_entropy": 1.0}, teacher, {3: 4.0} if teacher else None)


@pytest.fixture
def teacher() -> Teacher:
    torch.manual_seed(1)
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=3, mlp_ratio=2, num_classes=5)
    return Teacher(vit, TeacherFacts("test", 3, 24, 3, 2.0)).eval().requires_grad_(False)


def test_every_batch_draws_its_number_of_steps_over_the_same_horizon() -> None:
    drawn = [objective().depth(step) for step in range(80)]
    assert {steps for steps, _, _ in drawn} == {1, 2, 3, 4}
    assert all(horizon == 4.0 and reached == steps for steps, horizon, reached in drawn)
    assert drawn == [objective().depth(step) for step in range(80)]
    few = [objective(steps=(2, 6)).depth(step)[0] for step in range(60)]
    assert set(few) == {2, 6}


def test_beyond_the_horizon_the_step_size_is_kept() -> None:
    drawn = [objective(steps=(2, 4), beyond=0.5).depth(step) for step in range(200)]
    assert {(reached, steps) for steps, _, reached in drawn} == {(2, 2), (2, 3), (4, 4), (4, 5), (4, 6)}
    assert all(horizon / steps == pytest.approx(4.0 / reached) for steps, horizon, reached in drawn)


def test_the_solver_of_every_batch_is_drawn_and_followed() -> None:
    assert {objective().solver(step) for step in range(20)} == {"euler"}
    drawn = [objective(solvers=("euler", "ab2", "rk4")).solver(step) for step in range(60)]
    assert set(drawn) == {"euler", "ab2", "rk4"}
    assert drawn[:20] != drawn[20:40]
    which = objective(solvers=("ab2",), steps=(3,))
    *given, solver = which.prepare(Batch(PIXELS, LABELS, torch.arange(4), []), 0, 0)
    assert solver == "ab2"
    losses = {name: which.forward(*given, name)["cross_entropy"].item() for name in ("ab2", "euler")}
    answers = {name: which.student(PIXELS, steps=3, solver=name) for name in losses}
    smoothing = which.settings.label_smoothing
    for name, loss in losses.items():
        expected = F.cross_entropy(answers[name], LABELS, label_smoothing=smoothing).item()
        assert loss == pytest.approx(expected, rel=1e-5)
    assert losses["ab2"] != losses["euler"]


def test_remembered_layers_are_the_same_for_every_number_of_steps(teacher: Teacher, tmp_path: Path) -> None:
    """Grids of 1 to 4 steps meet other layers, but what is remembered of a batch is what each of them reads."""
    which = objective({"trajectory": 1.0}, teacher)
    which.times = {1: 1.0, 2: 2.0, 3: 4.0}
    which.cache = TeacherCache(tmp_path, "test", 4, 1, 3, 24, 5)
    expected = teacher.states(PIXELS)
    batch, met = Batch(PIXELS, LABELS, torch.arange(4), []), set()
    for step in range(20):
        _, _, target, plan, *_ = which.prepare(batch, 0, step)
        met.add(tuple(plan.values()))
        for layer in (1, 2, 3):
            torch.testing.assert_close(target.cls[layer], expected[layer][:, 0], atol=2e-3, rtol=2e-3)
    assert met == {(3,), (2, 3), (1, 2, 3)}


def test_a_teacher_that_sees_whole_pictures_is_asked_about_those(teacher: Teacher, tmp_path: Path) -> None:
    which = objective({"distillation": 1.0}, teacher)
    which.cache = TeacherCache(tmp_path, "test", 4, 1, 1, 24, 5)
    asked: list[list[int]] = []

    def whole(rows: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(rows.tolist())
        return teacher.at(-PIXELS, [3])

    which.whole = whole
    for view in (0, 3):
        target = which.prepare(Batch(PIXELS, LABELS, torch.arange(4), []), view, view)[2]
        torch.testing.assert_close(target.logits, teacher(-PIXELS))
    assert asked == [[0, 1, 2, 3]]


def test_a_teacher_of_another_width_is_read_off_the_student() -> None:
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=36, depth=3, num_heads=3, mlp_ratio=2, num_classes=5)
    wide = Teacher(vit, TeacherFacts("test", 3, 36, 3, 2.0)).eval().requires_grad_(False)
    which = objective({"trajectory": 1.0}, wide)
    which.student.hints["cls3"] = torch.nn.Linear(24, 36)
    arguments = which.prepare(Batch(PIXELS, LABELS, torch.arange(4), []), 0, 0)
    which(*arguments)["trajectory"].backward()
    assert which.student.psi.mlp.up.weight.grad is not None
    cls = arguments[2].cls[3]
    wanted = (cls - cls.mean(0)) / cls.std(0)
    with torch.no_grad():  # a map that reads the target exactly costs nothing
        *_, point = which.student.trajectory(which.student.stem(PIXELS), *arguments[4:])
        state = torch.cat([point.state[:, 0], torch.ones(4, 1)], 1)
        solved = torch.linalg.lstsq(state, wanted, driver="gelsd").solution
        which.student.hints["cls3"].weight.copy_(solved[:-1].T)
        which.student.hints["cls3"].bias.copy_(solved[-1])
    assert which(*arguments)["trajectory"] < 1e-4


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


def test_with_muon_stem_the_kernels_of_the_stem_are_among_them() -> None:
    which = objective(muon_stem=True)
    assert [tuple(p.shape) for p in which.matrices()[6:]] == [tuple(which.student.patch.weight.shape)]


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
    which.cache = TeacherCache(tmp_path, "test", 4, 1, 1, 24, 5) if remembered else None
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
