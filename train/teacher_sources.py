"""Where a teacher comes from: timm, transformers or a file of weights, each as timm's VisionTransformer."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..config import Architecture, Preprocessing, TeacherFacts
from ..errors import UsageError, UserError
from .recipe import Teaching
from .teacher import Teacher


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


def _describe(vit: VisionTransformer, name: str, license: str = "") -> TeacherFacts:
    block: Any = vit.blocks[0]
    ratio = block.mlp.fc1.out_features / vit.embed_dim
    return TeacherFacts(name, len(vit.blocks), vit.embed_dim, block.attn.num_heads, ratio, license=license)


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
