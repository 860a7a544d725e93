"""The model as the graphs see it: CenterNorm folded into the matrices behind it, Q, K and V in one matrix.

Everything here is plain torch, equal to `train.model` up to rounding, and cut into the pieces that are exported.
Shapes as there: B images, S tokens, D width, H heads, d = D/H; E hidden units of the MLP, C classes.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bundle import Integration
from ..train.model import MLP, Attention, CenterNorm, ODEViT, plain, spread
from ..train.solvers import Size, advance, memories

FAR = 1e30  # the margin of a model with a single class: there is no boundary
TABULATED = 256  # classes up to which distances between head rows are kept as a table
EXACT = "donot_use_mm_for_euclid_dist"


class Matrix(nn.Module):
    """x @ weight + bias, the weight stored the way ONNX multiplies.

    `fused` writes it as one Gemm over all rows, which onnxruntime runs 3 to 10% faster on CPUs than MatMul and Add; the
    quantised kernels want a MatMul.
    """

    fused = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().float().t().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        if not self.fused:
            return x @ self.weight + self.bias
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).unflatten(0, (x.shape[0], x.shape[1]))


def fold(norm: CenterNorm, matrix: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """`CenterNorm.fold` in double precision, so that folding costs no accuracy."""
    exact = CenterNorm(matrix.shape[1]).double()
    exact.load_state_dict(norm.state_dict())
    return exact.fold(matrix.double() * scale)


class FoldedAttention(nn.Module):
    """G. The softmax's scale is part of the query, or of the key where L2 attention ties both."""

    def __init__(self, attention: Attention):
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

    def forward(self, x: Tensor) -> Tensor:
        parts = self._split(x)
        q, k, v = parts[0], parts[-2], parts[-1]
        mixed = self.scores(q, k).softmax(-1) @ v
        return self.output(mixed.transpose(1, 2).flatten(2))  # [B,H,S,d] -> [B,S,D]

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
        self.mix = copy.deepcopy(mlp.mix)  # this one may be made half precision

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(spread(self.up(x), self.mix, self.grid)))


