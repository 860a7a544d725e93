"""`odevit-serve val`: what a bundle's weights are worth on held-out images, by steps and by horizon."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from .. import bundle
from ..config import Config, Integration
from ..data.datasets import Images
from ..data.division import pick
from ..errors import UsageError
from ..runtime import exits
from ..runtime.model import load
from ..runtime.results import Prediction
from ..solvers import SOLVERS, splits
from .batches import Batch, PictureDataset, Unreadable, loader
from .judge import judge
from .model import ODEViT
from .progress import Say
from .recipe import Teaching
from .teacher import Teacher, choose_classes
from .teacher_sources import load_teacher


def _noise(strength: float, batch: Batch, config: Config) -> Tensor:
    """Gaussian noise of so many parts of the grey scale, the same for the same images."""
    generator = torch.Generator().manual_seed(int(batch.rows[0]))
    scale = torch.tensor(config.preprocessing.std).view(-1, 1, 1)
    return batch.pixel_values + strength / scale * torch.randn(batch.pixel_values.shape, generator=generator)


def _blur(strength: float, batch: Batch, config: Config) -> Tensor:
    """Gaussian blur; its width is a part of the picture's."""
    sigma = strength * config.architecture.image_size
    return gaussian_blur(batch.pixel_values, [2 * math.ceil(3 * sigma) + 1] * 2, [sigma, sigma])


SPOILT: dict[str, Callable[[Batch, Config], Tensor]] = {
    "noise 0.05": partial(_noise, 0.05),
    "noise 0.10": partial(_noise, 0.10),
    "blur 1/64": partial(_blur, 1 / 64),
    "blur 1/32": partial(_blur, 1 / 32),
}


CARD_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 18, 24)


