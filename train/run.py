"""`odevit-serve train`: from a recipe to a run folder with a bundle in it.

run/
  recipe.json      what was asked for; with it, `--resume` goes on
  metrics.jsonl    losses by batch and by epoch; the same in tensorboard/
  curves.png       written at the end
  last.pt          everything a resumed run needs
  bundle/          the best model so far: config.json, model.safetensors, README.md
  teacher/         its own run, when the teacher's head or all of it was trained
  stem/            likewise, when a new stem learned what that of another bundle gives
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from .. import __version__, bundle
from ..card import write_card
from ..data import Images, open_splits, split_off
from ..errors import UsageError, UserError
from .curves import draw_curves
from .data import Pictures, loader
from .loop import Plan, Progress, Say, accelerator, fit
from .losses import NEEDS_LABELS
from .model import ODEViT, normalised
from .objectives import Distillation, FineTuning
from .recipe import Recipe
from .start import imitate, mean_of, start_from, with_norms
from .teacher import (
    Memory,
    Teacher,
    checkpoints,
    choose_classes,
    copy_into,
    layer_distances,
    load_teacher,
    new_head,
    with_accuracy,
)


def train(recipe: Recipe, folder: Path, say: Say) -> Path:
    """Run or resume a recipe in `folder`; gives the folder of the bundle."""
    settings = recipe.training
    machine = accelerator(settings.mixed_precision)
    if not machine.is_main_process:
        say = silent
    learning, validation = read_data(recipe)
    _check_labels(recipe, learning)
    torch.manual_seed(settings.seed)
    folder.mkdir(parents=True, exist_ok=True)
    if machine.is_main_process:
        with bundle.atomic(folder / "recipe.json") as scratch:
            scratch.write_text(json.dumps(recipe.to_dict(), indent=2) + "\n")
    processes = f", by {machine.num_processes} processes" if machine.num_processes > 1 else ""
    say(f"{len(learning):,} images to learn from, {len(validation):,} to choose the model by{processes}")

    teacher = (
        make_teacher(recipe, learning, validation, folder / "teacher", machine, say) if recipe.teacher.used else None
    )
    config = student_config(recipe, learning, teacher)
    student = ODEViT(config)
    if isinstance(student.patch, nn.Sequential) and not settings.start:
        student.patch = normalised(student.patch)
    schedule = None
    if teacher:
        copy_into(teacher, student, settings.warm_start)
    if settings.start:
        other = mean_of([settings.start, *settings.start_with])
        kept = start_from(student, other)
        if isinstance(student.patch, nn.Sequential):
            few = loader(Pictures(sample(learning, 256, settings.seed), config.preprocessing), 64)
            student.patch = (
                with_norms(student.patch, (b.pixel_values for b in few)) if kept else normalised(student.patch)
            )
        if not kept and not (folder / "last.pt").exists():
            _imitate(recipe, student, other, learning, validation, folder / "stem", machine, say)
    if teacher:
        student.freeze_copied()
        student.head.requires_grad_(settings.train_head)
        if settings.train_stem:
            for part in (student.patch, student.cls, student.position):
                part.requires_grad_(True)
        schedule = _schedule(recipe, teacher, learning, config, machine, say)
        if recipe.losses.hints:
            width = config.architecture.width
            read = schedule(_reached(recipe, config)).values()
            student.hints.update({str(layer): nn.Linear(width, width) for layer in read})
    pictures = Pictures(learning, config.preprocessing, recipe.data.augment, settings.seed, recipe.teacher.views)
    memory = None
    if teacher and recipe.teacher.views:
        layers = len(set(schedule(_reached(recipe, config)).values())) if schedule else 1
        width, classes = config.architecture.width, config.architecture.classes
        memory = Memory(folder / "answers", len(learning), recipe.teacher.views, layers, width, classes)
    weights = dataclasses.asdict(recipe.losses)
    objective = Distillation(student, settings, weights, teacher, schedule, memory)
    judge = Judge(validation, config.preprocessing, settings.batch_size, teacher, machine)

    def keep(net: nn.Module, values: dict[str, float]) -> None:
        assert isinstance(net, ODEViT)
        save_bundle(net, folder / "bundle", recipe, values, teacher)

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
    say("the stem is of another shape than that of training.start: first it learns to do the same")
    pictures = Pictures(learning, spec, recipe.data.augment, settings.seed)
    imitate(student.patch, other.patch, machine, pictures, Pictures(validation, spec), plan, folder, say)


def read_data(recipe: Recipe) -> tuple[Images, Images]:
    """Images to learn from, and images to choose the model by. The test split is not touched."""
    if not recipe.data.source:
        raise UsageError("no data: name a folder, a zip file, an .npz file or hf:NAME")
    splits = open_splits(recipe.data.source)
    if "train" not in splits:
        raise UserError(f"{recipe.data.source} has no training images, only {', '.join(splits)}")
    learning = splits["train"]
    if "val" in splits and recipe.data.use_val_split:
        validation = splits["val"]
    else:
        learning, validation = split_off(learning, recipe.data.validation, recipe.data.seed)
    if 0 < recipe.data.limit < len(learning):
        learning = sample(learning, recipe.data.limit, recipe.data.seed)
    return learning, validation


def sample(images: Images, limit: int, seed: int) -> Images:
    """So many of the images, chosen by seed."""
    return images.subset(np.sort(np.random.default_rng((seed, 3)).permutation(len(images))[:limit]))


def _check_labels(recipe: Recipe, images: Images) -> None:
    if images.labels is not None:
        return
    asked = [name for name in sorted(NEEDS_LABELS) if getattr(recipe.losses, name)]
    if asked:
        raise UsageError(f"losses.{asked[0]} needs labels, but the images are in no class folders")
    if recipe.teacher.head != "own":
        raise UsageError(f"teacher.head {recipe.teacher.head!r} needs labels, but the images are in no class folders")


def student_config(recipe: Recipe, images: Images, teacher: Teacher | None) -> bundle.Config:
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


def make_teacher(
    recipe: Recipe, learning: Images, validation: Images, folder: Path, machine: Accelerator, say: Say
) -> Teacher:
    """Load the teacher, give it the head asked for (trained here if need be), and freeze it."""
    spec, settings = recipe.teacher, recipe.training
    wanted = recipe.model(max(1, len(learning.classes)), learning.classes)
    done = folder / "teacher.safetensors"
    trained = spec.head != "own" and done.exists()
    if trained:
        teacher = load_teacher(dataclasses.replace(spec, weights=str(done), drop_path=0.0), wanted.architecture)
        facts = json.loads((folder / "teacher.json").read_text())
        teacher.facts = bundle.build(bundle.Teacher, facts["teacher"], "teacher")
        teacher.preprocessing = bundle.build(bundle.Preprocessing, facts["preprocessing"], "preprocessing")
    else:
        teacher = load_teacher(spec, wanted.architecture)
        teacher.preprocessing = teacher.preprocessing or wanted.preprocessing
    outputs = getattr(teacher.vit.head, "out_features", 0)
    if spec.head != "own" and not trained:
        new_head(teacher, len(learning.classes))
        say(f"teacher {teacher.facts.name}: {spec.head} for {spec.epochs} epochs")
        train_teacher(teacher, recipe, learning, validation, folder, machine, say)
    elif spec.classes or (learning.classes and outputs not in (0, len(learning.classes))):
        choose_classes(teacher, spec.classes or learning.classes)
    teacher = teacher.requires_grad_(False).eval().to(machine.device)
    if teacher.facts.accuracy is None and validation.labels is not None and outputs:
        judge = Judge(validation, teacher.preprocessing or wanted.preprocessing, settings.batch_size, None, machine)
        teacher.facts = with_accuracy(teacher.facts, round(judge(teacher)["accuracy"], 5))
    if teacher.facts.accuracy is not None:
        say(f"teacher {teacher.facts.name}: {teacher.facts.accuracy:.2%} on the images the model is chosen by")
    return teacher


def train_teacher(
    teacher: Teacher, recipe: Recipe, learning: Images, validation: Images, folder: Path, machine: Accelerator, say: Say
) -> None:
    """Probe or fine-tune; leaves teacher.safetensors and teacher.json in `folder`."""
    spec = recipe.teacher
    spec_of_pictures = teacher.preprocessing
    assert spec_of_pictures is not None
    teacher.requires_grad_(spec.head == "finetune")
    teacher.vit.head.requires_grad_(True)
    judge = Judge(validation, spec_of_pictures, spec.batch_size, None, machine)
    pictures = Pictures(learning, spec_of_pictures, recipe.data.augment, recipe.training.seed)

    def keep(net: nn.Module, values: dict[str, float]) -> None:
        assert isinstance(net, Teacher)
        net.save(folder / "teacher.safetensors.best")
        net.facts = with_accuracy(net.facts, round(values["accuracy"], 5), f"{spec.head}, {spec.epochs} epochs")
        facts = {"teacher": dataclasses.asdict(net.facts), "preprocessing": dataclasses.asdict(spec_of_pictures)}
        with bundle.atomic(folder / "teacher.json") as scratch:
            scratch.write_text(json.dumps(facts, indent=2) + "\n")

    plan = Plan(
        spec.epochs,
        spec.batch_size,
        spec.lr,
        spec.weight_decay,
        spec.schedule,
        seed=recipe.training.seed,
        save_seconds=recipe.training.save_seconds,
        workers=recipe.data.workers,
    )
    objective = FineTuning(teacher, recipe.training.label_smoothing)
    fit(machine, objective, pictures, plan, folder, judge, keep, "accuracy", say)
    best = load_teacher(
        dataclasses.replace(spec, weights=str(folder / "teacher.safetensors.best"), drop_path=0.0),
        recipe.model(len(learning.classes), learning.classes).architecture,
    )
    teacher.vit.load_state_dict(best.vit.state_dict())
    if machine.is_main_process:
        (folder / "teacher.safetensors.best").replace(folder / "teacher.safetensors")
        (folder / "last.pt").unlink(missing_ok=True)
    machine.wait_for_everyone()


def _reached(recipe: Recipe, config: bundle.Config) -> int:
    return min(recipe.training.random_depth or (config.integration.steps,))


def _schedule(
    recipe: Recipe, teacher: Teacher, images: Images, config: bundle.Config, machine: Accelerator, say: Say
) -> Callable[[int], dict[int, int]]:
    """Steps -> checkpoints; the distances between the teacher's layers are measured on some of the images."""
    few = sample(images, 512, recipe.training.seed)
    batches = loader(Pictures(few, config.preprocessing), 64)
    distances = layer_distances(teacher, [batch.pixel_values.to(machine.device) for batch in batches])
    spec = recipe.teacher

    def plan(steps: int) -> dict[int, int]:
        return checkpoints(distances, steps, spec.temperature, spec.layers)

    shown = plan(_reached(recipe, config))
    say("teacher layers by step: " + ", ".join(f"{layer} at {step}" for step, layer in shown.items()))
    return plan


