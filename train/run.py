"""`odevit-serve train`: from a recipe to a run folder with a bundle in it.

run/
  recipe.json      what was asked for; with it, `--resume` goes on
  metrics.jsonl    losses by batch and by epoch; the same in tensorboard/
  curves.png       written at the end
  last.pt          everything a resumed run needs
  bundle/          the best model so far: config.json, model.safetensors, README.md
  teacher/         its own run, when the teacher's head or all of it was trained
  stem/            likewise, when a new stem learned what that of another bundle gives
  answers/         what the teacher said of the images, where the recipe has it remembered
  stage-1/ ...     the same for each stage of a recipe that has some; bundle/ is then that of the last
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from .. import __version__, bundle
from ..config import Config, Preprocessing
from ..data.datasets import Images, open_splits
from ..data.division import divide
from ..errors import UsageError
from ..files import atomic, clear
from ..model_card import write_card
from .batches import PictureDataset, loader
from .checkpoint import Progress
from .curves import draw_curves
from .judge import Judge
from .loop import Plan, accelerator, fit
from .losses import NEEDS_LABELS
from .model import ODEViT, normalised
from .objective import Distillation
from .progress import Say
from .recipe import Recipe
from .teacher import Teacher, TeacherCache, WholePictures, choose_classes, layer_distances, layer_times
from .teacher_copy import copy_into
from .teacher_head import make_teacher
from .teacher_sources import load_teacher
from .warm_start import imitate, start_from, with_norms


def train(recipe: Recipe, folder: Path, say: Say) -> Path:
    """Run or resume a recipe in `folder`, stage by stage; gives the folder of the bundle."""
    machine = accelerator(recipe.training.mixed_precision)
    if not machine.is_main_process:
        say = silent
    folder.mkdir(parents=True, exist_ok=True)
    if machine.is_main_process:
        clear(folder)  # of a run that was killed and is resumed
        with atomic(folder / "recipe.json") as scratch:
            scratch.write_text(json.dumps(recipe.to_dict(), indent=2) + "\n")
    machine.wait_for_everyone()
    if not recipe.stages:
        return train_stage(Run(recipe, recipe, folder, folder, machine, say))
    made, hours = folder / "bundle", 0.0
    for number, stage in enumerate(recipe.staged(), 1):
        where = folder / f"stage-{number}"
        if number > 1:
            stage = stage.starting_from(made)
            hours = bundle.read_config(made).provenance["hours"]
        made = where / "bundle"
        if (made / bundle.CONFIG).is_file() and not (where / "last.pt").exists():
            say(f"stage {number} of {len(recipe.stages)}: finished before")
            continue
        say(f"stage {number} of {len(recipe.stages)}")
        train_stage(Run(recipe, stage, folder, where, machine, say, hours))
        if machine.is_main_process:
            (where / "last.pt").unlink(missing_ok=True)  # a stage with a bundle and no checkpoint is finished
        machine.wait_for_everyone()
    if machine.is_main_process:
        for name in (bundle.WEIGHTS, bundle.CONFIG, bundle.CARD):
            with atomic(folder / "bundle" / name) as scratch:
                shutil.copyfile(made / name, scratch)
    machine.wait_for_everyone()
    return folder / "bundle"


@dataclass(frozen=True)
class Run:
    """One stage of a recipe, and where it takes place: `home` is the folder of the whole run, `folder` the stage's."""

    whole: Recipe
    recipe: Recipe
    home: Path
    folder: Path
    machine: Accelerator
    say: Say
    hours: float = 0.0  # that the stages before it took


