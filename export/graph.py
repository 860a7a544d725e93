"""The model as the graphs see it: CenterNorm folded into the matrices behind it, Q, K and V in one matrix.

Everything here is plain torch, equal to `train.model` up to rounding. `Stem`, `StepGraph` and `ClsAttention` are
traced; every other graph is made of copies of those (`odevit_serve.runtime.graphs`). Shapes as there: B images, S
tokens, D width, H heads, d = D/H; E hidden units of the MLP, C classes.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..train.model import MLP, CenterNorm, ODEViT, SelfAttention, plain, spread

FAR = 1e30  # the margin of a model with a single class: there is no boundary
TABULATED = 512  # classes up to which what depends on a class is kept as a table
EXACT = "donot_use_mm_for_euclid_dist"


class Matrix(nn.Module):
    """x @ weight + bias, the weight stored the way ONNX multiplies.

    It is written as one Gemm over all rows, which onnxruntime runs 3 to 10% faster on CPUs than MatMul and Add.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float().t().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).unflatten(0, (x.shape[0], x.shape[1]))


def fold(norm: CenterNorm, matrix: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """`CenterNorm.fold` in double precision, so that folding costs no accuracy."""
    exact = CenterNorm(matrix.shape[1]).double()
    exact.load_state_dict(norm.state_dict())
    return exact.fold(matrix.double() * scale)


class FoldedAttention(nn.Module):
    """G. The softmax's scale is part of the query, or of the key where L2 attention ties both."""

    def __init__(self, attention: SelfAttention):
        super().__init__()
        self.heads, self.tied = attention.heads, attention.kind == "l2"
        size = attention.query.weight.shape[0] // self.heads
        key = fold(attention.norm, attention.key.weight, (2 / size**0.5) ** 0.5 if self.tied else 1.0)
        value = fold(attention.norm, attention.value.weight)
        query = [] if self.tied else [fold(attention.norm, attention.query.weight, size**-0.5)]
        weights, biases = zip(*query, key, value)
        self.project = Matrix(torch.cat(weights), torch.cat(biases))
        self.output = Matrix(attention.output.weight)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Logits of the map [B,H,Sq,S] from q and k, both [B,H,S,d]."""
        product = q @ k.mT
        return product - 0.5 * k.square().sum(-1).unsqueeze(-2) if self.tied else product

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """G(x) and the attention maps [B,H,S,S]."""
        parts = self._split(x)
        q, k, v = parts[0], parts[-2], parts[-1]
        maps = self.scores(q, k).softmax(-1)
        return self.output((maps @ v).transpose(1, 2).flatten(2)), maps  # [B,H,S,d] -> [B,S,D]

    def cls_map(self, x: Tensor) -> Tensor:
        """How much CLS looks at every token: [B,H,S]."""
        parts = self._split(x)
        return self.scores(parts[0][:, :, :1], parts[0 if self.tied else 1]).softmax(-1)[:, :, 0]

    def drop_values(self) -> None:
        """Keep what maps are made of: `cls_map` still works, `forward` no longer."""
        width = self.output.weight.shape[0]
        weight, bias = self.project.weight, self.project.bias
        assert bias is not None
        self.project.weight = nn.Parameter(weight[:, :-width].contiguous(), requires_grad=False)
        self.project.bias = nn.Parameter(bias[:-width].contiguous(), requires_grad=False)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value [D,D] as columns, and the query's bias."""
        width = self.output.weight.shape[0]
        columns, bias = self.project.weight.split(width, 1), self.project.bias
        assert bias is not None
        return columns[0], columns[-2], columns[-1], bias[:width]

    def _split(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (-1, self.heads, x.shape[-1] // self.heads))
        return parts.permute(2, 0, 3, 1, 4)  # [B,S,3,H,d] -> [3,B,H,S,d]: q, k, v, or k, v where q is k


class FoldedMLP(nn.Module):
    """F."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.grid = mlp.grid
        self.up = Matrix(*fold(mlp.norm, mlp.up.weight))
        self.down = Matrix(mlp.down.weight)
        self.mix = mlp.mix

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(spread(self.up(x), self.mix, self.grid)))


class Folded(nn.Module):
    """All that the graphs are cut from."""

    def __init__(self, model: ODEViT):
        super().__init__()
        self.shape = model.config.architecture
        self.patch = plain(model.patch)
        self.first = nn.Parameter((model.cls + model.position[:, :1]).detach(), requires_grad=False)
        self.position = nn.Parameter(model.position[:, 1:].detach(), requires_grad=False)
        self.registers = model.registers
        self.attention = FoldedAttention(model.psi.attention)
        self.mlp = FoldedMLP(model.psi.mlp)
        self.head = model.head
        self.boundary = Boundary(self)

    def begin(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch(pixel_values).flatten(2).mT + self.position  # [B,D,g,g] -> [B,M,D]
        batch = patches.shape[0]  # not len(): that would fix the batch in the graph
        return torch.cat([self.first.expand(batch, -1, -1), patches, self.registers.expand(batch, -1, -1)], 1)

    def answer(self, state: Tensor) -> Tensor:
        return self.head(state[:, 0])

    def cls_attention(self, state: Tensor) -> Tensor:
        """Of a state with whatever rows a solver remembers below it."""
        maps = self.attention.cls_map(state[:, : self.shape.tokens])
        return maps[:, :, 1 : 1 + self.shape.patches]


class Boundary(nn.Module):
    """The nearest decision boundary of the head: how far CLS is from it, and what happens in its direction.

    With i the answer and j the rival whose boundary is nearest, e = (w_i - w_j) / |w_i - w_j| is the unit vector away
    from it. `margin` is the distance, `gain` how much of it the last step added, and `exponent` is
    e' (d psi_0 / d x_0) e at the new state, the patches held: how fast a perturbation of CLS toward the boundary grows.
    What is linear in e is kept as a table with a row for each class, up to `TABULATED` of them.
    """

    def __init__(self, folded: Folded):
        super().__init__()
        self.shape, self.tied = folded.shape, folded.attention.tied
        self.heads = self.shape.heads
        weight = folded.head.weight.detach()
        self.attention, self.mlp, self.head = folded.attention, folded.mlp, folded.head  # their weights stored once
        first = torch.zeros(self.shape.tokens, 1)
        first[0] = 1
        self.is_first = _fixed(first)  # [S,1]: the row of CLS
        self.tabulated = 1 < self.shape.classes <= TABULATED
        if self.tabulated:
            itself = torch.eye(self.shape.classes)
            gaps = torch.cdist(weight, weight, compute_mode=EXACT)
            self.nearness = _fixed((1 - itself) / gaps.clamp_min(1e-6))  # 1 / |w_i - w_j|
            self.itself = _fixed(FAR * itself)  # so that a class is not its own rival
            self.table = _fixed(torch.cat(self.terms(weight), 1).half().float())  # three digits do, in half the bytes

    def terms(self, e: Tensor) -> list[Tensor]:
        """What is linear in directions [B,D]: themselves, and what psi makes of them."""
        h, d = self.heads, self.shape.width // self.heads
        query, key, value, _ = self.attention.matrices()
        turned = (e @ query).unflatten(1, (h, d)).unsqueeze(2)  # [B,H,1,d]
        read = (e @ self.attention.output.weight.t()).unflatten(1, (h, d)).unsqueeze(2)
        return [
            e,
            e @ key,
            (turned @ self._heads(key)).flatten(1),  # [B,H*D]: how a token's attention score changes
            (read @ self._heads(value)).flatten(1),  # [B,H*D]: what a token's value adds along e
            e @ self.mlp.up.weight,
            e @ self.mlp.down.weight.t(),
        ]

    def _heads(self, matrix: Tensor) -> Tensor:
        return matrix.unflatten(1, (self.heads, -1)).permute(1, 2, 0)  # [D,H*d] -> [H,d,D]

    def forward(self, before: Tensor, after: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.shape.classes == 1:
            none = torch.zeros_like(logits[:, 0])
            return none + FAR, none, none
        margin, terms = self.nearest(logits)
        gain = ((after[:, 0] - before[:, 0]) * terms[0]).sum(-1)
        return margin, gain, self.exponent(after, terms)

    def nearest(self, logits: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The distance min over j of (z_i - z_j) / |w_i - w_j|, and the terms of the direction away from it."""
        top, best = logits.max(-1, keepdim=True)  # [B,1]
        if self.tabulated:  # one look-up instead of a product: at batch 1 each node counts
            near = F.embedding(best[:, 0], self.nearness)
            distance = (top - logits) * near + F.embedding(best[:, 0], self.itself)
            rival = distance.argmin(-1, keepdim=True)
            both = F.embedding(best[:, 0], self.table) - F.embedding(rival[:, 0], self.table)
            sizes = [self.shape.width] * 2 + [self.heads * self.shape.width] * 2 + [self.shape.hidden] * 2
            return distance.amin(-1), list((both * near.gather(1, rival)).split(sizes, 1))
        weight = self.head.weight
        own, square = weight[best[:, 0]], weight.square().sum(-1)  # [B,D], [C]
        gap = square[best[:, 0]].unsqueeze(-1) + square - 2 * own @ weight.t()  # |w_i - w_j|^2
        distance = (top - logits) / gap.clamp_min(1e-12).sqrt()
        distance = distance.where(torch.arange(len(weight)) != best, FAR)
        e = own - weight[distance.argmin(-1)]
        return distance.amin(-1), self.terms(e / e.square().sum(-1, keepdim=True).clamp_min(1e-12).sqrt())

    def exponent(self, state: Tensor, terms: list[Tensor]) -> Tensor:
        e, toward, scores, values, up, down = terms
        h, cls = self.heads, state[:, 0]
        queries, key, _, bias = self.attention.matrices()  # columns of one matrix, cut once when a graph is loaded
        query = torch.addmm(bias, cls, queries).unflatten(1, (h, -1))  # [B,H,d]
        if self.tied:  # the keys' lengths count, and those take all of them
            keys = torch.addmm(bias, state.flatten(0, 1), key).unflatten(0, state.shape[:2])
            keys = keys.unflatten(2, (h, -1)).transpose(1, 2)  # [B,H,S,d]
            row = (keys @ query.unsqueeze(3)).squeeze(3) - 0.5 * keys.square().sum(-1)
            row = row.mT  # [B,S,H]
            vectors = torch.cat([scores.unflatten(1, (h, -1)), values.unflatten(1, (h, -1))], 1)  # [B,2H,D]
            change, value = (state @ vectors.mT).split(h, 2)
        else:
            seen = (query.unsqueeze(2) @ self._heads(key)).squeeze(2)  # [B,H,D]
            vectors = torch.cat([seen, scores.unflatten(1, (h, -1)), values.unflatten(1, (h, -1))], 1)  # [B,3H,D]
            row, change, value = (state @ vectors.mT).split(h, 2)  # [B,S,H] each, up to what a softmax does not see
            change = change + self.is_first * (query * toward.unflatten(1, (h, -1))).sum(-1).unsqueeze(1)
        share = row.softmax(1)
        moved = share * (change - (share * change).sum(1, keepdim=True))
        itself = share[:, 0] * (values.unflatten(1, (h, -1)) @ e.unsqueeze(2)).squeeze(2)  # [B,H]
        assert self.mlp.up.bias is not None
        hidden = torch.addmm(self.mlp.up.bias, cls, self.mlp.up.weight)  # [B,E]
        slope = 0.5 + 0.5 * torch.erf(hidden * 0.5**0.5) + hidden * torch.exp(-0.5 * hidden * hidden) * 0.3989422804
        return (moved * value).sum((1, 2)) + itself.sum(1) + (slope * up * down).sum(1)


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous(), requires_grad=False)


class Stem(nn.Module):
    def __init__(self, folded: Folded):
        super().__init__()
        self.folded = folded

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.folded.begin(pixel_values)


class StepGraph(nn.Module):
    """One Euler step of a size of its own for each image, with the numbers that exit rules look at.

    After those come the values between the pieces that steps of other solvers are made of.
    """

    def __init__(self, folded: Folded):
        super().__init__()
        self.folded = folded

    def forward(self, state: Tensor, step_size: Tensor) -> tuple[Tensor, ...]:
        attention, maps = self.folded.attention(state)
        mlp = self.folded.mlp(state)
        velocity = attention + mlp
        next_state = state + step_size.view(-1, 1, 1) * velocity
        logits = self.folded.answer(next_state)
        margin, gain, exponent = self.folded.boundary(state, next_state, logits)
        speed = (velocity * velocity).flatten(1).sum(-1).sqrt()  # onnxruntime has no fast ReduceL2: 0.4x the time
        cls_speed = velocity[:, 0].norm(dim=-1)
        return next_state, logits, margin, gain, exponent, speed, cls_speed, attention, mlp, maps, velocity


class ClsAttention(nn.Module):
    def __init__(self, folded: Folded):
        super().__init__()
        self.folded = copy.deepcopy(folded)
        self.folded.attention.drop_values()

    def forward(self, state: Tensor) -> Tensor:
        return self.folded.cls_attention(state)
