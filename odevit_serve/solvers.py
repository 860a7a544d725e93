"""Numerical integration: small stateless steps over explicit state, in plain arithmetic.

A solver advances `x' = f(x)` by one step of size `h`. It only adds, subtracts, multiplies, divides and sums, so that
the same function runs on torch tensors (training), numpy arrays (tests) and values of an ONNX graph under construction
(export and the runtime). What it remembers between steps is passed in and handed back.

To add a solver, write its step and add one line to `SOLVERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .anderson import EMPTY
from .anderson import anderson as accelerated

Value = Any  # whatever has +, -, *, / and sum: a tensor, an array, a value of a graph
Field = Callable[[Value], Value]


class Memory(NamedTuple):
    """The velocity one step earlier, and for solvers that remember two values the state that it belongs to.

    `known` is the size of this step as a part of that one's, 1 where all are equal, and 0 for images whose first step
    this is.
    """

    velocity: Value
    known: Value = 1.0
    state: Value = None


# Next state, velocity at the start of the step, and what to remember: the velocity first; None: nothing.
Result = tuple[Value, Value, tuple[Value, ...] | None]


def euler(f: Field, x: Value, h: Value, memory: Memory | None) -> Result:
    v = f(x)
    return x + h * v, v, None


def ab2(f: Field, x: Value, h: Value, memory: Memory | None) -> Result:
    """Adams-Bashforth: second order for one evaluation, by the previous velocity. The first step is Euler's."""
    v = f(x)
    if memory is None:
        return x + h * v, v, (v,)
    return x + h * (v + (0.5 * memory.known) * (v - memory.velocity)), v, (v,)


def midpoint(f: Field, x: Value, h: Value, memory: Memory | None) -> Result:
    v = f(x)
    return x + h * f(x + (0.5 * h) * v), v, None


def heun(f: Field, x: Value, h: Value, memory: Memory | None) -> Result:
    v = f(x)
    return x + (0.5 * h) * (v + f(x + h * v)), v, None


def rk4(f: Field, x: Value, h: Value, memory: Memory | None) -> Result:
    v = f(x)
    v2 = f(x + (0.5 * h) * v)
    v3 = f(x + (0.5 * h) * v2)
    v4 = f(x + h * v3)
    return x + (h * (1 / 6)) * (v + 2.0 * (v2 + v3) + v4), v, None


def anderson(f: Field, x: Value, h: Value, memory: Memory | None) -> Result:
    """Anderson acceleration with a window of one earlier state: to the equilibrium, not along time.

    The first step is Euler's. `anderson.py` has windows of any length.
    """
    window = EMPTY if memory is None else ((memory.state, memory.velocity),)
    known = 1.0 if memory is None else memory.known
    following, v, _ = accelerated(f, x, h, window, depth=1, known=known)
    return following, v, (v, x)


@dataclass(frozen=True)
class Solver:
    step: Callable[[Field, Value, Value, Memory | None], Result]
    order: int  # of convergence to the flow; 0: it does not follow time, but looks for the equilibrium
    evaluations: int  # of the field in one step
    remembers: int = 0  # values: 1, the velocity; 2, and the state
    estimates: bool = False  # the size of its steps can follow an error estimate, see `step_size`


SOLVERS = {
    "euler": Solver(euler, order=1, evaluations=1, estimates=True),
    "ab2": Solver(ab2, order=2, evaluations=1, remembers=1, estimates=True),
    "midpoint": Solver(midpoint, order=2, evaluations=2),
    "heun": Solver(heun, order=2, evaluations=2),
    "rk4": Solver(rk4, order=4, evaluations=4),
    "anderson": Solver(anderson, order=0, evaluations=1, remembers=2),
}

# A splitting is the sub-flows of one step: which field (0: attention G, 1: MLP F), for what part of the step.
# `parallel` is one flow of their sum.
SPLITTINGS: dict[str, tuple[tuple[int, float], ...]] = {
    "parallel": (),
    "lie": ((0, 1.0), (1, 1.0)),
    "strang": ((0, 0.5), (1, 1.0), (0, 0.5)),
}


def splits(solver: str, splitting: str) -> bool:
    """Whether the solver takes the splitting: one that does not follow time has no sub-flows."""
    return splitting == "parallel" or SOLVERS[solver].order > 0


def order(solver: str, splitting: str) -> int:
    """Order of convergence of the pair. `ab2` remembers across sub-flows, so that splitting it leaves order 1."""
    if splitting == "parallel":
        return SOLVERS[solver].order
    if splitting == "lie" or SOLVERS[solver].remembers:
        return 1
    return min(SOLVERS[solver].order, 2)


def memories(solver: str, splitting: str, estimates: bool = False) -> int:
    """How many remembered values a step needs and hands on; one that estimates its error needs one at least."""
    return SOLVERS[solver].remembers * max(1, len(SPLITTINGS[splitting])) or int(estimates)


def evaluations(solver: str, splitting: str) -> tuple[int, int]:
    """Evaluations of attention G and of the MLP F in one step."""
    flows = [which for which, _ in SPLITTINGS[splitting]] or [0, 1]
    each = SOLVERS[solver].evaluations
    return each * flows.count(0), each * flows.count(1)


def advance(
    fields: tuple[Field, Field],
    x: Value,
    h: Value,
    memory: Sequence[Value] = (),
    solver: str = "euler",
    splitting: str = "parallel",
    known: Value = 1.0,
) -> tuple[Value, Value, list[Value]]:
    """One step of `x' = G(x) + F(x)` with `fields = (G, F)`: next state, velocity, what to remember.

    `memory` is what the step before handed back; `known` is 0 for images in it that have not taken a step.
    """
    attention, mlp = fields
    step, each = SOLVERS[solver].step, SOLVERS[solver].remembers
    before: list[Memory | None] = [None] * 3
    if memory:
        before = [Memory(memory[i], known, *memory[i + 1 : i + each]) for i in range(0, len(memory), each)]
    if splitting == "parallel":
        x_next, v, kept = step(lambda y: attention(y) + mlp(y), x, h, before[0])
        return x_next, v, list(kept or ())
    x_next, remembered = x, list[Value]()
    for (which, part), own in zip(SPLITTINGS[splitting], before):
        x_next, _, kept = step(fields[which], x_next, part * h, own)
        remembered += kept or ()
    return x_next, (x_next - x) / h, remembered
