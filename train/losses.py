"""What a trajectory is judged by. Each loss is a function of a `Rollout`; adding one is writing it and its weight.

The weights are the fields of `recipe.Weights`, and the names in `LOSSES` are the same. A loss with weight 0 is not
computed. All are means over the batch, so that weights do not depend on its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import ODEViT, Psi
from .recipe import Training


@dataclass(frozen=True)
class Target:
    """What the teacher says of a batch: CLS (and patch) states by layer, and its logits."""

    cls: dict[int, Tensor]  # layer -> [B,D]
    logits: Tensor  # [B,C]
    patches: dict[int, Tensor] | None = None  # layer -> [B,M,D]


@dataclass(frozen=True)
class Rollout:
    """One batch along its trajectory. Of whole states and velocities only those are kept that a loss reads."""

    student: ODEViT
    settings: Training
    cls: list[Tensor]  # after step 1 ... n, each [B,D]
    states: list[Tensor]  # the same of all tokens, each [B,S,D]; empty where no loss is in NEEDS_STATES
    velocities: list[Tensor]  # at the start of step 1 ... n, each [B,S,D]; empty likewise
    step_size: float
    labels: Tensor  # [B], -1 where there are none; or the share of each class, [B,C]
    target: Target | None
    schedule: dict[int, int]  # step -> teacher layer it should have reached

    @cached_property
    def answers(self) -> Tensor:
        """Logits after every step: [n,B,C]."""
        return self.student.head(torch.stack(self.cls))

    @property
    def known(self) -> Target:
        assert self.target is not None, "the recipe is checked for a teacher before training"
        return self.target

    def held(self) -> dict[int, int]:
        """The schedule, with the last layer held from the last checkpoint on."""
        last = max(self.schedule)
        return dict(self.schedule) | dict.fromkeys(range(last, len(self.cls) + 1), self.schedule[last])

    def error(self, own: list[Tensor], targets: dict[int, Tensor]) -> Tensor:
        """Mean over checkpoints of the squared error of what is in `own` after each step."""
        errors = [F.mse_loss(own[step - 1], targets[layer]) for step, layer in self.held().items()]
        return torch.stack(errors).mean()


def trajectory(rollout: Rollout) -> Tensor:
    """Squared distance of the student's CLS to the teacher's, at the checkpoints.

    Where the teacher is of another width, its CLS is read off the student's by a linear map a layer, learned along,
    and each of its numbers is measured by how much it varies in the batch.
    """
    reads = rollout.student.hints
    if not any(name.startswith("cls") for name in reads):
        return rollout.error(rollout.cls, rollout.known.cls)
    missed = []
    for step, layer in rollout.held().items():
        target = rollout.known.cls[layer]
        spread, middle = variation(target, (0,))
        read = reads[f"cls{layer}"](rollout.cls[step - 1])
        missed.append(F.mse_loss(read, (target - middle) / spread.clamp_min(1e-6)))
    return torch.stack(missed).mean()


def variation(target: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean over the whole batch, of which each of several processes has a part."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return torch.std_mean(target, over)

    def total(values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values)
        return values

    count = total(torch.tensor(float(math.prod(target.shape[i] for i in over)), device=target.device))
    middle = total(target.sum(over)) / count
    return (total((target - middle).square().sum(over)) / (count - 1)).sqrt(), middle


def patches(rollout: Rollout) -> Tensor:
    """The same for the patches."""
    targets = rollout.known.patches
    assert targets is not None, "patch targets are asked for whenever this loss has a weight"
    count = rollout.student.config.architecture.patches
    return rollout.error([state[:, 1 : 1 + count] for state in rollout.states], targets)


def hints(rollout: Rollout) -> Tensor:
    """The part of the teacher's patches that no linear map, learned along, reads off the student's at the checkpoints.

    Each of their numbers is measured by how much it varies in the batch: a few vary a thousand times more than others.
    """
    targets = rollout.known.patches
    assert targets is not None, "patch targets are asked for whenever this loss has a weight"
    count, missed = rollout.student.config.architecture.patches, []
    for step, layer in rollout.schedule.items():
        read = rollout.student.hints[str(layer)](rollout.states[step - 1][:, 1 : 1 + count])
        spread, middle = variation(targets[layer], (0, 1))
        missed.append(F.mse_loss(read, (targets[layer] - middle) / spread.clamp_min(1e-6)))
    return torch.stack(missed).mean()


def jasmin(rollout: Rollout) -> Tensor:
    """JaSMin: log(g_1 / g_k) of the attention rows, the largest row of each map, k = `jasmin_rank`. It has a gradient.

    The paper's eq. 9 and the code of its authors differ; `jasmin_form` chooses, for rows x sorted in descending order:

    - `code`: g_k = x_k (1 - x_k + x_{k+1}); mean over heads, and over the last 85% of the steps.
    - `paper`: g_k = x_k, the k-th largest entry; sum over heads, and over all steps.
    """
    form, states = FORMS[rollout.settings.jasmin_form], rollout.states
    if rollout.settings.jasmin_form == "code":
        states = states[math.floor(0.15 * len(states)) :]
    attention, rank = rollout.student.psi.attention, rollout.settings.jasmin_rank
    values = torch.stack([form(attention.maps(state), rank) for state in states])
    return values.mean() if rollout.settings.jasmin_form == "code" else values.sum()


def _sorted(maps: Tensor, entries: int) -> Tensor:
    """The largest entries of every row in descending order, none of them 0."""
    return maps.topk(min(entries, maps.shape[-1]), -1).values.clamp_min(torch.finfo(maps.dtype).tiny)


def jasmin_of_code(maps: Tensor, rank: int) -> Tensor:
    """Mean over images and heads of the largest row's log(g_1 / g_rank) with g_k as above, for maps [B,H,S,S]."""
    x = _sorted(maps, rank + 1)
    g = x[..., :-1] * (1 - x[..., :-1] + x[..., 1:])
    return (g[..., 0].log() - g[..., -1].log()).amax(-1).mean()


