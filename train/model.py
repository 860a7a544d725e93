"""ODE-ViT: one block psi = F + G, integrated from the patch embedding to the head.

Read from top to bottom: CenterNorm, attention G, MLP F, psi, the model. Shapes: B images, S tokens (CLS, patches,
registers, in this order), D width, H heads, d = D/H.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from .. import bundle
from ..config import Architecture, Config
from ..errors import UserError
from ..files import atomic
from ..solvers import advance


class CenterNorm(nn.Module):
    """D/(D-1) * (x - mean(x)) with learned gain and bias: affine, so that it folds into the next matrix."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        return (x - x.mean(-1, keepdim=True)) * (self.weight * (width / (width - 1))) + self.bias

    def fold(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias of the one linear map that equals `matrix @ norm(x)`."""
        width = matrix.shape[1]
        scaled = matrix * (self.weight * (width / (width - 1)))
        return scaled - scaled.mean(1, keepdim=True), matrix @ self.bias


def spectral_(weight: Tensor) -> Tensor:
    """Divide a weight, seen as a matrix, by its largest singular value."""
    with torch.no_grad():
        return weight.div_(torch.linalg.matrix_norm(weight.flatten(1).float(), 2).to(weight.dtype))


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    spectral_(layer.weight)
    return layer


class SelfAttention(nn.Module):
    """G: multi-head self-attention, by dot product or by (tied) L2 distance of query and key."""

    def __init__(self, shape: Architecture):
        super().__init__()
        self.heads, self.kind = shape.heads, shape.attention
        self.norm = CenterNorm(shape.width)
        self.query = linear(shape.width, shape.width)
        self.key = self.query if self.kind == "l2" else linear(shape.width, shape.width)
        self.value = linear(shape.width, shape.width)
        self.output = linear(shape.width, shape.width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B,S,D] -> [B,H,S,d]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Logits of the attention map: [B,H,Sq,S]."""
        if self.kind == "l2":  # -|q-k|^2, less the |q|^2 that a softmax over keys does not see
            return (2 * q @ k.mT - k.square().sum(-1).unsqueeze(-2)) / q.shape[-1] ** 0.5
        return q @ k.mT / q.shape[-1] ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        if self.kind == "dot" and not (torch.is_grad_enabled() and x.is_cpu):  # its gradient on CPUs: a third of all
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = self.scores(q, k).softmax(-1) @ v
        return self.output(mixed.transpose(1, 2).flatten(2))  # [B,H,S,d] -> [B,S,D]

    def maps(self, x: Tensor, rows: int | None = None) -> Tensor:
        """Attention maps [B,H,rows,S] of the first `rows` queries (1: CLS alone; None: all)."""
        x = self.norm(x)
        q = self.split(self.query(x[:, :rows]))
        return self.scores(q, self.split(self.key(x))).softmax(-1)


class MLP(nn.Module):
    """F: two matrices around a GELU, optionally with a depthwise convolution over the patch grid between them."""

    def __init__(self, shape: Architecture):
        super().__init__()
        self.grid = shape.grid
        self.norm = CenterNorm(shape.width)
        self.up = linear(shape.width, shape.hidden)
        self.down = linear(shape.hidden, shape.width)
        self.mix: nn.Conv2d | None = None
        if shape.convolution:
            kernel = shape.convolution
            self.mix = nn.Conv2d(
                shape.hidden, shape.hidden, kernel, padding=kernel // 2, groups=shape.hidden, bias=False
            )
            nn.init.dirac_(self.mix.weight, groups=shape.hidden)  # starts as the identity: the paper's F

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(spread(self.up(self.norm(x)), self.mix, self.grid)))


def spread(x: Tensor, mix: nn.Conv2d | None, grid: int) -> Tensor:
    """Convolve the patches among the tokens [B,S,E] as a picture; CLS and registers stay as they are."""
    if mix is None:
        return x
    cls, patches, registers = x.split([1, grid**2, x.shape[1] - 1 - grid**2], 1)
    image = patches.unflatten(1, (grid, grid)).permute(0, 3, 1, 2)  # [B,M,E] -> [B,E,g,g]: a move that runtimes fold
    return torch.cat([cls, mix(image).permute(0, 2, 3, 1).flatten(1, 2), registers], 1)


