"""What a trajectory is judged by. Each loss is a function of a `Scene`; adding one is writing it and its weight.

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
class Scene:
    """One batch along its trajectory."""

    student: ODEViT
    settings: Training
    states: list[Tensor]  # after step 1 ... n, each [B,S,D]
    velocities: list[Tensor]  # at the start of step 1 ... n
    step_size: float
    labels: Tensor  # [B], -1 where there are none; or the share of each class, [B,C]
    target: Target | None
    schedule: dict[int, int]  # step -> teacher layer it should have reached

    @cached_property
    def answers(self) -> Tensor:
        """Logits after every step: [n,B,C]."""
        return self.student.head(torch.stack([state[:, 0] for state in self.states]))

    @property
    def known(self) -> Target:
        assert self.target is not None, "the recipe is checked for a teacher before training"
        return self.target

    def pairs(self, targets: dict[int, Tensor], own: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean over checkpoints of the squared error; from the last checkpoint on, the last target holds."""
        last = max(self.schedule)
        plan = dict(self.schedule) | dict.fromkeys(range(last, len(self.states) + 1), self.schedule[last])
        errors = [F.mse_loss(own(self.states[step - 1]), targets[layer]) for step, layer in plan.items()]
        return torch.stack(errors).mean()


def trajectory(scene: Scene) -> Tensor:
    """Squared distance of the student's CLS to the teacher's, at the checkpoints."""
    return scene.pairs(scene.known.cls, lambda state: state[:, 0])


def patches(scene: Scene) -> Tensor:
    """The same for the patches."""
    targets = scene.known.patches
    assert targets is not None, "patch targets are asked for whenever this loss has a weight"
    count = scene.student.config.architecture.patches
    return scene.pairs(targets, lambda state: state[:, 1 : 1 + count])


def hints(scene: Scene) -> Tensor:
    """The part of the teacher's patches that no linear map, learned along, reads off the student's at the checkpoints.

    Each of their numbers is measured by how much it varies in the batch: a few vary a thousand times more than others.
    """
    targets = scene.known.patches
    assert targets is not None, "patch targets are asked for whenever this loss has a weight"
    count, missed = scene.student.config.architecture.patches, []
    for step, layer in scene.schedule.items():
        read = scene.student.hints[str(layer)](scene.states[step - 1][:, 1 : 1 + count])
        spread, middle = torch.std_mean(targets[layer], (0, 1))
        missed.append(F.mse_loss(read, (targets[layer] - middle) / spread.clamp_min(1e-6)))
    return torch.stack(missed).mean()


def jasmin(scene: Scene) -> Tensor:
    """JaSMin (eq. 9): log(g_1 / g_k) of the attention rows, the largest row, over the last 85% of the steps.

    g_k = x_k (1 - x_k + x_{k+1}) for a row x sorted in descending order. The maps keep their gradient.
    """
    steps = len(scene.states)
    first = math.floor(0.15 * steps)
    attention, rank = scene.student.psi.attention, scene.settings.jasmin_rank
    values = [jasmin_of_maps(attention.maps(state), rank) for state in scene.states[first:]]
    return torch.stack(values).mean()


def jasmin_of_maps(maps: Tensor, rank: int) -> Tensor:
    """Mean over images and heads of the largest row's log(g_1 / g_rank), for maps [B,H,S,S]."""
    rank = min(rank, maps.shape[-1] - 1)
    x = maps.topk(rank + 1, -1).values.clamp_min(torch.finfo(maps.dtype).tiny)
    g = x[..., :-1] * (1 - x[..., :-1] + x[..., 1:])
    return (g[..., 0].log() - g[..., rank - 1].log()).amax(-1).mean()


def cross_entropy(scene: Scene) -> Tensor:
    return F.cross_entropy(
        scene.answers[-1], scene.labels, ignore_index=-1, label_smoothing=scene.settings.label_smoothing
    )


def _divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    soft = F.kl_div(
        (logits / temperature).log_softmax(-1),
        (teacher / temperature).log_softmax(-1),
        log_target=True,
        reduction="none",
    )
    return soft.sum(-1).mean(-1) * temperature**2


def distillation(scene: Scene) -> Tensor:
    """KL divergence of the final answer from the teacher's."""
    return _divergence(scene.answers[-1], scene.known.logits, scene.settings.distillation_temperature)


def transport(scene: Scene) -> Tensor:
    """Optimal transport (the kinetic energy of the trajectory): 1/(2 d n) times the integral of |psi|^2."""
    energy = torch.stack([v.square().mean() for v in scene.velocities]).sum()
    return 0.5 * scene.step_size * energy


def steady(scene: Scene) -> Tensor:
    """Squared speed of CLS in the last step: small when the end of the trajectory is a resting point."""
    return scene.velocities[-1][:, 0].square().mean()


def intermediate(scene: Scene) -> Tensor:
    """Answers on the way, later ones counting more: against the teacher's where there is one, else the labels."""
    answers = scene.answers[:-1]
    if not len(answers):
        return scene.answers.sum() * 0
    weight = torch.arange(1, len(answers) + 1, device=answers.device, dtype=answers.dtype)
    if scene.target is not None:
        each = _divergence(answers, scene.target.logits, scene.settings.distillation_temperature)
    else:
        each = torch.stack([F.cross_entropy(a, scene.labels, ignore_index=-1) for a in answers])
    return (weight * each).sum() / weight.sum()


LOSSES: dict[str, Callable[[Scene], Tensor]] = {
    loss.__name__: loss
    for loss in (trajectory, patches, hints, jasmin, cross_entropy, distillation, transport, steady, intermediate)
}
NEEDS_LABELS = {"cross_entropy"}
NEEDS_PATCHES = {"patches", "hints"}


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
