"""How gradients come back through the steps: one function a method, each a wrapper of the integrator's step.

A method is given psi's parameters, the number of steps of the batch and the settings; it gives an `advance` with the
signature of `solvers.advance`, which `ODEViT.trajectory` calls once a step. States and velocities are the same for all
of them; what differs is the memory, the time and the error of the gradient. To add one, write it and add one line to
`GRADIENTS`, and its name to `recipe.GRADIENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from ..anderson import EMPTY, anderson
from ..solvers import SOLVERS, Field, advance
from .recipe import Training

Advance = Callable[..., tuple[Tensor, Tensor, list[Tensor]]]
Method = Callable[[Sequence[Tensor], int, Training], Advance]


def backprop(parameters: Sequence[Tensor], steps: int, settings: Training) -> Advance:
    """Exact: every step's activations are kept."""
    return advance


def checkpoint(parameters: Sequence[Tensor], steps: int, settings: Training) -> Advance:
    """Exact: the state after each step is kept, its activations are computed again in the backward pass."""

    def step(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        result: tuple[Tensor, Tensor, list[Tensor]] = recomputed(advance, *arguments, use_reentrant=False)
        return result

    return step


def truncated(parameters: Sequence[Tensor], steps: int, settings: Training) -> Advance:
    """Through the last `gradient_steps` steps only (4 unless set), as recurrent-depth models are trained."""
    first, done = steps - (settings.gradient_steps or 4), 0

    def step(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        nonlocal done
        done += 1
        if done > first:
            return advance(*arguments)
        with torch.no_grad():
            return advance(*arguments)

    return step


class JointState(tuple[Any, ...]):
    """Several values that a solver advances as one: state, adjoint and the gradients of the parameters."""

    def __add__(self, other: JointState) -> JointState:  # type: ignore[override]
        return JointState(a + b for a, b in zip(self, other))

    def __sub__(self, other: JointState) -> JointState:
        return JointState(a - b for a, b in zip(self, other))

    def __mul__(self, factor: float) -> JointState:  # type: ignore[override]
        return JointState(factor * part for part in self)

    __rmul__ = __mul__  # type: ignore[assignment]

    def __truediv__(self, factor: float) -> JointState:
        return self * (1 / factor)


BACKWARD = {
    name: "heun" if solver.remembers else name for name, solver in SOLVERS.items()
}  # what goes back has no past


@dataclass
class Record:
    """What the adjoint method keeps of a trajectory: its end, and the state after every `every` steps (0: none)."""

    parameters: Sequence[Tensor]
    every: int
    steps: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)
    remembered: list[Tensor] = field(default_factory=list)
    reached: tuple[int, Tensor] | None = None  # how far a backward pass has come

    def add(self, state: Tensor) -> None:
        if self.steps and not (self.every and self.steps % self.every == 0):
            del self.kept[self.steps]
        self.steps += 1
        self.kept[self.steps] = state

    def after(self, number: int, back: Callable[[Tensor], Tensor]) -> Tensor:
        """The state after a step: kept, just arrived at, or integrated back from the next one that is."""
        if number in self.kept:
            return self.kept[number]
        if self.reached is not None and self.reached[0] == number:
            return self.reached[1]
        later = min(n for n in self.kept if n > number)
        state = self.kept[later]
        for _ in range(later - number):
            state = back(state)
        return state


class AdjointStep(torch.autograd.Function):
    """One step forward without a graph; going back, state, adjoint and gradients are integrated together."""

    @staticmethod
    def forward(ctx: Any, record: Record, way: tuple[Any, ...], x: Tensor, *parameters: Tensor) -> Any:
        fields, h, memory, solver, splitting = way
        following, velocity, remembered = advance(fields, x, h, memory, solver, splitting)
        record.add(following.detach())  # not the outputs themselves, which lead back here: the graph would never end
        record.remembered = [v.detach() for v in remembered]
        ctx.record, ctx.number, ctx.way = record, record.steps, (fields, h, BACKWARD[solver], splitting)
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.set_materialize_grads(False)
        return following, velocity

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        record, number, (fields, h, solver, splitting) = ctx.record, ctx.number, ctx.way
        adjoint, of_velocity = gradients

        def back(state: Any, flows: tuple[Field, Field] = fields) -> Any:
            return advance(flows, state, -h, (), solver, splitting)[0]

        enabled, dtype = ctx.autocast
        with torch.no_grad(), torch.autocast(_device(adjoint, of_velocity), dtype=dtype, enabled=enabled):
            state = record.after(number, back)
            adjoint = torch.zeros_like(state) if adjoint is None else adjoint
            if of_velocity is not None and splitting != "parallel":  # (following - x) / h
                adjoint = adjoint + of_velocity / h
            attention, mlp = (augmented(f, record.parameters) for f in fields)
            start = JointState((state, adjoint, *[0.0] * len(record.parameters)))
            state, adjoint, *found = back(start, (attention, mlp))
            state = record.kept.get(number - 1, state)
            if of_velocity is not None and splitting != "parallel":
                adjoint = adjoint - of_velocity / h
            elif of_velocity is not None:  # psi at the state that the step started from
                for f in fields:
                    _, pulled, *more = pull(f, state, of_velocity, record.parameters)
                    adjoint, found = adjoint + pulled, [a + b for a, b in zip(found, more)]
        record.reached = number - 1, state
        return None, None, adjoint, *(g if isinstance(g, Tensor) else None for g in found)


def _device(*tensors: Tensor | None) -> str:
    return next(t.device.type for t in tensors if t is not None)


def pull(f: Field, x: Tensor, adjoint: Tensor, parameters: Sequence[Tensor]) -> list[Any]:
    """f(x), and the adjoint pulled back through it to x and to each parameter (0.0 where it has no part)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        velocity: Tensor = f(x)
        wanted = [x, *(p for p in parameters if p.requires_grad)]
        found = iter(torch.autograd.grad(velocity, wanted, adjoint.to(velocity.dtype), allow_unused=True))
    answers = [next(found), *(next(found) if p.requires_grad else None for p in parameters)]
    return [velocity.detach(), *(0.0 if g is None else g for g in answers)]


def augmented(f: Field, parameters: Sequence[Tensor]) -> Field:
    """The field of (x, a, g): x' = f(x), a' = -a df/dx, g' = -a df/dtheta."""

    def together(z: JointState) -> JointState:
        velocity, *pulled = pull(f, z[0], z[1], parameters)
        return JointState((velocity, *(-part for part in pulled)))

    return together


def adjoint(parameters: Sequence[Tensor], steps: int, settings: Training) -> Advance:
    """The adjoint equation of Neural ODEs, integrated back by a solver of the same order, and the state with it.

    Memory does not grow with the steps. The error is that of the solver, and where the flow contracts, the state that
    is integrated back drifts off: `gradient_steps` keeps it after every so many steps (0: the last alone).
    """
    record = Record(parameters, settings.gradient_steps)

    def step(
        fields: tuple[Field, Field], x: Tensor, h: float, memory: list[Tensor], solver: str, splitting: str
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        x, velocity = AdjointStep.apply(record, (fields, h, memory, solver, splitting), x, *parameters)  # type: ignore[no-untyped-call]
        return x, velocity, record.remembered

    return step


def at_rest(parameters: Sequence[Tensor], steps: int, settings: Training, iterations: int) -> Advance:
    """To the equilibrium without gradients, by the solver or by Anderson acceleration; the last step has them."""
    done, window = 0, EMPTY

    def step(
        fields: tuple[Field, Field], x: Tensor, h: float, memory: list[Tensor], solver: str, splitting: str
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        nonlocal done, window
        done += 1
        if done < steps:
            with torch.no_grad():
                if not settings.anderson:
                    return advance(fields, x, h, memory, solver, splitting)
                x, velocity, window = anderson(lambda y: fields[0](y) + fields[1](y), x, h, window, settings.anderson)
                return x, velocity, []
        start = x.detach().requires_grad_()
        end, velocity, memory = advance(fields, start, h, memory, solver, splitting)
        answer = end.clone()

        def solve(gradient: Tensor) -> Tensor:
            """u = gradient + u d(step)/dx, by fixed-point iterations."""
            found = gradient
            for _ in range(iterations):
                found = gradient + torch.autograd.grad(end, start, found, retain_graph=True)[0]
            return found

        if iterations and answer.requires_grad:
            answer.register_hook(solve)
        return answer, velocity, memory

    return step


def implicit(parameters: Sequence[Tensor], steps: int, settings: Training) -> Advance:
    """Deep equilibrium: the implicit function theorem at the equilibrium, `gradient_steps` iterations (8)."""
    return at_rest(parameters, steps, settings, settings.gradient_steps or 8)


def jacobian_free(parameters: Sequence[Tensor], steps: int, settings: Training) -> Advance:
    """Deep equilibrium with the inverse Jacobian taken for the identity: through the last step alone."""
    return at_rest(parameters, steps, settings, 0)


GRADIENTS: dict[str, Method] = {
    "backprop": backprop,
    "checkpoint": checkpoint,
    "truncated": truncated,
    "adjoint": adjoint,
    "implicit": implicit,
    "jacobian-free": jacobian_free,
}
