"""`odevit-serve analyze`: the paper's figures for one's own model, as one HTML report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import typer

from ..errors import UsageError
from . import DATA, SPLIT, TEACHER_WEIGHTS, app, require, say


@app.command()
def analyze(
    model: str = typer.Argument(None, metavar="[BUNDLE]", help="Default: the bundled model."),
    data: str = DATA,
    split: str = SPLIT,
    teacher: str = typer.Option(None, "--teacher", help="timm:NAME or hf:NAME, for the figures of the distance to it."),
    teacher_weights: Path = TEACHER_WEIGHTS,
    quick: bool = typer.Option(False, "--quick", help="200 images and coarser grids: a first look."),
    limit: int = typer.Option(None, "--limit", min=8, help="Use this many images; default: 2000, with --quick 200."),
    batch_size: int = typer.Option(32, "--batch-size", min=1),
    output: Path = typer.Option(Path("analysis"), "--output", "-o", help="Folder of the report."),
    as_json: bool = typer.Option(False, "--json", help="Print the numbers as JSON to stdout."),
) -> None:
    """Measure depth, stability, error bounds, exit rules and attention, and write a report with the figures.

    Run the same command again after an interruption: what is done is not done again.
    """
    require("train")
    from ..train.analysis.collect import analyze, open_study
    from ..train.analysis.report import pictures, write

    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file: --output takes a folder")
    study = open_study(
        model,
        data,
        output,
        split=split,
        teacher=teacher or "",
        teacher_weights=str(teacher_weights or ""),
        limit=limit,
        quick=quick,
        batch_size=batch_size,
        say=say,
    )
    try:
        numbers, shown = analyze(study)
    except KeyboardInterrupt:
        say("interrupted; run the same command again to continue from the last finished section")
        raise typer.Exit(130) from None
    if not study.place.is_main_process:
        return
    report = write(output, numbers, pictures(shown, study.model.config.preprocessing))
    if as_json:
        typer.echo(json.dumps(numbers, indent=1))
    best, own = numbers["sections"]["depth"]["recommended_steps"], study.model.config.integration.steps
    say(f"report: {report}; figures and numbers.json beside it")
    if best < own:
        say(f"next: odevit-serve export{f' {shlex.quote(model)}' if model else ''} --steps {best}")