class Judge:
    """Measures a network on validation images; the teacher's answers to them are computed once."""

    def __init__(
        self, images: Images, spec: bundle.Preprocessing, batch_size: int, teacher: Teacher | None, machine: Accelerator
    ):
        self.machine, self.teacher = machine, teacher
        self.labelled = images.labels is not None
        self.data: Any = machine.prepare_data_loader(loader(Pictures(images, spec), batch_size, workers=0))
        self.score = "accuracy" if self.labelled else "agreement" if teacher else "certainty"
        self.answers: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, net: nn.Module) -> dict[str, float]:
        was_training = net.training
        net.eval()
        rows = []
        for index, batch in enumerate(self.data):
            logits = net(batch.pixel_values)
            if self.teacher and index == len(self.answers):
                self.answers.append(self.teacher(batch.pixel_values))
            teachers = self.answers[index] if self.teacher else logits
            rows.append(self.machine.gather_for_metrics(_judge(logits, batch.labels, teachers)))
        net.train(was_training)
        means = torch.cat(rows).double().mean(0).tolist()
        named = dict(zip(("accuracy", "accuracy@3", "accuracy@5", "val_loss", "agreement", "certainty"), means))
        if not self.labelled:
            named = {k: v for k, v in named.items() if k in ("agreement", "certainty")}
        if not self.teacher:
            named.pop("agreement", None)
        return named


