"""What a training run is made of, as data: read from a TOML file, overridden key by key. Torch is not needed here.

Each section is a dataclass; an unknown or mistyped key is refused by name before any work is done.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bundle import Architecture, Config, Integration, Preprocessing, build
from ..errors import UsageError, UserError
from .presets import PRESETS

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Data:
    source: str = ""  # image folder, zip file, CIFAR folder or .npz, or hf:NAME
    validation: float = 0.1  # part of the training images that chooses the model, where there is no own split
    use_val_split: bool = True  # choose on the data's own `val` split, if it has one
    seed: int = 0  # which images are split off, or left by `limit`: that of the run whose bundle a run starts from
    crop_pct: float = 0.0  # side of the middle that is judged, a part of the picture's; 0: as the teacher says
    augment: str = "crop-flip"  # one of data.AUGMENTATIONS
    limit: int = 0  # use this many training images only
    workers: int = -1  # processes that decode pictures; -1: none for arrays, else one a core


@dataclass(frozen=True)
class Teaching:
    source: str = ""  # timm:NAME, hf:NAME, or empty with `weights`; both empty: train from scratch
    weights: str = ""  # local safetensors file in timm's names
    head: str = "own"  # own | probe | finetune
    image_size: int = 0  # it sees the student's pictures resized to this many pixels a side; 0: as they are
    classes: tuple[str, ...] = ()  # cut the teacher's own head down to these of its classes
    epochs: int = 5  # of probe or fine-tuning
    lr: float = 3e-4
    weight_decay: float = 0.05
    batch_size: int = 128
    schedule: str = "onecycle"
    drop_path: float = 0.0
    temperature: float = 1.0  # of the checkpoint schedule, in units of the mean distance between layers
    layers: tuple[int, ...] = ()  # follow these teacher layers only; empty: all
    views: int = 0  # remember the teacher's answers to this many augmented views of each image; 0: none

    @property
    def used(self) -> bool:
        return bool(self.source or self.weights)


@dataclass(frozen=True)
class Weights:
    """The weight of each loss; 0 leaves it out. The names are those of losses.LOSSES."""

    trajectory: float = 0.0
    patches: float = 0.0
    hints: float = 0.0
    jasmin: float = 0.0
    cross_entropy: float = 0.0
    distillation: float = 0.0
    transport: float = 0.0
    steady: float = 0.0
    intermediate: float = 0.0


@dataclass(frozen=True)
class Training:
    epochs: int = 10  # 0: what it starts from is judged and kept as it is
    batch_size: int = 64
    optimizer: str = "adamw"  # adamw | muon (matrices of psi by Muon, the rest by AdamW)
    lr: float = 1e-4
    muon_lr: float = 2e-3
    weight_decay: float = 0.05
    schedule: str = "cosine-restarts"  # cosine-restarts | onecycle | constant
    warmup: float = 0.1  # part of the run
    restarts: int = 10
    clip: float = 1.0
    label_smoothing: float = 0.05
    ema: float = 0.0  # decay of the average that is validated and kept; 0: none
    random_depth: tuple[int, ...] = ()  # (low, high): steps of each batch, at the same step size
    random_resolution: tuple[int, ...] = ()  # (low, high): steps of each batch over the same horizon
    step_jitter: float = 0.0  # the step size of each batch differs by up to this part of it
    mixup: float = 0.0  # images mixed in pairs, in shares drawn from Beta(mixup, mixup); 0: none
    truncate: int = 0  # gradients through the last so many steps only; 0: through all
    checkpointing: bool = False  # recompute steps in the backward pass, to save memory
    start: str = ""  # a bundle to start from: all weights but a head of other classes; see start.py
    start_with: tuple[str, ...] = ()  # bundles of the same shape: it starts from the mean of their weights and its own
    start_epochs: int = 2  # where its stem is of another shape: epochs in which the new one learns to do the same
    warm_start: int = -1  # start psi from this block of the teacher; -1: spectral initialisation
    train_head: bool = False  # unfreeze the head
    train_stem: bool = False  # unfreeze the patch embedding, CLS and positions
    jasmin_rank: int = 10
    distillation_temperature: float = 2.0
    mixed_precision: str = "no"  # no | bf16 | fp16
    compile: bool = False
    bound_patience: int = 0  # stop when the losses stay below the bound for so many epochs; 0: never
    bound_radius: float = 10.0
    bound_lipschitz: float = 0.5
    save_seconds: float = 120.0
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    preset: str = "tiny"
    name: str = ""
    architecture: dict[str, Any] = field(default_factory=dict)  # changes to the preset's
    integration: dict[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    teacher: Teaching = field(default_factory=Teaching)
    losses: Weights = field(default_factory=Weights)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise UsageError(f"unknown preset {self.preset!r}{_nearest(self.preset, PRESETS)}")
        choices = (
            ("teacher.head", self.teacher.head, ("own", "probe", "finetune")),
            ("training.optimizer", self.training.optimizer, ("adamw", "muon")),
            ("training.schedule", self.training.schedule, ("cosine-restarts", "onecycle", "constant")),
            ("teacher.schedule", self.teacher.schedule, ("cosine-restarts", "onecycle", "constant")),
            ("training.mixed_precision", self.training.mixed_precision, ("no", "bf16", "fp16")),
            ("data.augment", self.data.augment, ("none", "flip", "crop-flip", "trivial", "randaugment", "imagenet")),
        )
        for where, value, known in choices:
            if value not in known:
                raise UsageError(f"{where} {value!r}: choose one of {', '.join(known)}")
        for where, number, least in (
            ("training.epochs", self.training.epochs, 0 if self.training.start else 1),
            ("training.batch_size", self.training.batch_size, 1),
            ("training.lr", self.training.lr, 0),
            ("teacher.epochs", self.teacher.epochs, 1),
            ("teacher.batch_size", self.teacher.batch_size, 1),
        ):
            if number < least or not math.isfinite(number):
                raise UsageError(f"{where} must be at least {least}, not {number}")
        for where, pair in (
            ("random_depth", self.training.random_depth),
            ("random_resolution", self.training.random_resolution),
        ):
            if pair and (len(pair) != 2 or not 1 <= pair[0] <= pair[1]):
                raise UsageError(f"training.{where} must be two rising numbers from 1 on, not {list(pair)}")
        if not 0 <= self.data.crop_pct <= 1:
            raise UsageError(f"data.crop_pct must be from 0 to 1, not {self.data.crop_pct}")
        if self.training.start_with and not self.training.start:
            raise UsageError("training.start_with names bundles to be averaged with training.start, which is not set")
        if self.training.mixup < 0:
            raise UsageError(f"training.mixup must be 0 or more, not {self.training.mixup}")
        if not 0 <= self.training.step_jitter < 1:
            raise UsageError(f"training.step_jitter must be from 0 to below 1, not {self.training.step_jitter}")
        if self.training.random_depth and self.training.random_resolution:
            raise UsageError("training.random_depth and training.random_resolution exclude each other")
        for name in ("patches", "hints"):
            if self.teacher.views and getattr(self.losses, name):
                raise UsageError(f"teacher.views keeps CLS states only, so it cannot serve losses.{name}")
            if self.teacher.image_size and getattr(self.losses, name):
                raise UsageError(f"losses.{name} compares patch by patch: teacher.image_size must be the student's")
        followed = [name for name in ("trajectory", "patches", "hints", "distillation") if getattr(self.losses, name)]
        if followed and not self.teacher.used:
            raise UsageError(f"losses.{followed[0]} follows a teacher: name one with --teacher or --teacher-weights")
        if not any(dataclasses.astuple(self.losses)):
            raise UsageError("every loss has weight 0: there is nothing to learn from")

    def model(self, classes: int, labels: tuple[str, ...], preprocessing: Preprocessing | None = None) -> Config:
        """The configuration of the model this recipe trains, for a head of so many classes."""
        preset = PRESETS[self.preset]
        shape = {**dataclasses.asdict(preset.architecture), **self.architecture, "classes": classes}
        architecture: Architecture = build(Architecture, shape, "architecture")
        integration: Integration = build(
            Integration, {**dataclasses.asdict(preset.integration), **self.integration}, "integration"
        )
        size = (architecture.channels, architecture.image_size, architecture.image_size)
        given = preprocessing or preset.preprocessing
        transform = dataclasses.replace(given, input_size=size, crop_pct=self.data.crop_pct or given.crop_pct)
        return Config(architecture, integration, transform, labels, name=self.name or self.preset, teacher=None)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


SCRATCH = {"cross_entropy": 1.0}
DISTILLED = {"trajectory": 1.0, "distillation": 1.0, "cross_entropy": 0.5, "intermediate": 0.5}
SELF_SUPERVISED = {"trajectory": 1.0, "jasmin": 0.01}


def read_recipe(path: str | Path | None, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a file (TOML, or the JSON of a run) or the name of a shipped one.

    Overrides are `section.key=value` in TOML's notation.
    """
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.exists() and (RECIPES / f"{path}.toml").is_file():
            file = RECIPES / f"{path}.toml"
        try:
            text = file.read_text(encoding="utf-8")
            data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except FileNotFoundError:
            known = sorted(p.stem for p in RECIPES.glob("*.toml"))
            raise UserError(f"no recipe {str(path)!r}: shipped are {', '.join(known)}") from None
        except ValueError as error:  # of either notation, or no text at all
            kind = "JSON" if file.suffix == ".json" else "TOML"
            raise UserError(f"{file} is not valid {kind} ({error})") from None
        if not isinstance(data, dict):
            raise UserError(f"{file} does not hold a recipe")
    for override in overrides:
        _override(data, override)
    if "losses" not in data:
        teacher = Teaching(**{k: v for k, v in data.get("teacher", {}).items() if k in ("source", "weights")})
        data["losses"] = DISTILLED if teacher.used else SCRATCH
    recipe: Recipe = build(Recipe, data, "")
    return recipe


def _override(data: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals:
        raise UsageError(f"--set takes section.key=value, not {text!r}")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw  # a bare word is a string
    *sections, name = key.strip().split(".")
    kind: Any = Recipe
    for part in [*sections, name]:
        known = {f.name: f for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
        if known is None:
            break
        if part not in known:
            raise UsageError(f"unknown setting {key.strip()!r}{_nearest(part, known)}")
        factory = known[part].default_factory
        kind = factory if dataclasses.is_dataclass(factory) else None
    for part in sections:
        data = data.setdefault(part, {})
    data[name] = value


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f": did you mean {close[0]!r}?" if close else f": choose one of {', '.join(known)}"
