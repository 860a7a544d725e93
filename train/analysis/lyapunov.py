"""How trajectories spread, how steep psi is, and how far the steps are from the true path.

Everything is taken by derivatives in a direction (JVP, VJP) of the model's own functions: no Jacobian is ever stored.
Images of a batch do not touch each other, so that every number comes out per image.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...solvers import memories
from ..model import CenterNorm, ODEViT, Psi

Step = Callable[..., Sequence[Tensor]]  # state and what the solver remembers -> the same one step later


@contextmanager
def differentiable() -> Iterator[None]:
    """Attention by kernels that have a derivative in forward mode: the fused ones have none."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own use of torch.jit inside jvp
        yield


def jvp(function: Callable[..., Any], at: Sequence[Tensor], along: Sequence[Tensor]) -> Any:
    with differentiable():
        return torch.func.jvp(function, tuple(at), tuple(along))


def norm(x: Tensor) -> Tensor:
    """One length an image, over the whole of its state."""
    return x.flatten(1).norm(dim=1)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def own_step(model: ODEViT) -> tuple[Step, int]:
    """One step of the model's own integrator as a function of tensors alone, and how many it remembers."""
    own = model.config.integration

    def step(x: Tensor, *memory: Tensor) -> Sequence[Tensor]:
        known = (memory[0] != 0).flatten(1).any(1).to(x).view(-1, 1, 1) if memory else 1.0
        x, _, kept = model.step(x, own.step_size, memory, known)
        return (x, *kept)

    return step, memories(own.solver, own.splitting)


@torch.no_grad()
def exponents(
    step: Step, x: Tensor, steps: int, step_size: float, count: int = 1, remembered: int = 0, seed: int = 0
) -> Tensor:
    """The first `count` Lyapunov exponents over `steps` steps, per image [B,count] (Benettin).

    Random directions are carried along by the derivative of the integrator itself and made orthonormal after every
    step; the logarithms of what that takes away add up to the exponents. What a solver remembers is part of what is
    carried, and lengths are those of the state. A memory of zeros means that there is none yet.
    """
    batch, size = len(x), x[0].numel()
    if not 1 <= count <= size:
        raise ValueError(f"{count} exponents of a state of {size} numbers")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    start = torch.randn(size, count, generator=generator, dtype=torch.double).to(x)
    frame = torch.linalg.qr(start)[0].expand(batch, -1, -1)  # [B,SD,count]; the same for all images
    state = (x, *[torch.zeros_like(x) for _ in range(remembered)])
    tails = [torch.zeros_like(frame) for _ in range(remembered)]
    total = torch.zeros(batch, count, dtype=torch.double, device=x.device)
    for _ in range(steps):
        columns = []
        for i in range(count):
            along = [part[..., i].reshape(x.shape) for part in (frame, *tails)]
            after, moved = jvp(step, state, along)
            columns.append([part.flatten(1) for part in moved])
        state = tuple(after)
        grown, *carried = (torch.stack([c[part] for c in columns], -1) for part in range(1 + remembered))
        frame, triangle = torch.linalg.qr(grown)
        diagonal = triangle.diagonal(dim1=1, dim2=2)
        total += diagonal.abs().double().log()
        tails = [torch.linalg.solve_triangular(triangle, part, upper=True, left=False) for part in carried]
    return total / (steps * step_size)


def lipschitz(field: Callable[[Tensor], Tensor], x: Tensor, iterations: int = 20, seed: int = 0) -> Tensor:
    """The largest singular value of the Jacobian of `field` at each x (power iteration): how steep it is there [B]."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    u = torch.randn(x.shape, generator=generator).to(x)
    u = u / _column(norm(u), u)
    value = torch.zeros(len(x))
    with torch.no_grad(), differentiable():
        pulled: Any = torch.func.vjp(field, x)
        for _ in range(iterations):
            w = torch.func.jvp(field, (x,), (u,))[1]
            value = norm(w)
            (u,) = pulled[1](w)
            u = u / _column(norm(u).clamp_min(torch.finfo(u.dtype).tiny), u)
    return value


@torch.no_grad()
def acceleration(field: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """|J(x) psi(x)|: the second derivative of the path, by which Euler's steps miss it [B]."""
    return norm(jvp(field, (x,), (field(x),))[1])