def train_stage(run: Run) -> Path:
    recipe, folder, machine, say = run.recipe, run.folder, run.machine, run.say
    settings = recipe.training
    learning, validation, unlabelled = read_data(recipe)
    _check_labels(recipe, learning)
    torch.manual_seed(settings.seed)
    folder.mkdir(parents=True, exist_ok=True)
    processes = f", by {machine.num_processes} processes" if machine.num_processes > 1 else ""
    more = f", {len(unlabelled):,} without labels" if unlabelled else ""
    say(f"{len(learning):,} images to learn from{more}, {len(validation):,} to choose the model by{processes}")
    teacher = None
    if recipe.teacher.used:
        teacher = make_teacher(recipe, learning, validation, run.home / "teacher", machine, say)
    torch.manual_seed(settings.seed)  # again: a teacher that is trained draws numbers, one read from the disk does not
    student = make_student(run, teacher, learning, validation)
    config = student.config
    times = follow(run, student, teacher, learning) if teacher else {}
    shown = learning.with_unlabelled(unlabelled) if unlabelled else learning
    pictures = PictureDataset(shown, config.preprocessing, recipe.data.augment, settings.seed, recipe.teacher.views)
    cache, whole = remember(run, teacher, times, shown, config) if teacher else (None, None)
    weights = dataclasses.asdict(recipe.losses)
    objective = Distillation(student, settings, weights, teacher, times, cache, whole)
    judge = Judge(validation, config.preprocessing, settings.batch_size, teacher, machine)

    def keep(net: nn.Module, values: dict[str, float]) -> None:
        assert isinstance(net, ODEViT)
        save_bundle(net, folder / "bundle", run.whole, values, teacher, run.hours)

    def finished(state: Progress, values: dict[str, float]) -> bool:
        below = bool(settings.bound_patience) and values.get("trajectory", np.inf) < values["bound"]
        state.below_bound = state.below_bound + 1 if below else 0
        if below and state.below_bound >= settings.bound_patience:
            say(f"stopping: the trajectory loss has been below the bound for {state.below_bound} epochs")
            return True
        return False

    if not settings.epochs:
        values = judge(student.to(machine.device))
        if machine.is_main_process:
            keep(student, values)
        say(f"nothing to learn: {judge.score} {values[judge.score]:.4f}")
        return folder / "bundle"
    plan = Plan(
        workers=recipe.data.workers,
        **{f.name: getattr(settings, f.name) for f in dataclasses.fields(Plan) if f.name != "workers"},
    )
    begun = time.monotonic()
    state = fit(machine, objective, pictures, plan, folder, judge, keep, judge.score, say, finished)
    if machine.is_main_process:
        draw_curves(folder / "metrics.jsonl", folder / "curves.png")
    say(f"done after {state.step:,} batches ({time.monotonic() - begun:,.0f} s): {judge.score} {state.best:.4f}")
    return folder / "bundle"


def make_student(run: Run, teacher: Teacher | None, learning: Images, validation: Images) -> ODEViT:
    """The student of the recipe, with what it takes over from its teacher or from another bundle."""
    recipe, settings = run.recipe, run.recipe.training
    config = student_config(recipe, learning, teacher)
    student = ODEViT(config)
    if isinstance(student.patch, nn.Sequential) and not settings.start:
        student.patch = normalised(student.patch)
    if teacher:
        copy_into(teacher, student, settings.warm_start)
    if settings.start:
        other = ODEViT.from_pretrained(settings.start)
        kept = start_from(student, other)
        if isinstance(student.patch, nn.Sequential):
            few = loader(PictureDataset(learning.sample(256, settings.seed), config.preprocessing), 64)
            student.patch = (
                with_norms(student.patch, (b.pixel_values for b in few)) if kept else normalised(student.patch)
            )
        if not kept and not (run.folder / "last.pt").exists():
            _imitate(recipe, student, other, learning, validation, run.folder / "stem", run.machine, run.say)
    if settings.balance:
        even_out(student, learning.labels, settings.balance)
    return student