class Folded(nn.Module):
    """All that the graphs are cut from. A state of S* rows is the state proper with what the solver remembers below."""

    def __init__(
        self, model: ODEViT, integration: Integration | None = None, half: bool = False, quantisable: bool = False
    ):
        super().__init__()
        self.shape = model.config.architecture
        self.integration = integration or model.config.integration
        self.patch = plain(model.patch)
        self.first = nn.Parameter((model.cls + model.position[:, :1]).detach(), requires_grad=False)
        self.position = nn.Parameter(model.position[:, 1:].detach(), requires_grad=False)
        self.registers = model.registers
        self.attention = FoldedAttention(model.psi.attention)
        self.mlp = FoldedMLP(model.psi.mlp)
        self.head = model.head
        if 1 < self.shape.classes <= TABULATED:
            itself = torch.eye(self.shape.classes)
            gaps = torch.cdist(model.head.weight.detach(), model.head.weight.detach(), compute_mode=EXACT)
            self.nearness = nn.Parameter((1 - itself) / gaps.clamp_min(1e-6), requires_grad=False)  # 1 / |w_i - w_j|
            self.itself = nn.Parameter(FAR * itself, requires_grad=False)  # so that a class is not its own rival
        for matrix in (self.attention.project, self.mlp.up):
            matrix.fused = not quantisable
        if half:  # psi alone: the state it is added to, the stem and the head lose nothing
            self.attention.half()
            self.mlp.half()

    @property
    def memories(self) -> int:
        return memories(self.integration.solver, self.integration.splitting)

    @property
    def rows(self) -> int:
        return (1 + self.memories) * self.shape.tokens

    def begin(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch(pixel_values).flatten(2).mT + self.position  # [B,D,g,g] -> [B,M,D]
        batch = patches.shape[0]  # not len(): that would fix the batch in the graph
        below = self.rows - self.shape.tokens  # zeros: the solver remembers nothing yet
        parts = [self.first.expand(batch, -1, -1), patches, self.registers.expand(batch, -1, -1)]
        if below:
            parts.append(patches.new_zeros(batch, below, self.shape.width))
        return torch.cat(parts, 1)

    def proper(self, state: Tensor) -> Tensor:
        return state[:, : self.shape.tokens] if self.memories else state

    def advance(self, state: Tensor, h: Size) -> tuple[Tensor, Tensor]:
        """The next state [B,S*,D] and the velocity [B,S,D] at the start of the step."""
        own = self.integration
        x, *memory = state.split(self.shape.tokens, 1) if self.memories else (state,)
        x, velocity, memory = advance((self.mix, self.transform), x, h, memory, own.solver, own.splitting)
        return torch.cat([x, *memory], 1) if self.memories else x, velocity

    def mix(self, x: Tensor) -> Tensor:
        return self.attention(x.to(self.attention.project.weight.dtype)).float()

    def transform(self, x: Tensor) -> Tensor:
        return self.mlp(x.to(self.mlp.up.weight.dtype)).float()

    def answer(self, state: Tensor) -> Tensor:
        return self.head(state[:, 0])

    def cls_attention(self, state: Tensor) -> Tensor:
        x = self.proper(state).to(self.attention.project.weight.dtype)
        return self.attention.cls_map(x)[:, :, 1 : 1 + self.shape.patches].float()

    def margin(self, logits: Tensor) -> Tensor:
        """Distance of the CLS state to the nearest decision boundary: min over j of (z_i - z_j) / |w_i - w_j|.

        A part of the graph because the runtime, without onnx, cannot read the head's weights out of it.
        """
        weight = self.head.weight
        top, best = logits.max(-1, keepdim=True)  # [B,1]
        if len(weight) == 1:
            return torch.full_like(top[:, 0], FAR)
        if len(weight) <= TABULATED:  # one look-up instead of a product: at batch 1 each node counts
            rivals, apart = F.embedding(best[:, 0], self.nearness), F.embedding(best[:, 0], self.itself)
            return ((top - logits) * rivals + apart).amin(-1)
        own, square = weight[best[:, 0]], weight.square().sum(-1)  # [B,D], [C]
        gap = square[best[:, 0]].unsqueeze(-1) + square - 2 * own @ weight.t()  # |w_i - w_j|^2
        distance = (top - logits) / gap.clamp_min(1e-12).sqrt()
        others = torch.arange(len(weight)) != best
        return distance.where(others, FAR).amin(-1)


class Stem(nn.Module):
    def __init__(self, folded: Folded):
        super().__init__()
        self.folded = folded

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.folded.begin(pixel_values)


class Step(nn.Module):
    """One step of a size of its own for each image, with the numbers that exit rules look at."""

    def __init__(self, folded: Folded):
        super().__init__()
        self.folded = folded

    def forward(self, state: Tensor, step_size: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        next_state, velocity = self.folded.advance(state, step_size.view(-1, 1, 1))
        logits = self.folded.answer(next_state)
        speed = (velocity * velocity).flatten(1).sum(-1).sqrt()  # onnxruntime has no fast ReduceL2: 0.4x the time
        cls_speed = velocity[:, 0].norm(dim=-1)
        return next_state, logits, self.folded.margin(logits), speed, cls_speed


class ClsAttention(nn.Module):
    def __init__(self, folded: Folded):
        super().__init__()
        self.folded = copy.deepcopy(folded)
        self.folded.attention.drop_values()

    def forward(self, state: Tensor) -> Tensor:
        return self.folded.cls_attention(state)


class Advance(nn.Module):
    """One step of the size that the integration says, and nothing else."""

    def __init__(self, folded: Folded):
        super().__init__()
        self.folded = folded

    def forward(self, state: Tensor) -> Tensor:
        return self.folded.advance(state, self.folded.integration.step_size)[0]


class Answer(nn.Module):
    """What is read from the last state."""

    def __init__(self, folded: Folded, with_attention: bool = False):
        super().__init__()
        self.folded, self.with_attention = folded, with_attention

    def forward(self, state: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.folded.answer(state)
        return (logits, self.folded.cls_attention(state)) if self.with_attention else logits
