"""Anderson acceleration: to the equilibrium of `x' = f(x)` in few evaluations, each image for itself.

Plain arithmetic on arrays whose first axis is the images: numpy arrays, torch tensors and values of a graph under
construction alike. Like a solver's, a step is stateless: what it knows of the steps before is passed in and handed
back. With a window of one earlier state it is the solver `anderson` of `solvers.SOLVERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

Value = Any  # an array, a tensor, a value of a graph
Window = tuple[tuple[Value, Value], ...]  # states and their velocities, the newest last
EMPTY: Window = ()
RIDGE = 1e-6  # added to the diagonal, as a part of it: velocities that are nearly parallel do not blow up
TINY = 1e-30


def anderson(
    f: Callable[[Value], Value],
    x: Value,
    h: Value,
    window: Window = EMPTY,
    depth: int = 3,
    ridge: float = RIDGE,
    known: Value = 1.0,
) -> tuple[Value, Value, Window]:
    """One evaluation of `f`: the next state, the velocity at `x`, and the window for the next step.

    Of all combinations of the last `depth` + 1 states, it takes the one whose velocity would be the smallest if `f`
    were linear, and goes on from there by a step of size `h`. With an empty window this is a step of Euler; so it is
    for images whose `known` is 0, whatever lies in the window.
    """
    velocity = f(x)
    window = (*window, (x, velocity))[-depth - 1 :]
    moves = [new[0] - old[0] for old, new in pairwise(window)]
    turns = [new[1] - old[1] for old, new in pairwise(window)]
    gram = [[_dot(a, b) for b in turns] for a in turns]
    for i in range(len(turns)):
        gram[i][i] = (1 + ridge) * gram[i][i] + TINY
    following = x + h * velocity
    for share, move, turn in zip(_solve(gram, [_dot(a, velocity) for a in turns]), moves, turns):
        following = following - (known * share) * (move + h * turn)
    return following, velocity, window


def _dot(a: Value, b: Value) -> Value:
    """One number an image, with as many dimensions as the arrays have."""
    axes = tuple(range(1, a.ndim))
    return (a * b).sum(axis=axes, keepdims=True) if axes else a * b


def _solve(matrix: list[list[Value]], right: list[Value]) -> list[Value]:
    """A small symmetric positive system for every image at once, by elimination."""
    size = len(right)
    matrix, right = [list(row) for row in matrix], list(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i])]
            right[j] = right[j] - factor * right[i]
    answer: list[Value] = [None] * size
    for i in reversed(range(size)):
        for j in range(i + 1, size):
            right[i] = right[i] - matrix[i][j] * answer[j]
        answer[i] = right[i] / matrix[i][i]
    return answer
