"""`odevit-serve export`: a bundle as a file that other applications can embed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from . import EXTRAS, app, require, say

if TYPE_CHECKING:
    from ..export.job import ExportReport


@app.command()
def export(
    source: str = typer.Argument(None, metavar="[BUNDLE]", help="Bundle to export. Default: the bundled model."),
    format: str = typer.Option("onnx", "--format", "-f", help="What to make; --list shows all."),
    steps: int = typer.Option(None, help="Number of steps; the horizon stays, so each is shorter or longer."),
    horizon: float = typer.Option(None, help="Length of the trajectory, in teacher layers."),
    solver: str = typer.Option(None, help="euler, ab2, midpoint, heun, rk4 or anderson. Default: the bundle's."),
    splitting: str = typer.Option(None, help="parallel, lie or strang. Default: the bundle's."),
    tolerance: float = typer.Option(
        None, min=0.0, help="For onnx-adaptive: several steps at once where the estimated error of CLS allows that."
    ),
    precision: str = typer.Option("fp32", help="fp32, fp16 or int8."),
    calibration: str = typer.Option(None, help="Images to calibrate int8 on and to compare answers on."),
    max_drop: float = typer.Option(0.5, help="Points of accuracy that a precision or a number of steps may cost."),
    with_attention: bool = typer.Option(False, "--with-attention", help="Add the output cls_attention."),
    batch: str = typer.Option("1,8,64", help="Smallest, usual and largest batch of an engine or server."),
    gpu: str = typer.Option("ada", help="GPU generation that TensorRT-RTX builds for."),
    graph: str = typer.Option(
        "unrolled", "--source", help="Graph for openvino or tensorrt: unrolled, parts or adaptive."
    ),
    check: str = typer.Option("runtime", help="Compare values with the runtime, or with torch beside it."),
    output: str = typer.Option(None, "--output", "-o", help="File (or folder) to write."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace what is there."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON to stdout."),
    list_all: bool = typer.Option(False, "--list", help="Show formats, their options and what they need."),
) -> None:
    """Export a bundle, and compare the file with the model in the bundle before it is kept."""
    from ..export import formats

    if list_all:
        _list(as_json)
        return
    for extra in formats.find(format).extras:
        if extra in EXTRAS and extra != "tensorrt-rtx":  # `tensorrt` would do as well
            require(extra)
    if check == "torch":
        require("export")
    from ..export.job import Settings
    from ..export.job import export as run

    settings = Settings(
        format=format,
        steps=steps,
        horizon=horizon,
        solver=solver,
        splitting=splitting,
        tolerance=tolerance,
        precision=precision,
        calibration=calibration,
        max_drop=max_drop,
        with_attention=with_attention,
        batch=batch,
        gpu=gpu,
        source=graph,
        output=output,
        overwrite=overwrite,
        check=check,
    )
    report = run(source, settings, say)
    _summary(report)
    if as_json:
        typer.echo(report.to_json())


def _summary(report: ExportReport) -> None:
    own = report.integration
    say("")
    for path, size in report.files.items():
        say(f"wrote {path} ({size / 1e6:.2f} MB)")
    say(f"{report.model}: {own}, {report.precision}, {report.macs / 1e6:,.1f} million MACs an image at full depth")
    for check in dict.fromkeys(map(str, report.checks)):
        say(f"  checked: {check}")
    opened = "" if report.load_seconds is None else f"; opens in {1000 * report.load_seconds:.0f} ms"
    say(f"done in {report.seconds['total']:.1f} s{opened}")
    say(f"next: {report.next}")


def _list(as_json: bool) -> None:
    from ..export import formats

    if as_json:
        typer.echo(json.dumps(formats.rows(), indent=2))
        return
    for row in formats.rows():
        typer.echo(f"{row['format']}: {row['for']}")
        for key in ("depth", "writes", "options", "needs"):
            typer.echo(f"    {key:<8}{row[key]}")
