"""`odevit-serve calibrate`: earn the guarantee that an early answer is the full-depth answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import UsageError
from . import app, say

if TYPE_CHECKING:
    from PIL import Image

    from ..calibrate import Report


@app.command()
def calibrate(
    source: str = typer.Argument(
        None, metavar="[BUNDLE]", help="Bundle folder; the result is written into it. Default: the bundled model."
    ),
    data: str = typer.Option(
        ..., help="Pictures like those to come: a folder, zip file or .npz; labels if it has them."
    ),
    epsilon: float = typer.Option(0.01, help="Fraction of images on which the early answer may differ."),
    delta: float = typer.Option(0.05, help="Chance that the guarantee does not hold."),
    rule: str = typer.Option("contraction", help="Exit rule to calibrate."),
    target: str = typer.Option(
        "agreement", help="agreement with full depth, or accuracy (the drop of it; needs labels)."
    ),
    split: str = typer.Option(
        None,
        metavar="SPLIT",
        help="train, val, test, or validation: what training set aside; default: test, else val, else all.",
    ),
    limit: int = typer.Option(None, min=1, help="Use at most this many images, drawn at random."),
    seed: int = typer.Option(0, help="Seed of the random split into measuring and testing images."),
    plot: Path = typer.Option(
        None, metavar="PNG", help="Where to draw the plot. Default: calibration.png in the bundle."
    ),
    threads: int = typer.Option(None, min=1, help="Threads of onnxruntime."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON to stdout."),
) -> None:
    """Choose the threshold of an exit rule so that early answers provably differ on at most epsilon of images."""
    from .. import bundle
    from .. import calibrate as calibration

    folder = bundle.find(source)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a single graph: calibrate the bundle it came from, then export it again")
    images = calibration.open_images(data, split, limit, seed, bundle.read_config(folder).provenance)
    with _progress(len(images)) as advance:
        report = calibration.calibrate(folder, images, epsilon, delta, rule, target, seed, threads, advance)
    picture = plot or folder / "calibration.png"
    draw(report).save(picture)
    if as_json:
        typer.echo(json.dumps(calibration.summary(report), indent=2))
        return
    _print(report, folder, picture)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calibrating", total=total)
        yield lambda: progress.advance(task)


def _print(report: Report, folder: Path, picture: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    proof, policy = report.policy.calibration, report.policy
    assert proof is not None
    what = "differs" if proof.target == "agreement" else "newly wrong"
    table = Table(
        "", "threshold", what, f"bound at {1 - proof.delta:.0%}", "accuracy", "mean steps", "time saved", box=None
    )
    for row in report.rows:
        mark = "->" if row is report.chosen or row.threshold == policy.threshold else ""
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.2%}"
        table.add_row(
            mark, f"{row.threshold:.4g}", f"{row.observed:.2%}", f"{row.bound:.2%}", accuracy,
            f"{row.mean_steps:.2f}/{proof.steps}", f"{row.time_saved:.0%}",
        )  # fmt: skip
    Console().print(table)
    if report.full_accuracy is not None:
        say(f"accuracy at full depth: {report.full_accuracy:.2%}")
    claim = (
        "differ from the full-depth answer" if proof.target == "agreement" else "are wrong where full depth is right"
    )
    say(
        f"{policy.rule} at {policy.threshold:.4g}: early answers {claim} on at most {proof.epsilon:.2%} of images, "
        f"with confidence {1 - proof.delta:.0%}, proven on {proof.images:,} images"
    )
    if report.skipped:
        say(f"{report.skipped} images could not be read and were left out")
    say(f"written to {folder / 'config.json'}; plot in {picture}")
    say(f"next: odevit-serve predict --model {folder} PATH...")


def draw(report: Report) -> Image.Image:
    """Error and its bound, and accuracy, over the mean depth that each threshold gives."""
    from .. import pictures

    proof = report.policy.calibration
    assert proof is not None
    rows = sorted(report.rows, key=lambda row: row.mean_steps)
    depth = [row.mean_steps for row in rows]
    at = (report.chosen.mean_steps, f"chosen: {report.policy.threshold:.4g}")
    error = [
        pictures.Line("observed", pictures.BLUE, depth, [100 * row.observed for row in rows]),
        pictures.Line(f"bound at {1 - proof.delta:.0%}", pictures.ORANGE, depth, [100 * row.bound for row in rows]),
    ]
    level = (100 * proof.epsilon, f"epsilon = {proof.epsilon:.2%}")
    name = "differs from full depth, %" if proof.target == "agreement" else "newly wrong, %"
    panels = [pictures.Panel(name, error, level=level, at=at, zero=True)]
    if report.full_accuracy is not None:
        accuracy = pictures.Line("early exit", pictures.GREEN, depth, [100 * (row.accuracy or 0.0) for row in rows])
        full = (100 * report.full_accuracy, "full depth")
        panels.append(pictures.Panel("accuracy, %", [accuracy], level=full, at=(at[0], "")))
    saved = pictures.Line("time saved", pictures.BLUE, depth, [100 * row.time_saved for row in rows])
    panels.append(pictures.Panel("time saved, %", [saved], at=(at[0], ""), zero=True))
    return pictures.plot(panels, f"{report.policy.rule}: what each threshold gives", f"mean steps of {proof.steps}")
