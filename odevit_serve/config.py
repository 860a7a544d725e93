"""What `config.json` says of a model: its shape, how it is integrated, what it sees, when it stops, what was measured.

Reading and checking it needs the standard library alone, so that every part of the toolkit can depend on it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from typing import Any

from .costs import macs
from .errors import UsageError, UserError
from .schema import build, shown
from .solvers import SOLVERS, SPLITTINGS, evaluations, splits

SCHEMA_VERSION = 2
MODEL_TYPE = "ode_vit"  # by which transformers knows the model, see train/hf.py

ATTENTIONS = ("dot", "l2")
STEMS = ("patch", "convolutions", "deep")
LARGEST = 2**24  # of any size or number of steps: products of some of them stay within what floats and arrays can hold


def _choice(value: str, known: typing.Iterable[str], what: str) -> None:
    if value not in known:
        raise UsageError(f"unknown {what} {shown(value)}: choose one of {', '.join(known)}")


@dataclass(frozen=True)
class Architecture:
    """The shape of the model; `width`, `heads` and `patch_size` are those of the teacher it follows."""

    image_size: int = 32
    patch_size: int = 4
    width: int = 192
    heads: int = 3
    mlp_ratio: float = 4.0
    classes: int = 10
    registers: int = 0
    attention: str = "dot"
    convolution: int = 0  # kernel of the depthwise convolution on the patch grid inside F; 0 leaves it out
    channels: int = 3
    stem: str = "patch"  # patch: the teacher's patch embedding; convolutions, deep: a stack of them, trained
    stem_width: int = 0  # channels that enter the last convolution of a stack; 0: half of the width

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "width", "heads", "classes", "channels"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise UsageError(f"{name} must be from 1 to {LARGEST:,}, not {shown(getattr(self, name))}")
        for name in ("mlp_ratio", "registers", "convolution", "stem_width"):
            if not 0 <= getattr(self, name) <= LARGEST:
                raise UsageError(f"{name} must be from 0 to {LARGEST:,}, not {shown(getattr(self, name))}")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.image_size % self.patch_size:
            raise UsageError(f"image size {self.image_size} is not divisible by patch size {self.patch_size}")
        if self.hidden < 1:
            raise UsageError(f"mlp_ratio {self.mlp_ratio} of width {self.width} leaves no hidden unit")
        if self.convolution and self.convolution % 2 == 0:
            raise UsageError(f"convolution must be 0 or an odd kernel size, not {self.convolution}")
        _choice(self.attention, ATTENTIONS, "attention")
        _choice(self.stem, STEMS, "stem")
        if self.stem != "patch" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            raise UsageError(
                f"a stem of convolutions halves the picture: patch_size {self.patch_size} is no power of 2"
            )

    @property
    def grid(self) -> int:
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.grid**2

    @property
    def tokens(self) -> int:
        return 1 + self.patches + self.registers

    @property
    def hidden(self) -> int:
        return int(self.width * self.mlp_ratio)

    def convolutions(self) -> list[tuple[int, int, int, int, int]]:
        """The stem: (inputs, outputs, kernel, stride, side of the output) of each convolution.

        A stack halves the picture with kernels of 3, doubling the channels up to `stem_width`, with one more of
        stride 1 before the last, which leads to the width of the model. A deep one looks at the whole picture first,
        has one more after each halving, and ends in a kernel of 1.
        """
        if self.stem == "patch":
            return [(self.channels, self.width, self.patch_size, self.patch_size, self.grid)]
        side, halvings, wide = self.image_size, self.patch_size.bit_length() - 1, self.stem_width or self.width // 2
        if self.stem == "deep":
            inputs = max(1, wide >> halvings)
            layers = [(self.channels, inputs, 3, 1, side)]
            for left in range(halvings - 1, -1, -1):
                outputs, side = max(1, wide >> left), side // 2
                layers += [(inputs, outputs, 3, 2, side), (outputs, outputs, 3, 1, side)]
                inputs = outputs
            return [*layers, (inputs, self.width, 1, 1, side)]
        layers, inputs = [], self.channels
        for left in range(halvings - 1, -1, -1):
            if not left and halvings > 1:
                layers.append((inputs, inputs, 3, 1, side))
            side //= 2
            outputs = max(1, wide >> (left - 1)) if left else self.width
            layers.append((inputs, outputs, 3, 2, side))
            inputs = outputs
        return layers


@dataclass(frozen=True)
class Integration:
    """How the trajectory is computed. Time is counted in teacher layers; `steps` counts steps, not points."""

    horizon: float = 12.0
    steps: int = 12
    solver: str = "euler"
    splitting: str = "parallel"
    tolerance: float = 0.0  # of a step's estimated error: an image takes several steps at once where it allows that

    def __str__(self) -> str:
        text = f"{self.steps} steps of {self.solver} ({self.splitting}) over horizon {self.horizon:g}"
        return f"at most {text}, tolerance {self.tolerance:g}" if self.tolerance else text

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps must be at least 1, not {self.steps}")
        if self.steps > LARGEST:
            raise UsageError(f"steps may be at most {LARGEST:,}, not {shown(self.steps)}")
        if not (self.horizon > 0 and math.isfinite(self.horizon)):
            raise UsageError(f"horizon must be a positive number, not {self.horizon}")
        _choice(self.solver, SOLVERS, "solver")
        _choice(self.splitting, SPLITTINGS, "splitting")
        if not splits(self.solver, self.splitting):
            raise UsageError(
                f"the solver {self.solver} has no sub-flows: it needs the splitting parallel, not {self.splitting}"
            )
        if not 0 <= self.tolerance < math.inf:
            raise UsageError(f"tolerance must be a number of 0 or more, not {self.tolerance}")
        if self.tolerance and not (SOLVERS[self.solver].estimates and self.splitting == "parallel"):
            known = " or ".join(name for name, solver in SOLVERS.items() if solver.estimates)
            raise UsageError(
                f"a tolerance needs the solver {known} and the splitting parallel, not {self.solver} ({self.splitting})"
            )

    def by(
        self, solver: str | None = None, splitting: str | None = None, tolerance: float | None = None
    ) -> Integration:
        """The same steps otherwise; a tolerance that was not asked for is dropped where it cannot be kept."""
        chosen, split = solver or self.solver, splitting or self.splitting
        if tolerance is None:
            kept = chosen in SOLVERS and SOLVERS[chosen].estimates and split == "parallel"
            tolerance = self.tolerance if kept else 0.0
        return Integration(self.horizon, self.steps, chosen, split, tolerance)

    @property
    def step_size(self) -> float:
        return self.horizon / self.steps

    def setting(self, precision: str = "fp32", stem: str = "", step: str = "") -> Setting:
        """These steps by graphs of this precision and these digests."""
        return Setting(self.steps, self.horizon, self.solver, self.splitting, precision, stem, step, self.tolerance)

    @property
    def evaluations(self) -> int:
        """Of psi, in one step."""
        return max(evaluations(self.solver, self.splitting))

    def macs(self, architecture: Architecture, steps: float | None = None) -> float:
        """Multiply-adds of one image, at full depth or at `steps`."""
        return macs(architecture, self, steps)


@dataclass(frozen=True)
class Preprocessing:
    """Evaluation transform in timm's words."""

    input_size: tuple[int, int, int] = (3, 32, 32)
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        _choice(self.interpolation, ("nearest", "bilinear", "bicubic", "lanczos"), "interpolation")
        _choice(self.crop_mode, ("center", "squash", "border"), "crop_mode")
        if min(self.input_size) < 1:
            raise UsageError(f"input_size must be positive, not {shown(list(self.input_size))}")
        if len(self.mean) != self.input_size[0] or len(self.std) != self.input_size[0]:
            raise UsageError(
                f"mean and std have {len(self.mean)} and {len(self.std)} values for {self.input_size[0]} channels"
            )
        if not 0 < self.crop_pct <= 1:
            raise UsageError(f"crop_pct must be above 0 and at most 1, not {self.crop_pct}")
        if min(self.std) <= 0:
            raise UsageError(f"std must be positive, not {min(self.std)}")


