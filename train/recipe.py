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

from ..config import Architecture, Config, Division, Integration, Preprocessing
from ..errors import UsageError, UserError
from ..schema import build
from ..solvers import SOLVERS, SPLITTINGS, splits
from .class_names import shown_names
from .presets import PRESETS

RECIPES = Path(__file__).parent / "recipes"
AUGMENTATIONS = (
    "none",
    "flip",
    "crop-flip",
    "trivial",
    "randaugment",
    "imagenet",
    "photo",
    "small-photo",
    "mixed-photo",
)
GRADIENTS = ("backprop", "checkpoint", "truncated", "adjoint", "implicit", "jacobian-free")  # see gradients.py
JASMIN = ("code", "paper")  # see losses.jasmin


@dataclass(frozen=True)
class Data:
    source: str = ""  # image folder, zip file, CIFAR folder or .npz, or hf:NAME
    validation: float = 0.1  # part of the training images that chooses the model, where there is no own split
    calibration: float = 0.0  # part of the rest that is set aside to calibrate the finished model
    use_val_split: bool = True  # choose on the data's own `val` split, if it has one
    seed: int = 0  # which images are split off, or left by `limit`: that of the run whose bundle a run starts from
    crop_pct: float = 0.0  # side of the middle that is judged, a part of the picture's; 0: as the teacher says
    augment: str = "crop-flip"  # one of AUGMENTATIONS
    limit: int = 0  # use this many training images only
    unlabelled: bool = False  # learn what the teacher says of the data's photographs without labels, too
    names: dict[str, str] = field(default_factory=dict)  # class folder -> what people are shown; WordNet ids have one
    workers: int = -1  # processes that decode pictures; -1: none for arrays, else one a core

    @property
    def division(self) -> Division:
        return Division(self.validation, self.calibration, self.seed, self.use_val_split)


@dataclass(frozen=True)
class Teaching:
    source: str = ""  # timm:NAME, hf:NAME, or empty with `weights`; both empty: train from scratch
    weights: str = ""  # local safetensors file in timm's names
    head: str = "own"  # own | probe | finetune
    image_size: int = 0  # it sees the student's pictures resized to this many pixels a side; 0: as they are
    patch_size: int = 0  # pixels a side of its patches; 0: the student's
    classes: tuple[str, ...] = ()  # cut the teacher's own head down to these of its classes
    baseline: bool = True  # a probe that is worse than one on the features of the bundled model ends the run
    epochs: int = 5  # of fine-tuning
    lr: float = 3e-4
    weight_decay: float = 0.05
    batch_size: int = 128
    schedule: str = "onecycle"
    drop_path: float = 0.0
    temperature: float = 1.0  # of the checkpoint schedule, in units of the mean distance between layers
    layers: tuple[int, ...] = ()  # follow these teacher layers only; empty: all
    views: int = 0  # remember the teacher's answers to this many augmented views of each image; 0: none
    whole: bool = False  # it is shown each whole picture once, and what it says is remembered for all views of it
    unlabelled_size: int = 0  # with `whole`: photographs without labels are shown to it as it came, in this size

    @property
    def used(self) -> bool:
        return bool(self.source or self.weights)

    @property
    def remembers(self) -> int:
        """How many answers to each image are remembered."""
        return 1 if self.whole else self.views


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
    settle: float = 0.0


