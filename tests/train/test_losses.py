"""Losses on rollouts whose value is known, and the bound on matrices whose norms are."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.train import losses
from odevit_serve.train.losses import LOSSES, Rollout, Target, error_bound, jasmin_of_code, jasmin_of_paper
from odevit_serve.train.model import ODEViT
from odevit_serve.train.recipe import JASMIN, Training, Weights


@pytest.fixture
def student() -> ODEViT:
    torch.manual_seed(0)
    return ODEViT(Config(Architecture(8, 4, 12, 3, 2.0, 4, 1), Integration(4.0, 4), Preprocessing((3, 8, 8))))


def rollout(
    student: ODEViT, states: list[torch.Tensor], schedule: dict[int, int], target: Target | None = None
) -> Rollout:
    velocities = [torch.full_like(s, 0.5) for s in states]
    labels = torch.tensor([1, 2])
    cls = [state[:, 0] for state in states]
    return Rollout(student, Training(label_smoothing=0.0), cls, states, velocities, 0.25, labels, target, schedule)


def constant(value: float) -> torch.Tensor:
    return torch.full((2, 6, 12), value)


def test_each_weight_of_a_recipe_names_a_loss() -> None:
    assert {f.name for f in dataclasses.fields(Weights)} == set(LOSSES)


def test_trajectory_is_the_mean_over_checkpoints_and_the_last_target_holds(student: ODEViT) -> None:
    states = [constant(v) for v in (1.0, 2.0, 3.0, 5.0)]
    target = Target({6: torch.zeros(2, 12), 12: torch.full((2, 12), 3.0)}, torch.zeros(2, 4))
    # step 1 -> layer 6: 1; step 3 -> layer 12: 0; step 4 past the last checkpoint: (5 - 3)^2 = 4
    assert LOSSES["trajectory"](rollout(student, states, {1: 6, 3: 12}, target)).item() == pytest.approx(5 / 3)


def test_patches_leave_cls_and_registers_out(student: ODEViT) -> None:
    state = constant(2.0)
    state[:, 0] = state[:, 5] = 100.0
    target = Target({}, torch.zeros(2, 4), {12: torch.zeros(2, 4, 12)})
    assert LOSSES["patches"](rollout(student, [state], {1: 12}, target)).item() == pytest.approx(4.0)


def test_hints_are_what_a_linear_map_does_not_read_off_the_patches(student: ODEViT) -> None:
    """The student holds the teacher's patches, turned: its inverse reads all of them, a map to zero none."""
    target = torch.randn(2, 4, 12) * torch.logspace(-2, 2, 12) + 3
    turn, _ = torch.linalg.qr(torch.randn(12, 12))
    state = constant(100.0)
    state[:, 1:5] = target @ turn.mT
    spread, middle = torch.std_mean(target, (0, 1))
    reader = torch.nn.Linear(12, 12)
    student.hints["8"] = reader
    view = rollout(student, [state, constant(7.0)], {1: 8}, Target({}, torch.zeros(2, 4), {8: target}))
    with torch.no_grad():
        reader.weight.copy_(turn.mT / spread.unsqueeze(1))
        reader.bias.copy_(-middle / spread)
        assert LOSSES["hints"](view).item() == pytest.approx(0.0, abs=1e-6)
        reader.weight.zero_()
        reader.bias.zero_()
    assert LOSSES["hints"](view).item() == pytest.approx(7 / 8)  # eight patches: the unbiased variance is 1


def test_jasmin_of_rows_worked_out_by_hand() -> None:
    """Rows (0.5, 0.3, 0.2) and (0.4, 0.35, 0.25), rank 2: log(g1/g2) is larger for the first."""
    maps = torch.tensor([[[[0.5, 0.3, 0.2], [0.25, 0.4, 0.35]]]])
    g1, g2 = 0.5 * (1 - 0.5 + 0.3), 0.3 * (1 - 0.3 + 0.2)
    assert jasmin_of_code(maps, 2).item() == pytest.approx(math.log(g1 / g2))
    assert jasmin_of_paper(maps, 2).item() == pytest.approx(math.log(0.5 / 0.3))
    assert jasmin_of_paper(maps, 3).item() == pytest.approx(math.log(0.5 / 0.2))
    heads = torch.cat([maps, maps[:, :, 1:].expand(-1, -1, 2, -1)], 1)  # another head, all of its rows the second
    h1, h2 = 0.4 * (1 - 0.4 + 0.35), 0.35 * (1 - 0.35 + 0.25)
    assert jasmin_of_code(heads, 2).item() == pytest.approx((math.log(g1 / g2) + math.log(h1 / h2)) / 2)  # mean
    assert jasmin_of_paper(heads, 2).item() == pytest.approx(math.log(0.5 / 0.3) + math.log(0.4 / 0.35))  # sum


