"""Muon: momentum, made orthogonal.

In float32 unless asked for bfloat16, which takes half the time on GPUs and on CPUs with instructions for it, twenty
times as long on others, and rounds so that one process and two no longer end with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

QUINTIC = (3.4445, -4.775, 2.0315)  # the usual coefficients: steep at zero, singular values end between 0.7 and 1.2

FAST_HALF: bool = torch.cpu._is_avx512_bf16_supported()  # type: ignore[no-untyped-call]


def orthogonal(matrix: Tensor, steps: int = 5, half: bool = False) -> Tensor:
    """The nearest matrix with singular values about 1, by Newton-Schulz iterations."""
    a, b, c = QUINTIC
    x = matrix.to(torch.bfloat16 if half and (matrix.is_cuda or FAST_HALF) else torch.float32)
    x = x.mT if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonal updates, as large as AdamW's: the same learning rates serve both."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        half: bool = False,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.half = half

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                gradient = parameter.grad.lerp(average, momentum)
                update = orthogonal(gradient.flatten(1), half=self.half)  # a kernel: a row an output
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update.view_as(parameter), alpha=-0.2 * lr * max(update.shape) ** 0.5)
