"""The pretrained ViT that a student follows: where it comes from, its states, and what the student copies from it.

Whatever its source (timm, transformers, a local file), a teacher is held as timm's VisionTransformer, so that other
image and patch sizes, heads and fine-tuning are the same for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.layers import LayerScale, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from .. import bundle
from ..bundle import Architecture, Preprocessing
from ..errors import UsageError, UserError
from ..files import PART, atomic
from .class_names import class_rows
from .model import ODEViT
from .recipe import Teaching


class Teacher(nn.Module):
    """A plain ViT with a CLS token. `forward` gives logits, `states` what the student is to follow."""

    def __init__(self, vit: VisionTransformer, facts: bundle.TeacherFacts, preprocessing: Preprocessing | None = None):
        super().__init__()
        self.vit, self.facts, self.preprocessing = vit, facts, preprocessing

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.vit(self.sized(pixel_values))
        return logits

    def sized(self, pixel_values: Tensor) -> Tensor:
        """The pictures in the size that the teacher is for."""
        own: Any = self.vit.patch_embed.img_size
        if pixel_values.shape[-2:] == own:
            return pixel_values
        return F.interpolate(pixel_values, own, mode="bicubic", antialias=True)

    def hidden(self, pixel_values: Tensor) -> list[Tensor]:
        """States [B,1+M,D] after the embedding and after each layer."""
        states = [self.vit._pos_embed(self.vit.patch_embed(self.sized(pixel_values)))]
        for block in self.vit.blocks:
            states.append(block(states[-1]))
        return states

    def states(self, pixel_values: Tensor) -> list[Tensor]:
        """What the student is to follow: the hidden states, the last one normalised, as the head reads it."""
        states = self.hidden(pixel_values)
        states[-1] = self.vit.norm(states[-1])
        return states

    def answer(self, cls: Tensor) -> Tensor:
        logits: Tensor = self.vit.head(cls)
        return logits

    def digest(self) -> str:
        """Of all weights, the head included."""
        known = hashlib.sha256()
        for name, value in self.vit.state_dict().items():
            known.update(name.encode() + value.detach().cpu().numpy().tobytes())
        return known.hexdigest()

    def save(self, path: Path) -> None:
        """Weights in timm's names, as a file that `--teacher-weights` takes."""
        with atomic(path) as scratch:
            save_file({k: v.detach().cpu().contiguous().clone() for k, v in self.vit.state_dict().items()}, scratch)


def load_teacher(spec: Teaching, shape: Architecture) -> Teacher:
    """The teacher a recipe names, with patch kernel and position embedding resampled to the patches it is to see."""
    shape = dataclasses.replace(
        shape,
        image_size=spec.image_size or shape.image_size,
        patch_size=spec.patch_size or shape.patch_size,
        stem="patch",
    )
    if spec.weights:
        teacher = _from_file(Path(spec.weights), shape, spec.drop_path)
    elif spec.source.startswith("timm:"):
        teacher = _from_timm(spec.source[5:], shape, spec.drop_path)
    elif spec.source.startswith("hf:"):
        teacher = _from_transformers(spec.source[3:], shape, spec.drop_path)
    else:
        raise UsageError(f"teacher {spec.source!r}: write timm:NAME or hf:NAME, or give a file with --teacher-weights")
    _must_be_plain(teacher.vit, teacher.facts.name)
    return teacher


def _must_be_plain(vit: Any, name: str) -> None:
    if not isinstance(vit, VisionTransformer):
        raise UserError(f"{name} is a {type(vit).__name__}, not a plain ViT")
    if vit.cls_token is None or vit.num_prefix_tokens != 1 or vit.global_pool != "token":
        raise UserError(f"{name} is not a plain ViT with one CLS token that the head reads")
    if not isinstance(vit.norm_pre, nn.Identity) or vit.no_embed_class:
        raise UserError(f"{name} normalises or embeds its patches in a way the student cannot copy")


def _describe(vit: VisionTransformer, name: str, license: str = "") -> bundle.TeacherFacts:
    block: Any = vit.blocks[0]
    ratio = block.mlp.fc1.out_features / vit.embed_dim
    return bundle.TeacherFacts(name, len(vit.blocks), vit.embed_dim, block.attn.num_heads, ratio, license=license)


