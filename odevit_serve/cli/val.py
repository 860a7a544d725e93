"""`odevit-serve val`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from .. import bundle
from . import DATA, SPLIT, TEACHER_WEIGHTS, app, numbers, require, say


@app.command()
def val(
    model: str = typer.Argument(None, metavar="[BUNDLE]", help="Default: the bundled model."),
    data: str = DATA,
    split: str = SPLIT,
    steps: str = typer.Option(None, "--steps", help="Comma-separated; default: half, own, 1.5 times and twice."),
    horizons: str = typer.Option(None, "--horizon", help="Comma-separated; default: the bundle's own."),
    solver: str = typer.Option(None, "--solver"),
    splitting: str = typer.Option(None, "--splitting"),
    teacher: str = typer.Option(None, "--teacher", help="timm:NAME or hf:NAME, to measure agreement."),
    teacher_weights: Path = TEACHER_WEIGHTS,
    teacher_size: int = typer.Option(0, "--teacher-size", help="Show the teacher whole pictures of this many pixels."),
    teacher_patch: int = typer.Option(0, "--teacher-patch", help="Pixels a side of its patches; default: the model's."),
    robustness: bool = typer.Option(False, "--robustness", help="Also with every solver, and with noise and blur."),
    card: bool = typer.Option(
        False, "--card", help="What a card shows: 1 to 24 steps, every solver, half a horizon more."
    ),
    only: str = typer.Option("", "--only", metavar="GLOB", help="Images whose file name matches, such as 'tiny-*'."),
    curve: Path = typer.Option(None, "--curve", metavar="PNG", help="Draw accuracy by step, also beyond the horizon."),
    limit: int = typer.Option(0, "--limit", help="Use this many images only, chosen by seed."),
    batch_size: int = typer.Option(64, "--batch-size"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON to stdout."),
    as_csv: bool = typer.Option(False, "--csv", help="Print CSV to stdout."),
) -> None:
    """Measure accuracy at 1, 3 and 5, and agreement with the teacher, by steps and by horizon."""
    require("train")
    from ..train.curves import draw_depth
    from ..train.recipe import Teaching
    from ..train.val import ValidationPlan, by_step, table, validate

    walked = by_step(model, data, split, limit, batch_size, say) if curve else []
    asked = ValidationPlan([int(n) for n in numbers(steps)], numbers(horizons), solver, splitting, robustness, card)
    spec = Teaching(
        source=teacher or "",
        weights=str(teacher_weights or ""),
        image_size=teacher_size,
        patch_size=teacher_patch,
        whole=bool(teacher_size),
    )
    rows = validate(model, data, asked, spec, split, limit, batch_size, say, only)
    if curve:
        draw_depth(walked, rows, bundle.read_config(bundle.find(model)).integration, curve)
        say(f"curve: {curve}")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif as_csv:
        typer.echo(",".join(rows[0]))
        for row in rows:
            typer.echo(",".join(str(value) for value in row.values()))
    else:
        table(rows)