@torch.no_grad()
def even_out(student: ODEViT, labels: np.ndarray | None, share: float) -> None:
    """Take the logarithm of how often each class was shown out of the head: where it is used, all are as likely."""
    if labels is None:
        raise UsageError("training.balance needs labels: it counts the pictures of each class")
    counts = np.bincount(labels, minlength=student.config.architecture.classes).clip(1)
    student.head.bias.sub_(share * torch.from_numpy(np.log(counts / counts.mean())).to(student.head.bias))


def follow(run: Run, student: ODEViT, teacher: Teacher, learning: Images) -> dict[int, float]:
    """Ready the student to follow: what is frozen, what reads the teacher's states; gives the times of its layers."""
    settings, losses, shape = run.recipe.training, run.recipe.losses, student.config.architecture
    width = teacher.facts.width
    if width != shape.width:
        if not (settings.train_head and settings.train_stem):
            raise UsageError(
                f"the teacher is {width} wide, the student {shape.width}, so its stem and head cannot be copied: "
                "set training.train_stem and training.train_head"
            )
        if losses.patches:
            raise UsageError(f"losses.patches compares states of one width: the teacher has {width}, not {shape.width}")
    student.freeze_copied()
    student.head.requires_grad_(settings.train_head)
    if settings.train_stem:
        for part in (student.patch, student.cls, student.position):
            part.requires_grad_(True)
    times = _times(run.recipe, teacher, learning, student.config, run.machine, run.say)
    if losses.trajectory and width != shape.width:
        student.hints.update({f"cls{layer}": nn.Linear(shape.width, width) for layer in times})
    if losses.hints:
        student.hints.update({str(layer): nn.Linear(shape.width, width) for layer in times})
    return times


def remember(
    run: Run, teacher: Teacher, times: dict[int, float], learning: Images, config: Config
) -> tuple[TeacherCache | None, WholePictures | None]:
    """Where the teacher's answers are kept, and who asks it about whole pictures, as the recipe says."""
    recipe, spec = run.recipe, run.recipe.teacher
    if not spec.remembers:
        return None, None
    seen = config.preprocessing
    key: dict[str, Any] = {"teacher": teacher.digest(), "layers": list(times), "data": learning.digest()}
    whole = None
    if spec.whole:
        seen = _whole(seen, spec.image_size or config.architecture.image_size)
        asked = [(teacher, seen)]
        if spec.unlabelled_size:
            original = dataclasses.replace(spec, image_size=spec.unlabelled_size, drop_path=0.0)
            untuned = load_teacher(original, config.architecture)
            choose_classes(untuned, learning.classes)
            untuned = untuned.requires_grad_(False).eval().to(run.machine.device)
            asked.append((untuned, _whole(untuned.preprocessing or seen, spec.unlabelled_size)))
            key |= {"untuned": untuned.digest(), "size": spec.unlabelled_size}
        whole = WholePictures(learning, asked, list(times))
    else:
        key |= {"augment": recipe.data.augment, "seed": recipe.training.seed, "size": spec.image_size}
    key["pixels"] = dataclasses.asdict(seen)
    width, classes = teacher.facts.width, config.architecture.classes
    folder = run.home / "answers"
    return TeacherCache(folder, key, len(learning), spec.remembers, len(times), width, classes), whole


def _whole(spec: Preprocessing, side: int) -> Preprocessing:
    return dataclasses.replace(spec, input_size=(3, side, side), crop_pct=1.0)


def _imitate(
    recipe: Recipe,
    student: ODEViT,
    other: ODEViT,
    learning: Images,
    validation: Images,
    folder: Path,
    machine: Accelerator,
    say: Say,
) -> None:
    settings, spec = recipe.training, student.config.preprocessing
    plan = Plan(settings.start_epochs, settings.batch_size, settings.lr, 0.0, seed=settings.seed)
    say("the stem has another shape than that of training.start: first it is trained to give the same output")
    pictures = PictureDataset(learning, spec, recipe.data.augment, settings.seed)
    imitate(student.patch, other.patch, machine, pictures, PictureDataset(validation, spec), plan, folder, say)