@dataclass(frozen=True)
class Training:
    epochs: int = 10  # 0: what it starts from is judged and kept as it is
    stop_after: int = 0  # end after so many of them, whatever the schedule has left; 0: after all
    batch_size: int = 64
    optimizer: str = "adamw"  # adamw | muon (matrices of psi by Muon, the rest by AdamW)
    lr: float = 1e-4
    muon_lr: float = 2e-3
    muon_stem: bool = False  # the kernels of a stem of convolutions by Muon, too
    weight_decay: float = 0.05
    schedule: str = "cosine-restarts"  # cosine-restarts | onecycle | constant
    warmup: float = 0.1  # part of the run
    restarts: int = 10
    clip: float = 1.0
    label_smoothing: float = 0.05
    ema: float = 0.0  # decay of the average that is validated and kept; 0: none
    steps: tuple[int, ...] = ()  # one is drawn for each batch, over the same horizon; empty: from 1 to the model's own
    solvers: tuple[str, ...] = ()  # one is drawn for each batch; empty: the model's own
    balance: float = 0.0  # how much of the unequal class frequencies is taken out of the head at the start; 1: all
    beyond: float = 0.0  # a batch may go on beyond the horizon by up to this part of it, so that the end rests
    mixup: float = 0.0  # images mixed in pairs, in shares drawn from Beta(mixup, mixup); 0: none
    gradient: str = "backprop"  # one of GRADIENTS
    gradient_steps: int = 0  # truncated: the last so many steps; adjoint: keep the state after every so many; implicit:
    # so many iterations; 0: 4, none but the last, 8
    anderson: int = 0  # implicit, jacobian-free: go to the equilibrium with a window of so many states; 0: the solver
    start: str = ""  # a bundle to start from: all weights but a head of other classes; see start.py
    start_epochs: int = 2  # where its stem is of another shape: epochs in which the new one learns to do the same
    warm_start: int = -1  # start psi from this block of the teacher; -1: spectral initialisation
    train_head: bool = False  # unfreeze the head
    train_stem: bool = False  # unfreeze the patch embedding, CLS and positions
    jasmin_rank: int = 10
    jasmin_form: str = "code"  # one of JASMIN
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
    stages: tuple[dict[str, Any], ...] = ()  # changes to all of the above, one after another; see `staged`

    def staged(self) -> list[Recipe]:
        """A recipe for each stage: this one with the stage's changes. The next begins from the bundle of the last."""
        return [self._changed(stage, number) for number, stage in enumerate(self.stages)]

    def _changed(self, changes: dict[str, Any], number: int) -> Recipe:
        where = f"stages[{number}]"
        data = {key: value for key, value in self.to_dict().items() if key != "stages"}
        if number:
            data["training"]["start"] = f"stage-{number}/bundle"  # where it is, `starting_from` says
        for section, values in changes.items():
            if not isinstance(data.get(section), dict) or not isinstance(values, dict):
                raise UsageError(f"{where} has no section {section!r}: it holds changes to the sections of a recipe")
            data[section] = {**data[section], **values}
        recipe: Recipe = build(Recipe, data, where)
        return recipe

    def starting_from(self, folder: Path) -> Recipe:
        return dataclasses.replace(self, training=dataclasses.replace(self.training, start=str(folder)))

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise UsageError(f"unknown preset {self.preset!r}{_nearest(self.preset, PRESETS)}")
        choices = (
            ("teacher.head", self.teacher.head, ("own", "probe", "finetune")),
            ("training.optimizer", self.training.optimizer, ("adamw", "muon")),
            ("training.schedule", self.training.schedule, ("cosine-restarts", "onecycle", "constant")),
            ("teacher.schedule", self.teacher.schedule, ("cosine-restarts", "onecycle", "constant")),
            ("training.mixed_precision", self.training.mixed_precision, ("no", "bf16", "fp16")),
            ("training.gradient", self.training.gradient, GRADIENTS),
            ("training.jasmin_form", self.training.jasmin_form, JASMIN),
            ("data.augment", self.data.augment, AUGMENTATIONS),
        )
        for where, value, known in choices:
            if value not in known:
                raise UsageError(f"{where} {value!r}: choose one of {', '.join(known)}")
        for where, number, least in (
            ("training.epochs", self.training.epochs, 0 if self.training.start else 1),
            ("training.batch_size", self.training.batch_size, 1),
            ("training.lr", self.training.lr, 0),
            ("training.gradient_steps", self.training.gradient_steps, 0),
            ("training.anderson", self.training.anderson, 0),
            ("training.jasmin_rank", self.training.jasmin_rank, 2),
            ("teacher.epochs", self.teacher.epochs, 1),
            ("teacher.batch_size", self.teacher.batch_size, 1),
        ):
            if number < least or not math.isfinite(number):
                raise UsageError(f"{where} must be at least {least}, not {number}")
        if self.training.steps and min(self.training.steps) < 1:
            raise UsageError(f"training.steps must be numbers from 1 on, not {list(self.training.steps)}")
        for solver in self.training.solvers:
            if solver not in SOLVERS:
                raise UsageError(f"training.solvers: {solver!r} is none of {', '.join(SOLVERS)}")
        own = {**dataclasses.asdict(PRESETS[self.preset].integration), **self.integration}
        for solver in self.training.solvers or [name for name in SOLVERS if name == own["solver"]]:
            if own["splitting"] in SPLITTINGS and not splits(solver, own["splitting"]):
                raise UsageError(f"the solver {solver} has no sub-flows: integration.splitting must be parallel")
            if self.training.gradient == "adjoint" and not SOLVERS[solver].order:
                raise UsageError(
                    f"training.gradient 'adjoint' integrates back in time, which the solver {solver} does not follow: "
                    "choose backprop or implicit"
                )
        if not 0 <= self.training.beyond <= 4:
            raise UsageError(f"training.beyond must be from 0 to 4, not {self.training.beyond}")
        if not 0 <= self.data.crop_pct <= 1:
            raise UsageError(f"data.crop_pct must be from 0 to 1, not {self.data.crop_pct}")
        if self.training.mixup < 0:
            raise UsageError(f"training.mixup must be 0 or more, not {self.training.mixup}")
        if self.teacher.whole and self.teacher.views:
            raise UsageError("teacher.whole and teacher.views exclude each other: one remembers whole pictures")
        if self.data.unlabelled and not self.teacher.used:
            raise UsageError("data.unlabelled needs a teacher, whose answers photographs without labels are trained on")
        if self.teacher.unlabelled_size and not self.teacher.whole:
            raise UsageError("teacher.unlabelled_size shows whole photographs: it needs teacher.whole")
        for name in ("patches", "hints"):
            if self.teacher.remembers and getattr(self.losses, name):
                kind = "whole" if self.teacher.whole else "views"
                raise UsageError(f"teacher.{kind} keeps CLS states only, so it cannot serve losses.{name}")
            if self.teacher.image_size and getattr(self.losses, name):
                raise UsageError(f"losses.{name} compares patch by patch: teacher.image_size must be the student's")
        followed = [name for name in ("trajectory", "patches", "hints", "distillation") if getattr(self.losses, name)]
        if followed and not self.teacher.used:
            raise UsageError(f"losses.{followed[0]} follows a teacher: name one with --teacher or --teacher-weights")
        if not any(dataclasses.astuple(self.losses)):
            raise UsageError("every loss has weight 0: there is nothing to learn from")
        self.staged()  # a stage that cannot work is told before any work

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
        names = shown_names(labels, self.data.names if labels else {})
        return Config(
            architecture,
            integration,
            transform,
            names,
            class_ids=() if names == labels else labels,
            name=self.name or self.preset,
            division=self.data.division,
        )

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
        if not file.is_file() and (RECIPES / f"{path}.toml").is_file():
            file = RECIPES / f"{path}.toml"
        try:
            text = file.read_text(encoding="utf-8")
            data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except FileNotFoundError:
            known = sorted(p.stem for p in RECIPES.glob("*.toml"))
            raise UserError(f"no recipe {str(path)!r}: shipped are {', '.join(known)}") from None
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror or error})") from None
        except (ValueError, RecursionError) as error:  # of either notation, no text at all, or lists without end
            kind = "JSON" if file.suffix == ".json" else "TOML"
            raise UserError(f"{file} is not valid {kind} ({error})") from None
        if not isinstance(data, dict):
            raise UserError(f"{file} does not hold a recipe")
    for override in overrides:
        _override(data, override)
    if "losses" not in data:
        teacher = data.get("teacher")
        named = isinstance(teacher, dict) and (teacher.get("source") or teacher.get("weights"))
        data["losses"] = DISTILLED if named else SCRATCH
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
        if not isinstance(data, dict):
            raise UsageError(f"{key.strip()!r} cannot be set: {part!r} of the recipe is no section")
    data[name] = value


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f": did you mean {close[0]!r}?" if close else f": choose one of {', '.join(known)}"