@dataclass(frozen=True)
class ValidationPlan:
    """What `validate` measures: every pair of steps and horizon; empty: around the bundle's own."""

    steps: Sequence[int] = ()
    horizons: Sequence[float] = ()
    solver: str | None = None
    splitting: str | None = None
    robustness: bool = False  # also, at the first pair, every solver and each of `SPOILT`
    card: bool = False  # in place of all that what a card shows: `CARD_STEPS`, every solver, half a horizon more

    @property
    def own(self) -> bool:
        """Nothing but the bundle's own integration is asked for."""
        return not (self.steps or self.horizons or self.solver or self.splitting)

    def others(self, used: str, own: Integration) -> list[str]:
        """Every other solver that takes the splitting."""
        return [name for name in SOLVERS if name != used and splits(name, self.splitting or own.splitting)]

    def grid(self, own: Integration) -> list[Trial]:
        if self.card:
            trials = [Trial(n, own.horizon, own.solver) for n in sorted({*CARD_STEPS, own.steps})]
            trials += [Trial(own.steps, own.horizon, other) for other in self.others(own.solver, own)]
            return [*trials, Trial(own.steps * 3 // 2, own.step_size * (own.steps * 3 // 2), own.solver)]
        counts = list(self.steps) or sorted({max(1, own.steps // 2), own.steps, own.steps * 3 // 2, own.steps * 2})
        horizons, used = list(self.horizons) or [own.horizon], self.solver or own.solver
        trials = [Trial(n, t, used) for t in horizons for n in counts]
        if self.robustness:
            count, horizon = (self.steps[0] if self.steps else own.steps), horizons[0]
            trials += [Trial(count, horizon, other) for other in self.others(used, own)]
            trials += [Trial(count, horizon, used, pictures) for pictures in SPOILT]
        return trials


class Trial(NamedTuple):
    """One row of the table: how the images are integrated, and what is done to them before."""

    steps: float
    horizon: float
    solver: str
    pictures: str = "as they are"


OWN, NO_TEACHER = ValidationPlan(), Teaching()


class Sums:
    """Adds up the judgements of batches: means over the images, and accuracy as a mean over classes."""

    def __init__(self, classes: int):
        self.total, self.images = torch.zeros(6).double(), 0
        self.right, self.seen = torch.zeros(classes), torch.zeros(classes)
        self.same: int | None = None  # answers that are those of full depth

    def add(self, judged: Tensor, labels: Tensor, same: Tensor | None = None) -> None:
        self.total += judged.double().sum(0)
        self.images += len(judged)
        if same is not None:
            self.same = (self.same or 0) + int(same.sum())
        labelled = labels >= 0
        self.seen += torch.bincount(labels[labelled], minlength=len(self.seen))
        self.right += torch.bincount(labels[labelled], judged[labelled, 0], len(self.right))

    def row(self, labelled: bool, compared: bool) -> dict[str, float]:
        top, three, five, loss, agrees, _ = (self.total / self.images).tolist()
        found: dict[str, float] = {}
        if labelled:
            macro = (self.right / self.seen)[self.seen > 0].mean().item()
            found |= {"accuracy": top, "accuracy@3": three, "accuracy@5": five, "macro_accuracy": macro, "loss": loss}
        if self.same is not None:
            found["as_full_depth"] = self.same / self.images
        return found | ({"agreement": agrees} if compared else {})


@torch.no_grad()
def validate(
    source: str | None,
    data: str,
    asked: ValidationPlan = OWN,
    teacher: Teaching = NO_TEACHER,
    split: str | None = None,
    limit: int = 0,
    batch_size: int = 64,
    say: Say = print,
    only: str = "",
) -> list[dict[str, Any]]:
    """One row for each trial that is asked for, all on the same images: those whose file name matches `only`.

    Where nothing is asked but the bundle's own integration, and it is calibrated, the last row is that of early exit
    in the runtime.
    """
    student = ODEViT.from_pretrained(source)
    config = student.config
    images = _images(config, data, split, limit, say, only)
    if images.labels is None and not teacher.used:
        raise UsageError(f"{data} has no labels: name a teacher to measure agreement with")
    expert = open_teacher(teacher, config) if teacher.used else None
    whole = _whole(images, config, teacher.image_size) if teacher.whole else None
    trials = asked.grid(config.integration)
    own = config.integration
    full = trials.index(Trial(own.steps, own.horizon, own.solver)) if asked.own else None
    sums, answers, at_full_depth = [Sums(config.architecture.classes) for _ in trials], list[Tensor](), list[Tensor]()
    teachers = Sums(config.architecture.classes)
    unreadable = Unreadable(len(images), say)
    for batch in _progress(loader(PictureDataset(images, config.preprocessing), batch_size), say):
        unreadable.add(batch.unreadable)
        if expert:
            answers.append(expert(whole(batch) if whole else batch.pixel_values))
            teachers.add(judge(answers[-1], batch.labels, answers[-1]), batch.labels)
        given = list[Tensor]()
        for n, horizon, solver, pictures in trials:
            pixels = SPOILT[pictures](batch, config) if pictures in SPOILT else batch.pixel_values
            given.append(student(pixels, steps=n, horizon=horizon, solver=solver, splitting=asked.splitting))
        if full is not None:
            at_full_depth.append(given[full].argmax(-1))
        for logits, found in zip(given, sums):
            same = None if full is None else logits.argmax(-1) == at_full_depth[-1]
            found.add(judge(logits, batch.labels, answers[-1] if expert else logits), batch.labels, same)
    folder = bundle.find(source)
    if asked.own and exits.calibrated(config) and (folder / bundle.STEP).is_file():
        mean_steps, early = _early(folder, images, torch.cat(answers) if expert else None, torch.cat(at_full_depth))
        trials.append(Trial(mean_steps, config.integration.horizon, config.integration.solver))
        sums.append(early)
    rows = [_row(trial, found, images, teachers if expert else None) for trial, found in zip(trials, sums)]
    return rows if asked.robustness else [{k: v for k, v in row.items() if k != "pictures"} for row in rows]


def _row(trial: Trial, found: Sums, images: Images, teachers: Sums | None) -> dict[str, Any]:
    labelled = images.labels is not None
    row: dict[str, Any] = {"depth": "fixed" if isinstance(trial.steps, int) else "early exit", **trial._asdict()}
    row |= {"images": len(images), **found.row(labelled, teachers is not None)}
    if labelled and teachers is not None:
        row["teacher_accuracy"] = teachers.row(labelled, False)["accuracy"]
    return row


def open_teacher(spec: Teaching, config: Config) -> Teacher:
    """The teacher, its head cut down to the model's classes where it has more."""
    expert = load_teacher(spec, config.architecture).eval()
    head: Any = expert.vit.head
    if config.labels and getattr(head, "out_features", 0) != config.architecture.classes:
        choose_classes(expert, config.class_ids or config.labels)
    return expert


def _images(config: Config, data: str, split: str | None, limit: int, say: Say, only: str = "") -> Images:
    images = known_images(config, pick(data, split, config.division), say)
    if only:
        rows = [row for row, name in enumerate(images.names) if fnmatch(PurePosixPath(name).name, only)]
        if not rows:
            raise UsageError(f"none of the {len(images):,} images has a file name like {only!r}")
        images = images.subset(rows)
    return images.sample(limit or sys.maxsize, 0)


def _whole(images: Images, config: Config, side: int) -> Callable[[Batch], Tensor]:
    """What a teacher sees that is shown the pictures themselves, not what the student sees of them."""
    seen = dataclasses.replace(config.preprocessing, input_size=(3, side, side), crop_pct=1.0)
    pictures = PictureDataset(images, seen)
    return lambda batch: torch.stack([pictures[int(row)][0] for row in batch.rows])


def known_images(config: Config, images: Images, say: Say = print) -> Images:
    """The images of the model's classes, labelled in its order; those of other classes are left out, and it says so.

    Data whose class names mean nothing to the model is taken in its own order, if it has as many classes.
    """
    if images.labels is None:
        return images
    index, classes = config.class_index(), config.architecture.classes
    known = np.array([index.get(name, -1) for name in images.classes])
    if (known < 0).all():
        if len(images.classes) != classes:
            raise UsageError(f"the data has {len(images.classes)} classes, the model {classes}, and no name in common")
        return images
    labels = known[images.labels]
    if (labels < 0).any():
        others = int((known < 0).sum())
        say(f"{int((labels < 0).sum()):,} images of {others:,} classes that the model does not know are left out")
    names = config.labels or tuple(map(str, range(classes)))
    return dataclasses.replace(images, labels=labels, classes=names).subset(np.flatnonzero(labels >= 0))


@torch.no_grad()
def by_step(
    source: str | None, data: str, split: str | None = None, limit: int = 0, batch_size: int = 64, say: Say = print
) -> list[float]:
    """Accuracy after step 1, 2, ... of the bundle's own size, and beyond the horizon to twice the steps."""
    student = ODEViT.from_pretrained(source)
    own = student.config.integration
    images = _images(student.config, data, split, limit, say)
    if images.labels is None:
        raise UsageError(f"{data} has no labels to draw the curve by")
    right = torch.zeros(2 * own.steps, dtype=torch.double)
    for batch in _progress(loader(PictureDataset(images, student.config.preprocessing), batch_size), say):
        for point in student.trajectory(student.stem(batch.pixel_values), len(right), 2 * own.horizon):
            right[point.step - 1] += (student.answer(point.state).argmax(-1) == batch.labels).sum()
    return (right / len(images)).tolist()


def _early(folder: Path, images: Images, expected: Tensor | None, at_full_depth: Tensor) -> tuple[float, Sums]:
    """Mean steps and judgement of the images that the runtime can read, stopping by the bundle's own rule.

    `expected` are the teacher's answers, `at_full_depth` the model's own.
    """
    kept, steps, logits = list[int](), list[int](), list[Tensor]()

    def picture(place: int) -> Any:
        try:
            return images.read(place)
        except Exception:  # decoders fail in every way there is
            return b""  # which the runtime cannot read either

    for place, answer in enumerate(load(folder).stream(map(picture, range(len(images))))):
        if isinstance(answer, Prediction):
            kept.append(place)
            steps.append(answer.steps)
            logits.append(torch.from_numpy(answer.probabilities).log())
    found = torch.stack(logits)
    labels = torch.full((len(kept),), -1) if images.labels is None else torch.as_tensor(images.labels)[kept]
    judged = judge(found, labels, found if expected is None else expected[kept])
    sums = Sums(found.shape[1])
    sums.add(judged, labels, found.argmax(-1) == at_full_depth[kept])
    return float(np.mean(steps)), sums


def _progress(data: Any, say: Say) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(data, "validating", console=Console(stderr=True), transient=True)


HEADINGS = {
    "accuracy": "top-1",
    "accuracy@3": "top-3",
    "accuracy@5": "top-5",
    "macro_accuracy": "macro",
    "agreement": "agrees",
    "as_full_depth": "as full",
}
SAME = ("images", "teacher_accuracy")  # in every row: said once, below the table
NOT_SHOWN = (*SAME, "accuracy@3", "loss")  # which JSON and CSV have


def table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for name in [name for name in rows[0] if name not in NOT_SHOWN]:
        words = name in ("depth", "solver", "pictures")
        shown.add_column(HEADINGS.get(name, name), justify="left" if words else "right")
    for row in rows:
        shown.add_row(
            *[
                f"{v:.2%}" if k in HEADINGS else f"{v:.4g}" if isinstance(v, float) else str(v)
                for k, v in row.items()
                if k not in NOT_SHOWN
            ]
        )
    console = Console()
    console.print(shown)
    teacher = f"; teacher accuracy {rows[0]['teacher_accuracy']:.2%}" if "teacher_accuracy" in rows[0] else ""
    console.print(f"{rows[0]['images']:,} images{teacher}")
