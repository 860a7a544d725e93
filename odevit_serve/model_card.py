"""The model card: README.md of a bundle, written from its configuration alone."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from . import bundle, costs
from .config import Confidence, Config, Integration, Setting
from .files import atomic


def write_card(folder: Path) -> None:
    config = bundle.read_config(folder)
    with atomic(folder / bundle.CARD) as path:
        path.write_text(card(config, folder.name), encoding="utf-8")


def card(config: Config, name: str) -> str:
    """Markdown with the metadata block that the Hub reads."""
    shape, own = config.architecture, config.integration
    parameters = costs.parameters(shape)
    lines = [
        "---",
        *_license(config.license),
        "library_name: odevit-serve",
        "pipeline_tag: image-classification",
        "tags: [ode-vit, neural-ode, early-exit, onnx]",
        "---",
        "",
        f"# {config.name}",
        "",
        f"An ODE-ViT: one block of {parameters['psi']:,} parameters, integrated for {own.steps} steps of {own.solver} "
        f"({own.splitting}) over a horizon of {own.horizon:g}{_sized(own)}. "
        f"Pictures of {shape.image_size} px in patches of {shape.patch_size} px, {shape.classes} classes.",
        "",
    ]
    note = config.provenance.get("note")
    if note:
        lines += [str(note), ""]
    lines += ["| | this model | teacher |", "| --- | --- | --- |"]
    teacher = config.teacher
    teachers = ["", ""]
    if teacher:
        teachers = [f"{costs.teacher_parameters(teacher, shape):,}", f"{costs.teacher_macs(teacher, shape):,}"]
    lines += [
        f"| parameters | {sum(parameters.values()):,} | {teachers[0]} |",
        f"| MACs per image, full depth | {own.macs(shape):,.0f} | {teachers[1]} |",
    ]
    calibration = config.exit.calibration
    if calibration:
        macs = own.macs(shape, calibration.mean_steps)
        lines.append(f"| MACs per image, mean depth {calibration.mean_steps:.2f} | {macs:,.0f} | |")
    if teacher and teacher.time is not None:
        lines.append(f"| time of one image on one thread, in full depths of this model | 1 | {teacher.time:g} |")
    if teacher and teacher.accuracy is not None:
        own_accuracy = config.metrics.get("validation_accuracy")
        shown = f"{own_accuracy:.2%}" if isinstance(own_accuracy, float) else ""
        lines.append(f"| accuracy on validation images | {shown} | {teacher.accuracy:.2%} |")
    lines.append("")
    if teacher:
        lines += [
            f"Teacher: {teacher.name}"
            + (f" ({teacher.note})" if teacher.note else "")
            + (f", licence {teacher.license}" if teacher.license else "")
            + ".",
            "",
        ]
    lines += _guarantee(config)
    if config.confidence is not None:
        lines += ["## Confidence", "", confidence_sentence(config.confidence), ""]
    if config.metrics:
        lines += ["## Measured", "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {_shown(config.metrics[key])} |" for key in sorted(config.metrics)]
        lines.append("")
        if any(key.startswith("test_") for key in config.metrics):
            lines += [f"The test figures: `odevit-serve val {name} --data DATA`.", ""]
    if config.labels:
        lines += [
            f"Classes: {', '.join(config.labels)}. Any other picture gets one of these, too.",
            "",
        ]
    lines += ["```", f"odevit-serve predict --model {name} picture.jpg", "```", ""]
    return "\n".join(lines)


def accuracy_at(config: Config, asked: Integration) -> tuple[str, float | None]:
    """What was measured of another way to integrate, in words, and the points it loses against the bundle's own."""
    own = config.integration
    by_steps = config.metrics.get("accuracy_by_steps") or {}
    by_solver = config.metrics.get("accuracy_by_solver") or {}
    if not by_steps and not by_solver:
        return "" if asked == own else f"accuracy was never measured at {asked}", None
    best, found = by_steps.get(str(own.steps)), None
    if asked == dataclasses.replace(own, steps=asked.steps):
        found, known = by_steps.get(str(asked.steps)), ", ".join(by_steps)
        if found is None:
            return f"accuracy was never measured at {asked.steps} steps, only at {known}", None
    elif asked == dataclasses.replace(own, solver=asked.solver):
        found = by_solver.get(asked.solver)
    if found is None:
        return f"accuracy was never measured at {asked}", None
    what = f"{asked.steps} steps" + (f" of {asked.solver}" if asked.solver != own.solver else "")
    if best is None:
        return f"measured accuracy {found:.1%} at {what}", None
    return f"measured accuracy {found:.1%} at {what}, {best:.1%} at the bundle's own {own.steps}", 100 * (best - found)


def _shown(value: object) -> str:
    """A measured figure, or one for each of several settings."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _license(name: str) -> list[str]:
    """The Hub takes short identifiers; any other licence is `other` with a name."""
    if re.fullmatch(r"[a-z0-9.+-]+", name):
        return [f"license: {name}"]
    return ["license: other", f"license_name: {json.dumps(name)}"] if name else []


def _guarantee(config: Config) -> list[str]:
    calibration = config.exit.calibration
    if calibration is None:
        return ["Not calibrated: every image gets the full depth.", ""]
    wrong = "is wrong where the full one is right"
    failure = wrong if calibration.target == "accuracy" else "differs from the full one"
    own, policy = calibration.setting, config.exit
    limit = "" if policy.lyapunov is None else f", or once {policy.lyapunov:.3g} Lyapunov times have passed"
    shares = ", ".join(f"{name} {share:.1%}" for name, share in calibration.exits.items())
    inside = calibration.contracting
    region = "" if inside is None else f", {inside:.1%} of the early ones in the contraction region (exponent below 0)"
    return [
        "## Guarantee",
        "",
        f"Stopping by `{policy.rule}` at {policy.threshold:.4g}{limit}, the early answer {failure} on at most "
        f"{calibration.epsilon:.2%} of images like the {calibration.images:,} it was tested on, with confidence "
        f"{1 - calibration.delta:.0%} over the draw of those. It holds for {own.steps} steps of {own.solver} "
        f"({own.splitting}) over a horizon of {own.horizon:g}{_sized(own)} in {own.precision}, without "
        f"a deadline or depth budget. "
        f"Seen on those images: {calibration.observed:.2%}, at a mean depth of {calibration.mean_steps:.2f} of "
        f"{own.steps} steps. They end by: {shares}{region}."
        + (f" Images: {calibration.chosen}." if calibration.chosen else ""),
        "",
    ]


def _sized(own: Integration | Setting) -> str:
    """What to add where images choose the size of their steps."""
    if not own.tolerance:
        return ""
    return f", several of them at once where the estimated error of CLS is at most {own.tolerance:g}"


def confidence_sentence(known: Confidence) -> str:
    """What was measured about probabilities, and what is proven about answers that are not marked as unsure."""
    text = f"Probabilities have temperature {known.temperature:.3g}, fitted on {known.images:,} labelled images"
    if known.error is not None and known.error_before is not None:
        text += f": expected calibration error {known.error:.2%} on others, {known.error_before:.2%} without it"
    mark = known.unsure
    if mark is None:
        return text + "."
    return (
        f"{text}. Answers of a probability below {mark.threshold:.4g} are marked as unsure: {mark.marked:.1%} of the "
        f"images tested. The others are wrong on at most {mark.alpha:.2%} of images like those, with confidence "
        f"{1 - mark.delta:.0%} (seen: {mark.wrong:.2%} of {mark.images:,}). "
        "Pictures of none of the classes are not among those."
    )
