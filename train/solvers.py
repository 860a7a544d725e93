"""Numerical integration: small stateless steps over explicit state.

A solver advances `x' = f(x)` by one step of size `h`; what it remembers between steps is passed in and handed back.
To add one, write its step and add a line to `SOLVERS` (and its cost to `odevit_serve.bundle.SOLVERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

Field = Callable[[Tensor], Tensor]
Size = float | Tensor  # a number, or one per image shaped to broadcast over the state
Result = tuple[Tensor, Tensor, Tensor | None]  # next state, velocity at the start of the step, memory


def euler(f: Field, x: Tensor, h: Size, memory: Tensor | None) -> Result:
    v = f(x)
    return x + h * v, v, None


def ab2(f: Field, x: Tensor, h: Size, memory: Tensor | None) -> Result:
    """Adams-Bashforth: second order for one evaluation, by the previous velocity. The first step is Euler's.

    A memory of exact zeros means "none yet". That is safe: a velocity of exact zeros is a fixed point, where the
    present velocity is zero too.
    """
    v = f(x)
    if memory is None:
        return x + h * v, v, v
    fresh = (memory == 0).flatten(1).all(1).view(-1, *[1] * (x.dim() - 1))
    previous = v.where(fresh, memory)
    return x + h * (1.5 * v - 0.5 * previous), v, v


def midpoint(f: Field, x: Tensor, h: Size, memory: Tensor | None) -> Result:
    v = f(x)
    return x + h * f(x + 0.5 * h * v), v, None


def heun(f: Field, x: Tensor, h: Size, memory: Tensor | None) -> Result:
    v = f(x)
    return x + 0.5 * h * (v + f(x + h * v)), v, None


def rk4(f: Field, x: Tensor, h: Size, memory: Tensor | None) -> Result:
    v = f(x)
    v2 = f(x + 0.5 * h * v)
    v3 = f(x + 0.5 * h * v2)
    v4 = f(x + h * v3)
    return x + h / 6 * (v + 2 * v2 + 2 * v3 + v4), v, None


class Solver(NamedTuple):
    step: Callable[[Field, Tensor, Size, Tensor | None], Result]
    order: int
    remembers: bool = False


SOLVERS = {
    "euler": Solver(euler, 1),
    "ab2": Solver(ab2, 2, remembers=True),
    "midpoint": Solver(midpoint, 2),
    "heun": Solver(heun, 2),
    "rk4": Solver(rk4, 4),
}

# A splitting is the sub-flows of one step: which field (0: attention G, 1: MLP F), for what part of the step.
SPLITTINGS: dict[str, tuple[tuple[int, float], ...]] = {
    "lie": ((0, 1.0), (1, 1.0)),
    "strang": ((0, 0.5), (1, 1.0), (0, 0.5)),
}


def order(solver: str, splitting: str) -> int:
    """Order of convergence of the pair. `ab2` remembers across sub-flows, so that splitting it leaves order 1."""
    if splitting == "parallel":
        return SOLVERS[solver].order
    if splitting == "lie" or solver == "ab2":
        return 1
    return min(SOLVERS[solver].order, 2)


def memories(solver: str, splitting: str) -> int:
    """How many remembered velocities a step needs and hands on."""
    if not SOLVERS[solver].remembers:
        return 0
    return 1 if splitting == "parallel" else len(SPLITTINGS[splitting])


def advance(
    fields: tuple[Field, Field],
    x: Tensor,
    h: Size,
    memory: Sequence[Tensor | None] = (),
    solver: str = "euler",
    splitting: str = "parallel",
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One step of `x' = G(x) + F(x)` with `fields = (G, F)`: next state, velocity, memory."""
    attention, mlp = fields
    step = SOLVERS[solver].step
    if splitting == "parallel":
        x_next, v, kept = step(lambda y: attention(y) + mlp(y), x, h, memory[0] if memory else None)
        return x_next, v, [] if kept is None else [kept]
    x_next, remembered = x, []
    for index, (which, part) in enumerate(SPLITTINGS[splitting]):
        x_next, _, kept = step(fields[which], x_next, part * h, memory[index] if memory else None)
        if kept is not None:
            remembered.append(kept)
    return x_next, (x_next - x) / h, remembered