@dataclass(frozen=True)
class Setting:
    """What computes a trajectory. A proof made for one setting says nothing about another."""

    steps: int
    horizon: float
    solver: str = "euler"
    splitting: str = "parallel"
    precision: str = "fp32"
    stem: str = ""  # digests of the graphs, without metadata
    step: str = ""
    tolerance: float = 0.0

    @property
    def integration(self) -> Integration:
        return Integration(self.horizon, self.steps, self.solver, self.splitting, self.tolerance)


@dataclass(frozen=True)
class Calibration:
    """What the guarantee rests on: P(early answer differs from full depth) <= epsilon with confidence 1 - delta."""

    epsilon: float
    delta: float
    images: int
    data_sha256: str
    setting: Setting  # the one it was made for
    target: str = "agreement"  # or "accuracy"
    chosen: str = ""  # how the images were chosen
    observed: float = 0.0  # fraction of calibration images that differ at the chosen threshold
    bound: float = 1.0  # its upper confidence bound
    mean_steps: float = 0.0
    exits: dict[str, float] = field(default_factory=dict)  # share of those images by the reason they ended for
    contracting: float | None = None  # and of those that end early in the contraction region: with an exponent below 0


@dataclass(frozen=True)
class ExitPolicy:
    """The rule an image exits by, and what calibration measured for it."""

    rule: str = "travel"
    threshold: float = 1.0  # an image exits when the score of the rule reaches it
    lyapunov: float | None = None  # or when so many Lyapunov times have passed; None: no limit
    travel: tuple[float, ...] = ()  # mean remaining CLS travel after step 0, 1, ..., N (N: zero) of `horizon`
    horizon: float = 0.0  # over which `travel` was measured
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Unsure:
    """Below which confidence an answer is marked: P(wrong | not marked) <= alpha with confidence 1 - delta."""

    threshold: float  # on the probability of the answer
    alpha: float
    delta: float
    images: int  # that were tested and not marked
    marked: float = 0.0  # part of the tested images that was
    wrong: float = 0.0  # part of those not marked that was
    bound: float = 1.0  # its upper confidence bound


