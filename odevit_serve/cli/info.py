"""`odevit-serve info`: what a preset, a bundle or an exported file is, and what it costs."""

from __future__ import annotations

import json
from typing import Any

import typer

from .. import bundle, costs
from ..config import Config
from . import app


def describe(config: Config) -> dict[str, Any]:
    """Parameters and multiply-adds of a model beside those of its teacher."""
    shape, integration = config.architecture, config.integration
    parameters = costs.parameters(shape)
    answer: dict[str, Any] = {
        "name": config.name,
        "parameters": {**parameters, "total": sum(parameters.values())},
        "macs": {
            "per_step": costs.macs_per_step(shape, integration),
            "total": int(integration.macs(shape)),
            "steps": integration.steps,
        },
    }
    if config.exit.calibration:
        mean = config.exit.calibration.mean_steps
        answer["macs"]["adaptive"] = int(integration.macs(shape, mean))
        answer["macs"]["adaptive_mean_steps"] = mean
    if config.teacher:
        answer["teacher"] = {
            "name": config.teacher.name,
            "parameters": costs.teacher_parameters(config.teacher, shape),
            "macs": costs.teacher_macs(config.teacher, shape),
        }
    return answer


def find_config(source: str | None) -> Config:
    """The configuration of a preset name, or of anything `load` takes."""
    from ..train.presets import PRESETS

    if source in PRESETS and source not in bundle.bundled():
        return PRESETS[source]
    path = bundle.find(source)
    if path.is_dir():
        return bundle.read_config(path)
    from ..runtime.sessions import read_metadata

    return read_metadata(path)


@app.command()
def info(
    source: str = typer.Argument(None, metavar="[PRESET|BUNDLE|FILE.onnx]", help="Default: the bundled model."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON to stdout."),
    list_all: bool = typer.Option(False, "--list", help="List presets and bundled models."),
) -> None:
    """Show parameters, multiply-adds, labels and the exit guarantee of a preset, bundle or exported file."""
    if list_all:
        from ..train.presets import PRESETS

        listing = {"bundled": bundle.bundled(), "presets": list(PRESETS)}
        typer.echo(json.dumps(listing) if as_json else "\n".join(f"{k}: {', '.join(v)}" for k, v in listing.items()))
        return
    config = find_config(source)
    facts = describe(config)
    if as_json:
        typer.echo(json.dumps({**facts, "config": json.loads(config.to_json())}, indent=2))
        return
    _print(config, facts)


def _print(config: Config, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    shape, own, teacher = config.architecture, config.integration, facts.get("teacher")
    console.print(
        f"[bold]{config.name}[/]: {shape.image_size} px, {shape.patch_size} px patches, width {shape.width}, "
        f"{shape.heads} heads, {shape.registers} registers, {shape.classes} classes"
    )
    console.print(f"{own}; licence {config.license}")
    table = Table("", "this model", f"teacher {teacher['name']}" if teacher else "teacher", box=None, pad_edge=False)
    parameters, macs = facts["parameters"], facts["macs"]

    def row(name: str, own_value: float, teachers: float | None = None) -> None:
        table.add_row(name, f"{own_value:,.0f}", "" if teachers is None else f"{teachers:,.0f}")

    row("parameters of psi and registers", parameters["psi"])
    row("parameters of stem and head", parameters["rest"])
    row("parameters in all", parameters["total"], teacher and teacher["parameters"])
    row("MACs per step", macs["per_step"])
    row(f"MACs in all, {own.steps} steps", macs["total"], teacher and teacher["macs"])
    if "adaptive" in macs:
        row(f"MACs at the mean depth of {macs['adaptive_mean_steps']:.1f} steps", macs["adaptive"])
    console.print(table)
    calibration = config.exit.calibration
    if calibration:
        console.print(
            f"exit by {config.exit.rule} at {config.exit.threshold:.4g}: differs from full depth on at most "
            f"{calibration.epsilon:.1%} of images with confidence {1 - calibration.delta:.0%} "
            f"(calibrated on {calibration.images:,} images)"
        )
    else:
        console.print("exit: not calibrated, so every image gets the full depth")
    for key in sorted(config.metrics):
        console.print(f"{key}: {config.metrics[key]}")
    if config.labels:
        names = ", ".join(config.labels[:12]) + (", ..." if len(config.labels) > 12 else "")
        console.print(f"labels: {names}")
