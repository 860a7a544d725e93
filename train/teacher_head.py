"""The head of a teacher: its own, a probe on frozen features, or one that is trained with all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Preprocessing, TeacherFacts
from ..data.datasets import Images
from ..errors import UsageError, UserError
from ..files import atomic
from ..schema import build
from .batches import PictureDataset, Unreadable, loader
from .features import Head, encoder, features, fit_head
from .judge import Judge
from .loop import Plan, fit
from .model import ODEViT
from .objective import FineTuning
from .progress import Say, counted
from .recipe import Recipe
from .teacher import Teacher, choose_classes, new_head, with_accuracy
from .teacher_sources import load_teacher

ENOUGH = 4_000  # images to learn from, and as many to judge by, that a baseline is measured on at most


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
        read_facts(teacher, folder)
    else:
        teacher = load_teacher(spec, wanted.architecture)
        teacher.preprocessing = teacher.preprocessing or wanted.preprocessing
        if spec.head == "finetune" and spec.image_size:  # it learns from pictures of its own size, not scaled up
            own_size = (teacher.preprocessing.input_size[0], spec.image_size, spec.image_size)
            teacher.preprocessing = dataclasses.replace(teacher.preprocessing, input_size=own_size)
    outputs = getattr(teacher.vit.head, "out_features", 0)
    if spec.head != "own" and not trained:
        _head_for(teacher, learning.classes, keep=spec.head == "finetune")
        if spec.head == "probe":
            probe_teacher(teacher, recipe, learning, validation, folder, machine, say)
        else:
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


def _head_for(teacher: Teacher, classes: tuple[str, ...], keep: bool) -> None:
    """A head for these classes: with `keep` that of the teacher cut down to them, where it knows them all."""
    if keep:
        with contextlib.suppress(UserError, UsageError):
            choose_classes(teacher, classes)
            return
    new_head(teacher, len(classes))


def read_facts(teacher: Teacher, folder: Path) -> None:
    """What was written down of a trained teacher. Every process reads it: only the main one has measured it."""
    facts = json.loads((folder / "teacher.json").read_text())
    teacher.facts = build(TeacherFacts, facts["teacher"], "teacher")
    teacher.preprocessing = build(Preprocessing, facts["preprocessing"], "preprocessing")


def probe(
    encode: Callable[[Tensor], Tensor],
    spec: Preprocessing,
    learning: Images,
    validation: Images,
    machine: Accelerator,
    say: Say,
    words: str,
) -> tuple[Head, float]:
    """A head by logistic regression on features that are computed once, and its accuracy on the validation images."""
    assert learning.labels is not None
    assert validation.labels is not None
    with counted(say, words, len(learning) + len(validation)) as advance:

        def seen(images: Images) -> Tensor:
            unreadable = Unreadable(len(images), say)

            def encoded(pixels: Tensor) -> Tensor:
                advance(len(pixels))
                return encode(pixels.to(machine.device))

            def batches() -> Iterator[Tensor]:
                for batch in loader(PictureDataset(images, spec), 64):
                    unreadable.add(batch.unreadable)
                    yield batch.pixel_values

            return features(encoded, batches())

        known, judged = seen(learning), seen(validation)
    head = fit_head(known, learning.labels, judged, validation.labels, len(learning.classes))
    return head, float((head.answers(judged) == validation.labels).mean())


def probe_teacher(
    teacher: Teacher, recipe: Recipe, learning: Images, validation: Images, folder: Path, machine: Accelerator, say: Say
) -> None:
    """Fit the teacher's head on its frozen features; leaves teacher.safetensors and teacher.json in `folder`.

    A teacher that knows less than the bundled model does has nothing to teach: that ends the run.
    """
    spec = teacher.preprocessing
    assert spec is not None
    if machine.is_main_process:
        teacher.requires_grad_(False).eval().to(machine.device)
        head, accuracy = probe(
            lambda pixels: teacher.states(pixels)[-1][:, 0], spec, learning, validation, machine, say,
            "features of the teacher",
        )  # fmt: skip
        if recipe.teacher.baseline:
            _check_teacher(teacher.facts.name, accuracy, recipe, learning, validation, machine, say)
        head.copy_to(teacher.vit.head)  # type: ignore[arg-type]
        teacher.facts = with_accuracy(teacher.facts, round(accuracy, 5), "probe, by logistic regression")
        write_facts(teacher, folder)
        teacher.save(folder / "teacher.safetensors")
    machine.wait_for_everyone()
    saved = dataclasses.replace(recipe.teacher, weights=str(folder / "teacher.safetensors"), drop_path=0.0)
    shape = recipe.model(len(learning.classes), learning.classes).architecture
    teacher.vit.load_state_dict(load_teacher(saved, shape).vit.state_dict())
    read_facts(teacher, folder)


def _check_teacher(
    name: str, accuracy: float, recipe: Recipe, learning: Images, validation: Images, machine: Accelerator, say: Say
) -> None:
    student = ODEViT.from_pretrained(None).to(machine.device)
    few, judged = (images.sample(ENOUGH, recipe.data.seed) for images in (learning, validation))
    spec = student.config.preprocessing
    _, own = probe(encoder(student), spec, few, judged, machine, say, "features of the bundled model")
    if accuracy < own:
        raise UserError(
            f"the teacher {name} has an accuracy of {accuracy:.1%} on the images that choose the model, "
            f"a head on the bundled model's features {own:.1%}: train without a teacher, or go on with "
            "--set teacher.baseline=false"
        )


def write_facts(teacher: Teacher, folder: Path) -> None:
    assert teacher.preprocessing is not None
    facts = {"teacher": dataclasses.asdict(teacher.facts), "preprocessing": dataclasses.asdict(teacher.preprocessing)}
    with atomic(folder / "teacher.json") as scratch:
        scratch.write_text(json.dumps(facts, indent=2) + "\n")


def train_teacher(
    teacher: Teacher, recipe: Recipe, learning: Images, validation: Images, folder: Path, machine: Accelerator, say: Say
) -> None:
    """Fine-tune; leaves teacher.safetensors and teacher.json in `folder`."""
    spec = recipe.teacher
    spec_of_pictures = teacher.preprocessing
    assert spec_of_pictures is not None
    teacher.requires_grad_(True)
    for block in teacher.modules():
        if hasattr(block, "fused_attn"):
            block.fused_attn = machine.device.type != "cpu"  # its gradient is slow there
    judge = Judge(validation, spec_of_pictures, spec.batch_size, None, machine)
    pictures = PictureDataset(learning, spec_of_pictures, recipe.data.augment, recipe.training.seed)

    def keep(net: nn.Module, values: dict[str, float]) -> None:
        assert isinstance(net, Teacher)
        net.save(folder / "teacher.safetensors.best")
        net.facts = with_accuracy(net.facts, round(values["accuracy"], 5), f"{spec.head}, {spec.epochs} epochs")
        write_facts(net, folder)

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
    read_facts(teacher, folder)
    machine.wait_for_everyone()  # before the file that every process has just read gets another name
    if machine.is_main_process:
        (folder / "teacher.safetensors.best").replace(folder / "teacher.safetensors")
        (folder / "last.pt").unlink(missing_ok=True)
    machine.wait_for_everyone()
