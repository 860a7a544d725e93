"""The energy of modern Hopfield networks, for each head: queries are states, keys the patterns they are drawn to."""

from __future__ import annotations

from torch import Tensor

from ..model import SelfAttention


def energy(attention: SelfAttention, x: Tensor, keys: Tensor | None = None) -> Tensor:
    """-1/beta log sum_j exp(beta q.k_j) + |q|^2 / 2 of every token of x [B,S,D] in every head: [B,H,S].

    q and k are the head's queries and keys, beta = 1 / sqrt(d). `keys` is the state that the keys are taken from, where
    it is not x itself. For L2 attention the exponent is beta (2 q.k - |k|^2), and |q|^2 counts in full. Either way the
    gradient with respect to q is a multiple of q - sum_j p_j k_j: where values are keys, attention less q descends it.
    """
    q = attention.split(attention.query(attention.norm(x)))
    k = attention.split(attention.key(attention.norm(x if keys is None else keys)))
    part = 1.0 if attention.kind == "l2" else 0.5
    return part * q.square().sum(-1) - q.shape[-1] ** 0.5 * attention.scores(q, k).logsumexp(-1)