def test_both_forms_of_jasmin_over_the_steps(student: ODEViT) -> None:
    """`code`: the mean over the last 85% of seven steps, which are six; `paper`: the sum over all."""
    view = rollout(student, [torch.randn(2, 6, 12) for _ in range(7)], {})
    maps = [student.psi.attention.maps(state) for state in view.states]
    expected = torch.stack([jasmin_of_code(m, 3) for m in maps[1:]]).mean()
    chosen = dataclasses.replace(view, settings=Training(jasmin_rank=3, jasmin_form="code"))
    torch.testing.assert_close(losses.jasmin(chosen), expected)
    expected = torch.stack([jasmin_of_paper(m, 3) for m in maps]).sum()
    chosen = dataclasses.replace(view, settings=Training(jasmin_rank=3, jasmin_form="paper"))
    torch.testing.assert_close(losses.jasmin(chosen), expected)
    assert set(losses.FORMS) == set(JASMIN)


@pytest.mark.parametrize("form", JASMIN)
def test_jasmin_has_a_gradient(student: ODEViT, form: str) -> None:
    states = [torch.randn(2, 6, 12) for _ in range(3)]
    with torch.no_grad():
        student.psi.attention.query.weight.mul_(5)
    view = rollout(student, states, {})
    losses.jasmin(dataclasses.replace(view, settings=Training(jasmin_form=form))).backward()
    gradient = student.psi.attention.query.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-4


def test_answers_and_their_losses(student: ODEViT) -> None:
    states = [torch.randn(2, 6, 12) for _ in range(3)]
    teacher = torch.randn(2, 4)
    view = rollout(student, states, {3: 12}, Target({}, teacher))
    answers = [student.head(s[:, 0]) for s in states]
    torch.testing.assert_close(LOSSES["cross_entropy"](view), F.cross_entropy(answers[-1], view.labels))

    def divergence(logits: torch.Tensor) -> torch.Tensor:
        p, q = (teacher / 2).softmax(-1), (logits / 2).log_softmax(-1)
        return 4 * (p * (p.log() - q)).sum(-1).mean()

    torch.testing.assert_close(LOSSES["distillation"](view), divergence(answers[-1]))
    expected = (1 * divergence(answers[0]) + 2 * divergence(answers[1])) / 3
    torch.testing.assert_close(LOSSES["intermediate"](view), expected)


def test_settled_answers_cost_nothing_and_only_the_way_is_pulled(student: ODEViT) -> None:
    states = [torch.randn(2, 6, 12, requires_grad=True) for _ in range(3)]
    loss = LOSSES["settle"](rollout(student, states, {}))
    last = student.head(states[-1][:, 0]).softmax(-1)
    each = [(last * (last.log() - student.head(s[:, 0]).log_softmax(-1))).sum(-1).mean() for s in states[:-1]]
    torch.testing.assert_close(loss, sum(each) / 2)
    loss.backward()
    assert states[-1].grad is None or not states[-1].grad.any()
    assert states[0].grad is not None
    same = [states[0].detach()] * 3
    torch.testing.assert_close(LOSSES["settle"](rollout(student, same, {})), torch.tensor(0.0))
    assert not LOSSES["settle"](rollout(student, same[:1], {}))  # one step: nothing is on the way


def test_transport_and_steady_by_hand(student: ODEViT) -> None:
    """Velocity 0.5 everywhere for 2 steps of 0.25: energy 0.5 * 0.25 * 2 * 0.25; end speed squared 0.25."""
    view = rollout(student, [constant(0.0)] * 2, {})
    assert LOSSES["transport"](view).item() == pytest.approx(0.0625)
    assert LOSSES["steady"](view).item() == pytest.approx(0.25)


def test_unlabelled_images_have_no_cross_entropy(student: ODEViT) -> None:
    view = dataclasses.replace(rollout(student, [constant(1.0)], {}), labels=torch.tensor([1, -1]))
    alone = dataclasses.replace(view, cls=[constant(1.0)[:1, 0]], labels=torch.tensor([1]))
    torch.testing.assert_close(LOSSES["cross_entropy"](view), LOSSES["cross_entropy"](alone))


def test_bound_of_matrices_with_known_norms(student: ODEViT) -> None:
    """Orthonormal slices scaled by 2 (Q), 3 (K), 5 (V): |W_K W_Q^T| = 6, |W_V| = 5 in every head."""
    attention = student.psi.attention
    with torch.no_grad():
        for matrix, norm in ((attention.query, 2.0), (attention.key, 3.0), (attention.value, 5.0)):
            matrix.weight.copy_(norm * torch.eye(12))
    radius, lipschitz, steps, d = 10.0, 0.5, 4, 4
    curvature = radius**2 * 5 * (radius * 6 + d**0.5) / (steps**2 * d**0.5)
    expected = (math.exp(lipschitz) - 1) / (2 * lipschitz * steps) * curvature
    assert error_bound(student.psi, steps, radius, lipschitz) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        attention.value.weight[:4] *= 2  # one head is enough to raise it
    assert error_bound(student.psi, steps, radius, lipschitz) == pytest.approx(2 * expected, rel=1e-5)
