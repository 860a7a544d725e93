"""The model card: README.md of a bundle, written from its configuration alone."""

from __future__ import annotations

from pathlib import Path

from . import bundle
from .bundle import Config


def write_card(folder: Path) -> None:
    config = bundle.read_config(folder)
    with bundle.atomic(folder / bundle.CARD) as path:
        path.write_text(card(config, folder.name), encoding="utf-8")


def card(config: Config, name: str) -> str:
    """Markdown with the metadata block that the Hub reads."""
    shape, own = config.architecture, config.integration
    parameters = shape.parameters()
    lines = [
        "---",
        f"license: {config.license}",
        "library_name: odevit-serve",
        "pipeline_tag: image-classification",
        "tags: [ode-vit, neural-ode, early-exit, onnx]",
        "---",
        "",
        f"# {config.name}",
        "",
        f"An ODE-ViT: one block of {parameters['psi']:,} parameters, integrated for {own.steps} steps of {own.solver} "
        f"({own.splitting}) over a horizon of {own.horizon:g}. Pictures of {shape.image_size} px in patches of "
        f"{shape.patch_size} px, {shape.classes} classes.",
        "",
    ]
    note = config.provenance.get("note")
    if note:
        lines += [str(note), ""]
    lines += ["| | this model | teacher |", "| --- | --- | --- |"]
    teacher = config.teacher
    lines += [
        f"| parameters | {sum(parameters.values()):,} | {f'{teacher.parameters(shape):,}' if teacher else ''} |",
        f"| MACs per image, full depth | {own.macs(shape):,.0f} | {f'{teacher.macs(shape):,}' if teacher else ''} |",
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
    if config.metrics:
        lines += ["## Measured", "", "| | |", "| --- | --- |"]
        lines += [f"| {key} | {config.metrics[key]} |" for key in sorted(config.metrics)]
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


def _guarantee(config: Config) -> list[str]:
    calibration = config.exit.calibration
    if calibration is None:
        return ["Not calibrated: every image gets the full depth.", ""]
    wrong = "is wrong where the full one is right"
    failure = wrong if calibration.target == "accuracy" else "differs from the full one"
    return [
        "## Guarantee",
        "",
        f"Stopping by `{config.exit.rule}` at {config.exit.threshold:.4g}, the early answer {failure} "
        f"on at most {calibration.epsilon:.2%} of images, with confidence {1 - calibration.delta:.0%}, for images "
        f"drawn like the {calibration.images:,} it was calibrated on. Seen on those: {calibration.observed:.2%}, at "
        f"a mean depth of {calibration.mean_steps:.2f} of {calibration.steps} steps.",
        "",
    ]
