"""Bundles in timm: importing this module registers `ode_vit_NAME` for each bundled model, and `ode_vit` for any other.

timm.create_model("ode_vit_photos", pretrained=True)            # a bundled one
timm.create_model("local-dir:FOLDER", pretrained=True)              # a bundle; hf-hub:OWNER/MODEL likewise
timm.create_model("ode_vit_photos", pretrained=True, num_classes=0)   # CLS in place of an answer
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm.models._factory
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from .. import bundle
from ..config import Config
from ..errors import UserError
from .model import ODEViT


class ODEViTTimm(ODEViT):
    """`ODEViT` with what timm's models have in common."""

    def __init__(self, config: Config, num_classes: int | None = None, **settings: Any):
        unknown = sorted(set(settings) - {"in_chans", "img_size", "global_pool", "drop_rate"})
        if unknown:
            raise UserError(f"an ODE-ViT has no setting {unknown[0]!r}")
        shape = config.architecture
        for key, own in (("in_chans", shape.channels), ("img_size", shape.image_size), ("global_pool", "token")):
            if settings.get(key, own) not in (own, (own, own)):
                raise UserError(f"{key} is {own} in this bundle, not {settings[key]}")
        if settings.get("drop_rate"):
            raise UserError("an ODE-ViT has no dropout before its head")
        super().__init__(config)
        self.num_features = self.head_hidden_size = self.embed_dim = shape.width
        self.num_classes = shape.classes
        self.num_prefix_tokens = 1
        self.global_pool = "token"
        if num_classes is not None:
            self.reset_classifier(num_classes)

    def forward_features(self, pixel_values: Tensor) -> Tensor:
        """The last state [B,S,D]: CLS, patches, registers."""
        state = self.stem(pixel_values)
        for point in self.trajectory(state):
            state = point.state
        return state

    def forward_head(self, state: Tensor, pre_logits: bool = False) -> Tensor:
        return state[:, 0] if pre_logits else self.answer(state)

    def forward(self, pixel_values: Tensor, **settings: object) -> Tensor:
        if settings:
            return super().forward(pixel_values, **settings)
        return self.forward_head(self.forward_features(pixel_values))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Another head: fresh for other classes, none (CLS itself is given) for 0 of them."""
        if num_classes == self.num_classes:
            return
        self.num_classes = num_classes
        if not num_classes:
            self.head = nn.Identity()  # type: ignore[assignment]
            return
        self.head = nn.Linear(self.num_features, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        shape = dataclasses.replace(self.config.architecture, classes=num_classes)
        self.config = self.config.replace(architecture=shape, labels=()).unmeasured()

    def no_weight_decay(self) -> set[str]:
        return {"cls", "position", "registers"}


def _words(config: Config) -> dict[str, Any]:
    """The configuration as timm's `pretrained_cfg`; preprocessing has timm's own words."""
    return {
        **dataclasses.asdict(config.preprocessing),
        "num_classes": config.architecture.classes,
        "label_names": config.labels or None,
        "license": config.license,
        "fixed_input_size": True,
        "classifier": "head",
    }


def _folder(cfg: dict[str, Any]) -> Path:
    """Where the bundle is that timm was asked for."""
    if cfg.get("source") == "hf-hub":
        return bundle.find(f"hf:{cfg['hf_hub_id']}")
    return bundle.find(cfg["file"])


def _complete(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    state = {name: value.float() for name, value in state.items()}
    if "psi.attention.key.weight" not in state:  # L2 attention stores the matrix that query and key share once
        state["psi.attention.key.weight"] = state["psi.attention.query.weight"]
    return state


def ode_vit(pretrained: bool = False, **settings: Any) -> ODEViTTimm:
    """The model of a bundle, found by `local-dir:FOLDER` or `hf-hub:OWNER/MODEL`."""
    cfg = settings.pop("pretrained_cfg", None)
    if not isinstance(cfg, dict):
        raise UserError("ode_vit is the model of a bundle: write local-dir:FOLDER, or ode_vit_NAME for a bundled one")
    folder = _folder(cfg)
    return _build("ode_vit", folder, pretrained, {**_words(bundle.read_config(folder)), "file": str(folder)}, settings)


def _build(name: str, folder: Path, pretrained: bool, cfg: Any, settings: dict[str, Any]) -> ODEViTTimm:
    if isinstance(cfg, dict):
        cfg = {**cfg, "file": str(folder / bundle.WEIGHTS)}
    model: ODEViTTimm = build_model_with_cfg(
        functools.partial(ODEViTTimm, bundle.read_config(folder)),  # type: ignore[arg-type]
        name,
        pretrained,
        pretrained_cfg=cfg,
        pretrained_filter_fn=_complete,
        **settings,
    )
    return model


def _bundled(name: str) -> Callable[..., ODEViTTimm]:
    def create(pretrained: bool = False, **settings: Any) -> ODEViTTimm:
        return _build(create.__name__, bundle.find(name), pretrained, settings.pop("pretrained_cfg", None), settings)

    create.__name__, create.__doc__ = f"ode_vit_{name}", f"The bundled model `{name}`."
    return create


def _names_its_architecture(read: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any]]:
    """timm takes `architecture` in a config.json for the name of a model; in a bundle it is the model's shape."""

    @functools.wraps(read)
    def wrapped(*arguments: Any, **settings: Any) -> tuple[Any, Any, Any]:
        cfg, name, more = read(*arguments, **settings)
        return cfg, "ode_vit" if isinstance(name, dict) else name, more

    return wrapped


default_cfgs = generate_default_cfgs(
    {
        f"ode_vit_{name}": {
            **_words(bundle.read_config(bundle.MODELS / name)),
            "file": str(bundle.MODELS / name / bundle.WEIGHTS),
        }
        for name in bundle.bundled()
    }
)
__all__ = ["ODEViTTimm", "ode_vit"]

register_model(ode_vit)
for _name in bundle.bundled():
    _create = _bundled(_name)
    setattr(sys.modules[__name__], _create.__name__, register_model(_create))
for _reader in ("load_model_config_from_path", "load_model_config_from_hf"):
    setattr(timm.models._factory, _reader, _names_its_architecture(getattr(timm.models._factory, _reader)))