@dataclass(frozen=True)
class Confidence:
    """What probabilities mean, from labelled calibration images at their exit."""

    temperature: float = 1.0  # that logits are divided by before they become probabilities
    images: int = 0  # that it was fitted on
    error_before: float | None = None  # expected calibration error on other images, at temperature 1
    error: float | None = None  # and at this one
    unsure: Unsure | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UsageError(f"confidence.temperature must be positive, not {self.temperature}")


@dataclass(frozen=True)
class Division:
    """How training images are divided, so that anyone can draw the same parts again."""

    validation: float = 0.1  # part of the training images that chooses the model, where there is no split of its own
    calibration: float = 0.0  # part of the rest that calibrates it: neither trains nor chooses
    seed: int = 0
    own_validation: bool = True  # choose on the data's own `val` split, if it has one


@dataclass(frozen=True)
class TeacherFacts:
    """The ViT a student follows: enough to compare costs and to give credit."""

    name: str
    layers: int = 12
    width: int = 192
    heads: int = 3
    mlp_ratio: float = 4.0
    accuracy: float | None = None
    time: float | None = None  # of one image in onnxruntime, in full depths of the student on the same machine
    license: str = ""
    note: str = ""


@dataclass(frozen=True)
class Config:
    """Everything about a model but its weights."""

    architecture: Architecture = field(default_factory=Architecture)
    integration: Integration = field(default_factory=Integration)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    labels: tuple[str, ...] = ()
    class_ids: tuple[str, ...] = ()  # what the classes are called in the data, where labels are other names
    exit: ExitPolicy = field(default_factory=ExitPolicy)
    confidence: Confidence | None = None
    teacher: TeacherFacts | None = None
    division: Division | None = None  # of the data it was trained on
    exported_from: Integration | None = None  # in a single file: how the bundle it was made from integrates
    name: str = "ode-vit"
    license: str = "apache-2.0"
    metrics: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    # What transformers reads of this file to find the classes in train/hf.py
    model_type: str = MODEL_TYPE
    architectures: tuple[str, ...] = ("ODEViTForImageClassification",)
    auto_map: dict[str, Any] = field(default_factory=dict)  # where they are, if they lie in the bundle itself

    def __post_init__(self) -> None:
        _choice(self.model_type, (MODEL_TYPE,), "model_type")
        if self.labels and len(self.labels) != self.architecture.classes:
            raise UsageError(f"labels: {len(self.labels)} names for a head of {self.architecture.classes} classes")
        if self.class_ids and len(self.class_ids) != len(self.labels):
            raise UsageError(f"class_ids: {len(self.class_ids)} for {len(self.labels)} labels")
        size, image = self.preprocessing.input_size, self.architecture.image_size
        if tuple(size) != (self.architecture.channels, image, image):
            raise UsageError(f"preprocessing.input_size {list(size)} does not match architecture.image_size {image}")
        if self.exit.travel and len(self.exit.travel) < 2:
            raise UsageError("exit.travel needs a number for each step and one for the start")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "config.json") -> Config:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # the latter: lists within lists without end
            raise UserError(f"{source} is not valid JSON ({error})") from None
        if not isinstance(data, dict):
            raise UserError(f"{source} does not hold a JSON object")
        if "schema_version" not in data:
            kind = data.get("model_type") or data.get("architecture")
            named = f" but of a {shown(kind)}" if isinstance(kind, str) and kind != MODEL_TYPE else ""
            raise UserError(f"{source} is not the configuration of an ODE-ViT{named}: it has no schema_version")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{source} is of schema version {shown(version)}, and this version reads {SCHEMA_VERSION}: "
                "make it again with odevit-serve train (a bundle) or odevit-serve export (a file)"
            )
        try:
            config: Config = build(cls, data)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        return config

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)

    def class_index(self) -> dict[str, int]:
        """Class by name: the labels and, where they differ, the names in the data."""
        return {name: i for names in (self.class_ids, self.labels) for i, name in enumerate(names)}

    def unmeasured(self) -> Config:
        """The same model with other weights: what was measured, calibrated and set aside does not hold for it."""
        note = {**self.provenance, "started_from": self.name}
        return self.replace(exit=ExitPolicy(), confidence=None, metrics={}, division=None, provenance=note)