def log10_bound(steepest: float, bend: float, step_size: float, horizon: float) -> float:
    """log10 of the bound of eq. 8 on Euler's error at the end: (e^(L T) - 1) / (2 L) * C * h.

    L is the Lipschitz constant, C the largest second derivative. The paper writes it for a horizon of 1; with
    (e^L - 1), as in the theorem it rests on.
    """
    if bend <= 0:
        return -math.inf
    if steepest <= 0:
        return math.log10(horizon * bend * step_size / 2)
    grown = steepest * horizon
    exponential = grown + math.log(-math.expm1(-grown))  # ln(e^x - 1), which overflows past 700
    return (exponential + math.log(bend * step_size / (2 * steepest))) / math.log(10)


@torch.no_grad()
def discretisation_error(model: ODEViT, x: Tensor, finer: int = 10) -> tuple[Tensor, Tensor]:
    """Distance to the same trajectory at `finer` times the steps, after step 1..N: whole state and CLS, [B,N] each."""
    steps = model.config.integration.steps
    fine = model.trajectory(x, steps * finer)
    whole, cls = [], []
    for point in model.trajectory(x):
        for _ in range(finer):
            true = next(fine).state
        whole.append(norm(point.state - true))
        cls.append((point.state - true)[:, 0].norm(dim=-1))
    return torch.stack(whole, 1), torch.stack(cls, 1)


@torch.no_grad()
def spectral_norms(psi: Psi) -> dict[str, dict[str, float]]:
    """Largest singular value of every projection, alone and together with the CenterNorm before it."""
    attention, mlp = psi.attention, psi.mlp
    answer: dict[str, dict[str, float]] = {}
    matrices = {
        "query": (attention.query.weight, attention.norm),
        "key": (attention.key.weight, attention.norm),
        "value": (attention.value.weight, attention.norm),
        "output": (attention.output.weight, None),
        "MLP up": (mlp.up.weight, mlp.norm),
        "MLP down": (mlp.down.weight, None),
    }
    for name, (weight, before) in matrices.items():
        answer[name] = {"alone": _spectral(weight)}
        if isinstance(before, CenterNorm):
            answer[name]["with norm"] = _spectral(before.fold(weight)[0])
    if mlp.mix is not None:
        answer["convolution"] = {"alone": convolution_norm(mlp.mix.weight[:, 0])}
    return answer


def _spectral(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.double(), 2))


def convolution_norm(kernels: Tensor, frequencies: int = 64) -> float:
    """Norm of a depthwise convolution with kernels [E,k,k]: the largest gain of any channel at any frequency."""
    size = [frequencies, frequencies]
    return float(torch.fft.fft2(kernels.double(), s=size).abs().max())


@torch.no_grad()
def toward_boundary(model: ODEViT, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Margin, its gain over the step and the exponent toward the nearest decision boundary, for each image.

    By a derivative of psi's CLS row in that direction, the patches held; `step.onnx` has the closed form.
    """
    logits, weight = model.answer(after), model.head.weight
    top = logits.argmax(-1, keepdim=True)
    apart = torch.cdist(weight[top[:, 0]].double(), weight.double()).clamp_min(1e-6)
    distance = ((logits.gather(1, top) - logits) / apart).scatter(1, top, math.inf)
    margin, rival = distance.min(-1)
    e = torch.nn.functional.normalize(weight[top[:, 0]] - weight[rival], dim=-1)

    def cls_velocity(cls: Tensor) -> Tensor:
        return model.psi(torch.cat([cls.unsqueeze(1), after[:, 1:]], 1))[:, 0]  # type: ignore[no-any-return]

    _, moved = jvp(cls_velocity, [after[:, 0]], [e])
    return margin.to(logits), (e * (after[:, 0] - before[:, 0])).sum(-1), (e * moved).sum(-1)
