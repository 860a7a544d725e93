"""The Hopfield energy of CLS in each head, in numpy, from the weights of a bundle.

`train.analysis.energy` has the same in torch, for all tokens, and says what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..config import Architecture
from ..runtime.dynamics import Floats
from .weights import read_tensors

NORM, QUERY, KEY = "psi.attention.norm", "psi.attention.query.weight", "psi.attention.key.weight"


def cls_energy(folder: Path, shape: Architecture, states: Floats) -> Floats | None:
    """Of states [N,S*,D], by head: [N,H]; None where the bundle has no weights beside it."""
    key = QUERY if shape.attention == "l2" else KEY  # L2 attention ties them
    names = (f"{NORM}.weight", f"{NORM}.bias", QUERY, key)
    tensors = read_tensors(folder, names)
    return None if tensors is None else energy(shape, states[:, : shape.tokens], dict(zip(names, tensors)), key)


def energy(shape: Architecture, states: Floats, tensors: Mapping[str, Floats], key: str) -> Floats:
    x = states.astype(np.float64)
    scale = tensors[f"{NORM}.weight"] * (shape.width / (shape.width - 1))
    x = (x - x.mean(-1, keepdims=True)) * scale + tensors[f"{NORM}.bias"]

    def heads(values: Floats) -> Floats:
        return values.reshape(*values.shape[:2], shape.heads, -1).swapaxes(1, 2)  # [N,S,D] -> [N,H,S,d]

    q, k = heads(x[:, :1] @ tensors[QUERY].T), heads(x @ tensors[key].T)
    square, root = (q**2).sum(-1)[:, :, 0], q.shape[-1] ** 0.5
    product = (q @ k.swapaxes(2, 3))[:, :, 0]  # [N,H,S]
    tied = shape.attention == "l2"
    scores = (2 * product - (k**2).sum(-1) if tied else product) / root
    top = scores.max(-1, keepdims=True)
    drawn = top[..., 0] + np.log(np.exp(scores - top).sum(-1))
    return np.asarray((1.0 if tied else 0.5) * square - root * drawn)