def jasmin_of_paper(maps: Tensor, rank: int) -> Tensor:
    """Sum over heads, mean over images, of the largest row's log(x_1 / x_rank)."""
    x = _sorted(maps, rank)
    return (x[..., 0].log() - x[..., -1].log()).amax(-1).sum(-1).mean()


FORMS = {"code": jasmin_of_code, "paper": jasmin_of_paper}


def cross_entropy(rollout: Rollout) -> Tensor:
    """Of the images that have a label; a batch may have none."""
    labels, smoothing = rollout.labels, rollout.settings.label_smoothing
    if labels.is_floating_point():
        return F.cross_entropy(rollout.answers[-1], labels, label_smoothing=smoothing)
    each = F.cross_entropy(rollout.answers[-1], labels, ignore_index=-1, label_smoothing=smoothing, reduction="sum")
    return each / (labels >= 0).sum().clamp_min(1)


def _divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    soft = F.kl_div(
        (logits / temperature).log_softmax(-1),
        (teacher / temperature).log_softmax(-1),
        log_target=True,
        reduction="none",
    )
    return soft.sum(-1).mean(-1) * temperature**2


def distillation(rollout: Rollout) -> Tensor:
    """KL divergence of the final answer from the teacher's."""
    return _divergence(rollout.answers[-1], rollout.known.logits, rollout.settings.distillation_temperature)


def transport(rollout: Rollout) -> Tensor:
    """Optimal transport (the kinetic energy of the trajectory): 1/(2 d n) times the integral of |psi|^2."""
    energy = torch.stack([v.square().mean() for v in rollout.velocities]).sum()
    return 0.5 * rollout.step_size * energy


def steady(rollout: Rollout) -> Tensor:
    """Squared speed of CLS in the last step: small when the end of the trajectory is an equilibrium."""
    return rollout.velocities[-1][:, 0].square().mean()


def intermediate(rollout: Rollout) -> Tensor:
    """Answers on the way, later ones counting more: against the teacher's where there is one, else the labels."""
    answers = rollout.answers[:-1]
    if not len(answers):
        return rollout.answers.sum() * 0
    weight = torch.arange(1, len(answers) + 1, device=answers.device, dtype=answers.dtype)
    if rollout.target is not None:
        each = _divergence(answers, rollout.target.logits, rollout.settings.distillation_temperature)
    else:
        each = torch.stack([F.cross_entropy(a, rollout.labels, ignore_index=-1) for a in answers])
    return (weight * each).sum() / weight.sum()


def settle(rollout: Rollout) -> Tensor:
    """KL divergence of the answers on the way from the final one, which is held fixed: early exit pays by as much as
    answers no longer change.
    """
    answers = rollout.answers[:-1]
    if not len(answers):
        return rollout.answers.sum() * 0
    return _divergence(answers, rollout.answers[-1].detach(), 1.0).mean()


LOSSES: dict[str, Callable[[Rollout], Tensor]] = {
    loss.__name__: loss
    for loss in (
        trajectory,
        patches,
        hints,
        jasmin,
        cross_entropy,
        distillation,
        transport,
        steady,
        intermediate,
        settle,
    )
}
NEEDS_LABELS = {"cross_entropy"}
NEEDS_PATCHES = {"patches", "hints"}  # of the teacher
NEEDS_STATES = {"patches", "hints", "jasmin"}
NEEDS_VELOCITIES = {"transport", "steady"}


@torch.no_grad()
def error_bound(psi: Psi, steps: int, radius: float, lipschitz: float) -> float:
    """The bound of eq. 11 on the distance between the discrete trajectory and the ODE's, largest over the heads.

    Norms are spectral, as the paper writes them, with (e^L - 1) as in the theorem it rests on; head h has its own
    D x d slices of the query, key and value matrices.
    """
    attention = psi.attention
    heads = attention.heads
    query, key, value = (
        m.weight.unflatten(0, (heads, -1)).float() for m in (attention.query, attention.key, attention.value)
    )
    d = query.shape[1]
    mixing = torch.linalg.matrix_norm(key.mT @ query, 2)  # [H]: |W_K W_Q^T|
    curvature = radius**2 * torch.linalg.matrix_norm(value, 2) * (radius * mixing + d**0.5) / (steps**2 * d**0.5)
    return float(math.expm1(lipschitz) / (2 * lipschitz * steps) * curvature.max())
