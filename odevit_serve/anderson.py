"""Anderson acceleration: to the resting point of `x' = f(x)` in few evaluations, each image for itself.

Plain arithmetic on arrays whose first axis is the images: numpy arrays and torch tensors alike. Like a solver's, a step
is stateless: what it knows of the steps before is passed in and handed back.
"""

from __future__ import annotations

from itertools import pairwise

from .solvers import Field, Value

Window = tuple[tuple[Value, Value], ...]  # states and their velocities, the newest last
EMPTY: Window = ()
RIDGE = 1e-6  # added to the diagonal, as a part of it: velocities that are nearly parallel do not blow up
TINY = 1e-30


def anderson(
    f: Field, x: Value, h: Value, window: Window = EMPTY, depth: int = 3, ridge: float = RIDGE
) -> tuple[Value, Value, Window]:
    """One evaluation of `f`: the next state, the velocity at `x`, and the window for the next step.

    Of all combinations of the last `depth` + 1 states, it takes the one whose velocity would be the smallest if `f`
    were linear, and goes on from there by a step of size `h`. With an empty window this is a step of Euler.
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
        following = following - share.reshape(-1, *[1] * (x.ndim - 1)) * (move + h * turn)
    return following, velocity, window


def _dot(a: Value, b: Value) -> Value:
    """One number an image."""
    return (a * b).reshape(len(a), -1).sum(-1)


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
        known = sum((matrix[i][j] * answer[j] for j in range(i + 1, size)), start=0 * right[i])
        answer[i] = (right[i] - known) / matrix[i][i]
    return answer
