"""`odevit-serve calibrate`: bound how often an early answer differs from the full-depth answer, and prove it."""

from __future__ import annotations

import dataclasses
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

    from ..config import Confidence
    from ..guarantee.calibrate import CalibrationReport


@app.command()
def calibrate(
    source: str = typer.Argument(
        None,
        metavar="[BUNDLE|FILE.onnx]",
        help="Bundle folder or exported file; the result is written into it, or into --output.",
    ),
    data: str = typer.Option(
        None, help="Pictures like those to come: a folder, zip file or .npz; labels if it has them."
    ),
    from_audit: Path = typer.Option(
        None, metavar="FILE", help="In place of --data: what serve --audit-file has recorded. --limit: the newest."
    ),
    epsilon: float = typer.Option(0.01, help="Fraction of images on which the early answer may differ."),
    delta: float = typer.Option(0.05, help="Largest probability that the guarantee does not hold."),
    rule: str = typer.Option("auto", help="Exit rule to calibrate; auto: the one that needs the fewest steps."),
    steps: int = typer.Option(None, min=1, help="Prove it for this many steps, in a bundle of its own (--output)."),
    solver: str = typer.Option(None, help="Prove it for this solver, in a bundle of its own (--output)."),
    tolerance: float = typer.Option(
        None, min=0.0, help="Prove it for step sizes chosen by this tolerance, in a bundle of its own (--output)."
    ),
    output: Path = typer.Option(None, "--output", "-o", metavar="DIR", help="Write the calibrated bundle here."),
    target: str = typer.Option(
        "agreement", help="agreement with full depth, or accuracy (the drop of it; needs labels)."
    ),
    unsure: float = typer.Option(
        None, metavar="ALPHA", help="Mark answers as unsure, so that at most ALPHA of the others are wrong."
    ),
    split: str = typer.Option(
        None,
        metavar="SPLIT",
        help="test, val, train, or calibration: what training set aside for this. Default: that, else test, val, all; "
        "never what trained this model or chose its weights.",
    ),
    limit: int = typer.Option(None, min=1, help="Use at most this many images, drawn at random."),
    seed: int = typer.Option(0, help="Seed of the random split into measuring and testing images."),
    plot: Path = typer.Option(
        None, metavar="PNG", help="Where to draw the plot. Default: calibration.png in the bundle."
    ),
    threads: int = typer.Option(None, min=1, help="Threads of onnxruntime."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON to stdout."),
) -> None:
    """Choose a threshold at which, with confidence 1 - delta, early answers differ on at most epsilon of images."""
    from .. import bundle
    from ..config import Confidence
    from ..guarantee import calibrate as calibration
    from ..guarantee.provenance import choose_images
    from ..runtime.sessions import read_metadata

    folder = bundle.find(source)
    if output is None and bundle.MODELS in folder.resolve().parents:
        raise UsageError(f"{folder.name} is part of the installed package: give a folder for the result with --output")
    if (data is None) == (from_audit is None):
        raise UsageError("give either --data or --from-audit")
    fixed = (steps, solver, tolerance, rule, target) != (None, None, None, "auto", "agreement")
    if not folder.is_dir() and (from_audit is not None or fixed):
        raise UsageError(f"{folder.name} is a single file: its rule and steps are fixed, and --data proves agreement")
    if from_audit is not None:
        from ..guarantee.from_audit import calibrate_from_audit

        if fixed or unsure is not None:
            raise UsageError("--from-audit keeps the rule and the steps of the server, and proves agreement only")
        report = calibrate_from_audit(folder, from_audit, epsilon, delta, seed, threads, output, limit)
        _finish(report, output or folder, plot, as_json)
        return
    config = bundle.read_config(folder) if folder.is_dir() else read_metadata(folder)
    chosen = choose_images(config, data, split, limit, seed)
    if chosen.warning:
        say(f"warning: {chosen.warning}")
    images = chosen.images
    if not folder.is_dir():
        from ..guarantee.of_file import calibrate_file

        found = calibrate_file(
            folder, images, epsilon, delta, seed, threads, output=output, chosen_as=chosen.words, unsure=unsure
        )
        if isinstance(found, Confidence):
            _show_confidence(found, output or folder, as_json)
        else:
            _finish(found, output or folder, plot, as_json)
        return
    with _progress(len(images)) as advance:
        report = calibration.calibrate(
            folder,
            images,
            epsilon,
            delta,
            rule,
            target,
            seed,
            threads,
            advance,
            output,
            steps,
            solver,
            chosen_as=chosen.words,
            unsure=unsure,
            tolerance=tolerance,
        )
    _finish(report, output or folder, plot, as_json)


def _finish(report: CalibrationReport, written: Path, plot: Path | None, as_json: bool) -> None:
    from ..guarantee.calibrate import summary

    picture = plot or (written / "calibration.png" if written.is_dir() else written.with_suffix(".calibration.png"))
    draw(report).save(picture)
    if as_json:
        typer.echo(json.dumps(summary(report), indent=2))
        return
    _print(report, written, picture)


def _show_confidence(known: Confidence, written: Path, as_json: bool) -> None:
    """Of a file of fixed depth: no exit, no threshold, only what its probabilities mean."""
    if as_json:
        typer.echo(json.dumps({"calibration": None, "confidence": dataclasses.asdict(known)}, indent=2))
        return
    from ..model_card import confidence_sentence

    say("a file of fixed depth: no image ends early, and there is no threshold to prove")
    say(confidence_sentence(known))
    say(f"written to {written}")
    say(f"next: odevit-serve predict --model {written} PATH...")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calibrating", total=total)
        yield lambda: progress.advance(task)


def _print(report: CalibrationReport, folder: Path, picture: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..model_card import confidence_sentence

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
            f"{row.mean_steps:.2f}/{proof.setting.steps}", f"{row.time_saved:.0%}",
        )  # fmt: skip
    Console().print(table)
    rivals = Table("tried (estimate on the measuring images)", "mean steps", what, "accuracy", box=None)
    for rival in report.rivals:
        accuracy = "" if rival.accuracy is None else f"{rival.accuracy:.2%}"
        rivals.add_row(rival.name, f"{rival.mean_steps:.2f}", f"{rival.observed:.2%}", accuracy)
    if report.rivals:
        Console().print(rivals)
    if report.full_accuracy is not None:
        say(f"accuracy at full depth: {report.full_accuracy:.2%}")
    claim = (
        "differ from the full-depth answer" if proof.target == "agreement" else "are wrong where full depth is right"
    )
    say(
        f"{policy.rule} at {policy.threshold:.4g}: early answers {claim} on at most {proof.epsilon:.2%} of images like "
        f"the {proof.images:,} tested, with confidence {1 - proof.delta:.0%}"
    )
    limit = "no limit" if policy.lyapunov is None else f"a limit of {policy.lyapunov:.3g}"
    shares = ", ".join(f"{name} {share:.1%}" for name, share in proof.exits.items())
    say(f"Lyapunov times have {limit}; images end by: {shares}")
    if proof.contracting is not None:
        say(f"of those that end early, {proof.contracting:.1%} do so in the contraction region: exponent below 0")
    if report.confidence is not None:
        say(confidence_sentence(report.confidence))
    if report.skipped:
        say(f"{report.skipped} images could not be read and were left out")
    say(f"written to {folder / 'config.json' if folder.is_dir() else folder}; plot in {picture}")
    say(f"next: odevit-serve predict --model {folder} PATH...")


def draw(report: CalibrationReport) -> Image.Image:
    """Error and its bound, and accuracy, over the mean depth that each threshold gives; a fixed depth beside them."""
    from ..runtime import drawing as pictures

    proof = report.policy.calibration
    assert proof is not None
    rows = sorted(report.rows, key=lambda row: row.mean_steps)
    depth = [row.mean_steps for row in rows]
    at = (report.chosen.mean_steps, f"chosen: {report.policy.threshold:.4g}")
    error = [
        pictures.Curve("observed", pictures.BLUE, depth, [100 * row.observed for row in rows]),
        pictures.Curve(f"bound at {1 - proof.delta:.0%}", pictures.ORANGE, depth, [100 * row.bound for row in rows]),
    ]
    fixed = [rival for rival in report.rivals if rival.fixed]
    same = [rival.mean_steps for rival in fixed]
    if fixed:
        error.append(pictures.Curve("the same depth for all", pictures.GREY, same, [100 * r.observed for r in fixed]))
    level = (100 * proof.epsilon, f"epsilon = {proof.epsilon:.2%}")
    name = "differs from full depth, %" if proof.target == "agreement" else "newly wrong, %"
    panels = [pictures.Panel(name, error, level=level, at=at, log=True)]
    if report.full_accuracy is not None:
        accuracy = [pictures.Curve("early exit", pictures.GREEN, depth, [100 * (row.accuracy or 0.0) for row in rows])]
        if fixed:
            values = [100 * (rival.accuracy or 0.0) for rival in fixed]
            accuracy.append(pictures.Curve("the same depth for all", pictures.GREY, same, values))
        full = (100 * report.full_accuracy, "full depth")
        panels.append(pictures.Panel("accuracy, %", accuracy, level=full, at=(at[0], "")))
    saved = pictures.Curve("time saved", pictures.BLUE, depth, [100 * row.time_saved for row in rows])
    panels.append(pictures.Panel("time saved, %", [saved], at=(at[0], ""), zero=True))
    return pictures.plot(
        panels, f"{report.policy.rule}: what each threshold gives", f"mean steps of {proof.setting.steps}"
    )