class Psi(nn.Module):
    """The velocity of the state, psi(x) = F(x) + G(x), the same at all times."""

    def __init__(self, shape: Architecture):
        super().__init__()
        self.attention = SelfAttention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + self.mlp(x)

    @property
    def fields(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return self.attention, self.mlp


def embedding(shape: Architecture) -> nn.Conv2d | nn.Sequential:
    """From pixels to a grid of patches [B,D,g,g]: one kernel as large as a patch, or a stack of small ones."""
    if shape.stem == "patch":
        patch = nn.Conv2d(shape.channels, shape.width, shape.patch_size, shape.patch_size)
        nn.init.trunc_normal_(patch.weight, std=0.02)
        spectral_(patch.weight)
        nn.init.zeros_(patch.bias)  # type: ignore[arg-type]
        return patch
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride, _ in shape.convolutions():
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers += [convolution, nn.GELU()]
    return nn.Sequential(*layers[:-1])


def normalised(stack: nn.Sequential) -> nn.Sequential:
    """The stack with a batch norm behind each convolution: while it is trained only, see `plain`."""
    layers: list[nn.Module] = []
    for layer in stack:
        layers += [layer, nn.BatchNorm2d(layer.out_channels)] if isinstance(layer, nn.Conv2d) else [layer]
    return nn.Sequential(*layers)


def plain(patch: nn.Conv2d | nn.Sequential) -> nn.Conv2d | nn.Sequential:
    """The stem without batch norms: what they learned is folded into the convolutions before them."""
    if isinstance(patch, nn.Conv2d):
        return patch
    layers: list[nn.Module] = []
    for layer in copy.deepcopy(patch).eval():
        if isinstance(layer, nn.BatchNorm2d):
            before = layers.pop()
            assert isinstance(before, nn.Conv2d)
            layer = fuse_conv_bn_eval(before, layer)
        layers.append(layer)
    return nn.Sequential(*layers)


class Point(NamedTuple):
    """One step along a trajectory: its number, the state after it and the velocity it started with."""

    step: int
    state: Tensor  # [B,S,D]
    velocity: Tensor  # [B,S,D]


class ODEViT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        shape = config.architecture
        self.config = config
        self.patch = embedding(shape)
        self.cls = nn.Parameter(torch.randn(1, 1, shape.width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 1 + shape.patches, shape.width) * 0.02)
        self.registers = nn.Parameter(torch.randn(1, shape.registers, shape.width) * 0.02)
        self.psi = Psi(shape)
        self.hints = nn.ModuleDict()  # while it is trained only: what reads a teacher's patches off the state
        self.head = nn.Linear(shape.width, shape.classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def stem(self, pixel_values: Tensor) -> Tensor:
        """The initial state: CLS and patches with their position, then registers without one."""
        if isinstance(self.patch, nn.Sequential):
            pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)  # 1.4x the training speed on CPUs
        patches = self.patch(pixel_values).flatten(2).mT  # [B,D,g,g] -> [B,M,D]
        batch = len(patches)
        x = torch.cat([self.cls.expand(batch, -1, -1), patches], 1) + self.position
        return torch.cat([x, self.registers.expand(batch, -1, -1)], 1)

    def trajectory(
        self,
        x: Tensor,
        steps: int | None = None,
        horizon: float | None = None,
        solver: str | None = None,
        splitting: str | None = None,
        advance: Callable[..., tuple[Tensor, Tensor, list[Tensor]]] = advance,
    ) -> Iterator[Point]:
        """The states after step 1, 2, ..., N; each setting defaults to the bundle's own.

        `advance` can be replaced by a wrapper of itself, for example one that recomputes in the backward pass.
        """
        given: dict[str, Any] = {"steps": steps, "horizon": horizon, "solver": solver, "splitting": splitting}
        integration = dataclasses.replace(self.config.integration, **{k: v for k, v in given.items() if v is not None})
        h, memory = integration.step_size, list[Tensor]()
        for step in range(1, integration.steps + 1):
            x, velocity, memory = advance(self.psi.fields, x, h, memory, integration.solver, integration.splitting)
            yield Point(step, x, velocity)

    def forward(self, pixel_values: Tensor, **settings: object) -> Tensor:
        """Logits [B,C] at the end of the trajectory; `settings` as in `trajectory`."""
        x = self.stem(pixel_values)
        for point in self.trajectory(x, **settings):  # type: ignore[arg-type]
            x = point.state
        return self.answer(x)

    def answer(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])

    def cls_attention(self, x: Tensor) -> Tensor:
        """How much CLS looks at each patch in state x: [B,H,patches]."""
        return self.psi.attention.maps(x, rows=1)[:, :, 0, 1 : 1 + self.config.architecture.patches]

    def step(
        self, x: Tensor, h: float | Tensor, memory: Sequence[Tensor] = (), known: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """One step by the bundle's own solver and splitting; `memory` and `known` as in `solvers.advance`."""
        own = self.config.integration
        return advance(self.psi.fields, x, h, memory, own.solver, own.splitting, known)

    def freeze_copied(self) -> None:
        """Leave trainable what no teacher lends: psi, the registers and a stem of convolutions."""
        own = ("psi.", "registers") if self.config.architecture.stem == "patch" else ("psi.", "registers", "patch.")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(own))

    def save_pretrained(self, folder: str | os.PathLike[str], half: bool = False) -> None:
        """Write `config.json` and `model.safetensors`; `half` stores the weights as float16."""
        target = Path(folder)
        bundle.write_config(target, self.config)
        dtype = torch.float16 if half else torch.float32
        own = {k: v for k, v in self.state_dict().items() if not k.startswith(("patch.", "hints."))}
        own |= plain(self.patch).state_dict(prefix="patch.")
        state = {k: v.detach().to("cpu", dtype).contiguous().clone() for k, v in own.items()}
        if self.config.architecture.attention == "l2":
            del state["psi.attention.key.weight"]  # tied to the query
        with atomic(target / bundle.WEIGHTS) as path:
            save_file(state, path, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str] | None = None) -> Self:
        """Load a bundle by bundled name, folder or Hub name; weights come back as float32."""
        folder = bundle.find(source)
        if not folder.is_dir():
            raise UserError(f"{folder} holds a graph, not weights: give the bundle it was exported from")
        model = cls(bundle.read_config(folder))
        path = folder / bundle.WEIGHTS
        try:
            state = {k: v.float() for k, v in load_file(path).items()}
        except FileNotFoundError:
            raise UserError(f"{folder} has no {bundle.WEIGHTS}") from None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error})") from None
        if model.config.architecture.attention == "l2" and "psi.attention.query.weight" in state:
            state["psi.attention.key.weight"] = state["psi.attention.query.weight"]
        expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
        for name in sorted(set(expected) ^ set(state)):
            raise UserError(f"{path}: tensor {name} is {'missing' if name in expected else 'unknown'}")
        for name, tensor in state.items():
            if tuple(tensor.shape) != expected[name]:
                raise UserError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, {bundle.CONFIG} says {list(expected[name])}"
                )
        model.load_state_dict(state)
        return model.eval()