def _judge(logits: Tensor, labels: Tensor, teachers: Tensor) -> Tensor:
    """One row an image: right within the first 1, 3, 5; cross-entropy; agrees with the teacher; probability."""
    ranked = logits.topk(min(5, logits.shape[1]), -1).indices == labels[:, None]
    right = [ranked[:, :k].any(1).float() for k in (1, 3, 5)]
    loss = F.cross_entropy(logits.float(), labels.clamp_min(0), reduction="none")
    agrees = (logits.argmax(-1) == teachers.argmax(-1)).float()
    return torch.stack([*right, loss, agrees, logits.float().softmax(-1).amax(-1)], 1)


def save_bundle(
    student: ODEViT, folder: Path, recipe: Recipe, values: dict[str, float], teacher: Teacher | None
) -> None:
    config = student.config
    metrics = {f"validation_{k}": round(v, 5) for k, v in values.items() if k.startswith(("accuracy", "agreement"))}
    asked = recipe.to_dict()
    for section, key in (("data", "source"), ("teacher", "weights"), ("training", "start")):  # names, not local paths
        asked[section][key] = Path(asked[section][key]).name if asked[section][key] else ""
    asked["training"]["start_with"] = [Path(source).name for source in recipe.training.start_with]
    provenance = {
        "version": __version__,
        "torch": torch.__version__,
        "recipe": asked,
        "hours": round(values.get("seconds", 0.0) / 3600, 2),
    }
    student.config = config.replace(metrics=metrics, provenance=provenance, teacher=teacher.facts if teacher else None)
    student.save_pretrained(folder)
    write_card(folder)


def silent(text: str) -> None:
    pass