def _from_timm(name: str, shape: Architecture, drop_path: float) -> Teacher:
    import timm

    try:
        vit: Any = timm.create_model(
            name, pretrained=True, img_size=shape.image_size, patch_size=shape.patch_size, drop_path_rate=drop_path
        )
    except Exception as error:  # unknown names, no network, models that take no img_size
        raise UserError(f"timm could not load {name!r}: {str(error).strip().splitlines()[0]}") from None
    spec = vit.pretrained_cfg
    transform = Preprocessing(
        (3, shape.image_size, shape.image_size),
        tuple(spec["mean"]),
        tuple(spec["std"]),
        spec.get("interpolation", "bicubic"),
        spec.get("crop_pct", 1.0),
    )
    return Teacher(vit, _describe(vit, f"timm:{name}", spec.get("license") or ""), transform)


def _from_file(path: Path, shape: Architecture, drop_path: float) -> Teacher:
    try:
        state = load_file(path)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file ({error})") from None
    return _from_state({k: v.float() for k, v in state.items()}, path.name, shape, drop_path)


def _from_state(state: dict[str, Tensor], name: str, shape: Architecture, drop_path: float, heads: int = 0) -> Teacher:
    """A ViT from weights in timm's names; its sizes are read off the tensors (64 channels a head, as is usual)."""
    try:
        width = state["cls_token"].shape[-1]
        hidden = state["blocks.0.mlp.fc1.weight"].shape[0]
        layers = 1 + max(int(m[1]) for k in state if (m := re.match(r"blocks\.(\d+)\.", k)))
        classes = state["head.weight"].shape[0] if "head.weight" in state else 0
        vit = VisionTransformer(
            img_size=shape.image_size,
            patch_size=shape.patch_size,
            embed_dim=width,
            depth=layers,
            num_heads=heads or max(1, width // 64),
            mlp_ratio=hidden / width,
            qkv_bias="blocks.0.attn.qkv.bias" in state,
            num_classes=classes,
            init_values=1.0 if "blocks.0.ls1.gamma" in state else None,
            drop_path_rate=drop_path,
        )
        vit.load_state_dict(checkpoint_filter_fn(state, vit, interpolation="bicubic", antialias=True))
    except (KeyError, RuntimeError, ValueError) as error:
        raise UserError(f"{name} does not hold a plain ViT in timm's names ({str(error).splitlines()[0]})") from None
    return Teacher(vit, _describe(vit, name))


def _from_transformers(name: str, shape: Architecture, drop_path: float) -> Teacher:
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, ViTModel

    try:
        config = AutoConfig.from_pretrained(name)
        classifier = any("ForImageClassification" in kind for kind in config.architectures or [])
        kind: Any = AutoModelForImageClassification if classifier else ViTModel
        extra = {} if classifier else {"add_pooling_layer": False}
        model = kind.from_pretrained(name, **extra)
    except Exception as error:  # the hub's and the library's failures have no common base class
        raise UserError(f"transformers could not load {name!r}: {str(error).strip().splitlines()[0]}") from None
    if config.model_type != "vit":
        raise UserError(f"hf:{name} is a {config.model_type}, not a plain ViT")
    state = to_timm_names(model.state_dict(), config.num_hidden_layers)
    teacher = _from_state(state, f"hf:{name}", shape, drop_path, config.num_attention_heads)
    for module in teacher.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = config.layer_norm_eps
    try:
        seen = AutoImageProcessor.from_pretrained(name)
        size = (3, shape.image_size, shape.image_size)
        teacher.preprocessing = Preprocessing(size, tuple(seen.image_mean), tuple(seen.image_std))
    except (OSError, ValueError, AttributeError):
        teacher.preprocessing = None  # no processor beside the weights: the preset's words stay
    return teacher


def to_timm_names(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Weights of transformers' ViT under timm's names, query, key and value in one matrix."""
    own = {re.sub(r"^vit\.", "", k): v for k, v in state.items()}

    def one(*names: str) -> Tensor:
        found = next((own[n] for n in names if n in own), None)
        if found is None:
            raise UserError(f"the weights have no tensor {names[0]}")
        return found

    named = {
        "cls_token": one("embeddings.cls_token"),
        "pos_embed": one("embeddings.position_embeddings"),
        "norm.weight": one("layernorm.weight"),
        "norm.bias": one("layernorm.bias"),
    }
    for kind in ("weight", "bias"):
        named[f"patch_embed.proj.{kind}"] = one(f"embeddings.patch_embeddings.projection.{kind}")
        if f"classifier.{kind}" in own:
            named[f"head.{kind}"] = own[f"classifier.{kind}"]
        for i in range(layers):
            new, old, older = f"blocks.{i}", f"layers.{i}", f"encoder.layer.{i}"
            projections = [
                one(f"{old}.attention.{new_word}.{kind}", f"{older}.attention.attention.{word}.{kind}")
                for new_word, word in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
            ]
            named[f"{new}.attn.qkv.{kind}"] = torch.cat(projections)
            for target, sources in {
                "attn.proj": ("attention.o_proj", "attention.output.dense"),
                "mlp.fc1": ("mlp.fc1", "intermediate.dense"),
                "mlp.fc2": ("mlp.fc2", "output.dense"),
                "norm1": ("layernorm_before", "layernorm_before"),
                "norm2": ("layernorm_after", "layernorm_after"),
            }.items():
                named[f"{new}.{target}.{kind}"] = one(f"{old}.{sources[0]}.{kind}", f"{older}.{sources[1]}.{kind}")
    return named


def choose_classes(teacher: Teacher, classes: Sequence[str]) -> None:
    """Cut the teacher's own head down to the given of its classes, by index or by ImageNet name."""
    head = teacher.vit.head
    if not isinstance(head, nn.Linear):
        raise UserError(f"{teacher.facts.name} has no head to choose classes from: use head = 'probe' or 'finetune'")
    rows = class_rows(classes, head.out_features)
    small = nn.Linear(head.in_features, len(rows))
    with torch.no_grad():
        small.weight.copy_(head.weight[rows])
        small.bias.copy_(head.bias[rows])
    teacher.vit.head = small
    teacher.vit.num_classes = len(rows)


def new_head(teacher: Teacher, classes: int) -> None:
    """A fresh linear head, to be trained as a probe or together with the rest."""
    head = nn.Linear(teacher.facts.width, classes)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    teacher.vit.head = head
    teacher.vit.num_classes = classes


def copy_into(teacher: Teacher, student: ODEViT, warm_start: int = -1) -> None:
    """Plug and play: the student gets its own copies of everything but psi; `warm_start` names a block for psi too."""
    vit: Any = teacher.vit
    shape = student.config.architecture
    with torch.no_grad():
        proj = vit.patch_embed.proj
        if (
            isinstance(student.patch, nn.Conv2d) and student.patch.weight.shape == proj.weight.shape
        ):  # a stem of convolutions has nothing to copy from
            student.patch.weight.copy_(proj.weight)
            bias: Any = student.patch.bias
            bias.copy_(proj.bias if proj.bias is not None else torch.zeros_like(bias))
        if vit.embed_dim != shape.width:
            return  # nothing fits: the student learns all of it, and reads the teacher's states off its own
        student.cls.copy_(vit.cls_token)
        student.position.copy_(resample_abs_pos_embed(vit.pos_embed, [shape.grid] * 2))
        head = vit.head
        if head.out_features != shape.classes:
            raise UsageError(f"the teacher's head has {head.out_features} classes, the student's {shape.classes}")
        student.head.weight.copy_(head.weight)
        student.head.bias.copy_(head.bias)
        if warm_start >= 0:
            _warm_start(vit, student, warm_start)


def _warm_start(vit: VisionTransformer, student: ODEViT, index: int) -> None:
    if index >= len(vit.blocks):
        raise UsageError(f"warm_start {index}: the teacher has blocks 0 to {len(vit.blocks) - 1}")
    block: Any = vit.blocks[index]
    attention, mlp = student.psi.attention, student.psi.mlp
    if attention.kind != "dot" or mlp.up.weight.shape != block.mlp.fc1.weight.shape:
        raise UsageError("warm_start needs dot-product attention and the teacher's own MLP ratio")
    query, key, value = block.attn.qkv.weight.chunk(3)
    for matrix, source in (
        (attention.query, query),
        (attention.key, key),
        (attention.value, value),
        (attention.output, block.attn.proj.weight),
        (mlp.up, block.mlp.fc1.weight),
        (mlp.down, block.mlp.fc2.weight),
    ):
        matrix.weight.copy_(source)
    attention.norm.weight.copy_(block.norm1.weight)
    mlp.norm.weight.copy_(block.norm2.weight)
    attention.norm.bias.copy_(block.norm1.bias)
    mlp.norm.bias.copy_(block.norm2.bias)
    if isinstance(block.ls1, LayerScale):
        attention.output.weight.mul_(block.ls1.gamma[:, None])
        mlp.down.weight.mul_(block.ls2.gamma[:, None])


@torch.no_grad()
def layer_distances(teacher: Teacher, batches: Sequence[Tensor]) -> np.ndarray:
    """Mean distance between the CLS of consecutive layers, over the given batches.

    The last layer is taken before its normalisation, which changes the scale and would claim most of the time.
    """
    total = np.zeros(teacher.facts.layers)
    count = 0
    for pixels in batches:
        cls = torch.stack([state[:, 0] for state in teacher.hidden(pixels)])
        total += (cls[1:] - cls[:-1]).norm(dim=-1).sum(1).double().cpu().numpy()
        count += len(pixels)
    return total / count


def layer_times(
    distances: np.ndarray, horizon: float, temperature: float = 1.0, layers: Sequence[int] = ()
) -> dict[int, float]:
    """Teacher layer -> time by which it should be reached: the horizon is shared by a softmax of the distances.

    Times rise with the layers, and the last layer is reached at the horizon.
    """
    share = np.exp((distances - distances.max()) / (temperature * distances.mean()))
    when = np.minimum(np.cumsum(share / share.sum()), 1.0) * horizon  # of rounded shares the sum may exceed 1
    depth = len(distances)
    wanted = set(layers) | {depth} if layers else set(range(1, depth + 1))
    unknown = sorted(wanted - set(range(1, depth + 1)))
    if unknown:
        raise UsageError(f"teacher.layers names layer {unknown[0]} of a teacher with {depth}")
    return {layer: float(horizon if layer == depth else when[layer - 1]) for layer in sorted(wanted)}


def on_grid(times: Mapping[int, float], steps: int) -> dict[int, int]:
    """Step -> layer it should have reached, on a grid of so many steps: the one that ends nearest to the layer's time.

    Where several layers fall on one step, the deepest is kept, so that the schedule is strictly rising.
    """
    horizon = max(times.values())
    return {max(1, min(steps, round(time / horizon * steps))): layer for layer, time in sorted(times.items())}


class TeacherCache:
    """What a teacher said of each image (of `views` augmented views of it), kept on disk as it is first computed.

    `key` stands for everything that decides an answer: another key is another folder, so that no answer of another
    teacher, augmentation, seed or list of layers is ever taken for this one's.
    """

    def __init__(self, folder: Path, key: object, images: int, views: int, layers: int, width: int, classes: int):
        rows = images * views
        whole = [key, rows, layers, width, classes]  # arrays of another shape are other files, too
        name = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.folder, self.images = folder / name, images
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known = self._array("known", (rows,), np.bool_)
        self.cls = self._array("cls", (rows, layers, width), np.float16)
        self.logits = self._array("logits", (rows, classes), np.float32)

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A file of zeros where there is none yet; of several processes that ask at once, one makes it."""
        path = self.folder / f"{name}.npy"
        if not path.exists():
            scratch = path.with_name(f".{name}.{os.getpid()}{PART}")
            try:
                np.lib.format.open_memmap(scratch, mode="w+", dtype=dtype, shape=shape)
                if hasattr(os, "posix_fallocate"):  # a disk that is full later would end the process without a word
                    with scratch.open("rb+") as file:
                        os.posix_fallocate(file.fileno(), 0, scratch.stat().st_size)
                with contextlib.suppress(FileExistsError):
                    os.link(scratch, path)
            except OSError as error:
                size = math.prod(shape) * np.dtype(dtype).itemsize
                raise UserError(
                    f"{path} could not be written: the teacher's answers take {size:,} bytes ({error.strerror})"
                ) from None
            finally:
                scratch.unlink(missing_ok=True)
        return np.lib.format.open_memmap(path, mode="r+")

    def answer(self, rows: Tensor, view: int, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """CLS states [B,layers,D] and logits [B,C], from disk if all of the batch is there."""
        where = view * self.images + rows.cpu().numpy()
        if not self.known[where].all():
            cls, logits = compute()
            self.cls[where], self.logits[where] = cls.half().cpu().numpy(), logits.float().cpu().numpy()
            self.known[where] = True  # last: a row is known only once it is whole
        device = rows.device
        return torch.from_numpy(self.cls[where]).float().to(device), torch.from_numpy(self.logits[where]).to(device)


def with_accuracy(facts: bundle.TeacherFacts, accuracy: float | None, note: str = "") -> bundle.TeacherFacts:
    return dataclasses.replace(facts, accuracy=accuracy, note=note or facts.note)