def read_data(recipe: Recipe) -> tuple[Images, Images, Images | None]:
    """Images to learn from, to choose the model by, and those without labels that the recipe asks for.

    The test split is not touched.
    """
    if not recipe.data.source:
        raise UsageError("no data: name a folder, a zip file, an .npz file or hf:NAME")
    splits = open_splits(recipe.data.source)
    if recipe.data.unlabelled and "unlabelled" not in splits:
        raise UsageError(f"data.unlabelled: {recipe.data.source} has no folder 'unlabelled' beside its splits")
    parts = divide(splits, recipe.data.division, recipe.data.source)
    learning = parts["train"]
    if 0 < recipe.data.limit < len(learning):
        learning = learning.sample(recipe.data.limit, recipe.data.seed)
    return learning, parts["validation"], splits["unlabelled"] if recipe.data.unlabelled else None


def _check_labels(recipe: Recipe, images: Images) -> None:
    if images.labels is not None:
        return
    asked = [name for name in sorted(NEEDS_LABELS) if getattr(recipe.losses, name)]
    if asked:
        raise UsageError(f"losses.{asked[0]} needs labels, but the images are in no class folders")
    if recipe.teacher.head != "own":
        raise UsageError(f"teacher.head {recipe.teacher.head!r} needs labels, but the images are in no class folders")


def student_config(recipe: Recipe, images: Images, teacher: Teacher | None) -> Config:
    if teacher is None:
        return recipe.model(len(images.classes), images.classes)
    outputs = teacher.vit.head.out_features if isinstance(teacher.vit.head, nn.Linear) else 0
    if not outputs:
        raise UsageError(f"{teacher.facts.name} has no head: use --teacher-head probe or finetune with labelled images")
    labels = images.classes or recipe.teacher.classes
    if labels and len(labels) != outputs:
        raise UsageError(
            f"the teacher's head has {outputs} classes, the data {len(labels)}: choose among them with "
            "teacher.classes, or train a head with --teacher-head probe or finetune"
        )
    config = recipe.model(outputs, tuple(labels), teacher.preprocessing)
    return config.replace(teacher=teacher.facts)


def _times(
    recipe: Recipe, teacher: Teacher, images: Images, config: Config, machine: Accelerator, say: Say
) -> dict[int, float]:
    """When each teacher layer should be reached; the distances between them are measured on some of the images."""
    few = images.sample(512, recipe.training.seed)
    batches = loader(PictureDataset(few, config.preprocessing), 64)
    distances = layer_distances(teacher, [batch.pixel_values.to(machine.device) for batch in batches])
    spec, own = recipe.teacher, config.integration
    times = layer_times(distances, own.horizon, spec.temperature, spec.layers)
    shown = ", ".join(f"layer {layer} at {when:.1f}" for layer, when in times.items())
    say(f"teacher layers over a horizon of {own.horizon:g}: {shown}")
    return times


def save_bundle(
    student: ODEViT,
    folder: Path,
    recipe: Recipe,
    values: dict[str, float],
    teacher: Teacher | None,
    hours: float = 0.0,
) -> None:
    """The bundle of a student and what was measured; `hours` were spent on it before this stage."""
    config = student.config
    metrics = {f"validation_{k}": round(v, 5) for k, v in values.items() if k.startswith(("accuracy", "agreement"))}
    asked = recipe.to_dict()
    for section, key in (("data", "source"), ("teacher", "weights"), ("training", "start")):  # names, not local paths
        asked[section][key] = Path(asked[section][key]).name if asked[section][key] else ""
    provenance = {
        "version": __version__,
        "torch": torch.__version__,
        "recipe": asked,
        "hours": round(hours + values.get("seconds", 0.0) / 3600, 2),
    }
    student.config = config.replace(metrics=metrics, provenance=provenance, teacher=teacher.facts if teacher else None)
    student.save_pretrained(folder)
    write_card(folder)


def silent(text: str) -> None:
    pass
