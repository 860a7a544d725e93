"""`odevit-serve benchmark`: what a model costs here; `benchmark serve`: four ways to serve it, under the same load."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import UsageError
from . import app, require, say


class ModelByDefault(TyperGroup):
    """`benchmark [BUNDLE]` is short for `benchmark model [BUNDLE]`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "-h", "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


benchmark = typer.Typer(
    cls=ModelByDefault,
    help="Measure a model, or ways to serve it, in one run. `benchmark BUNDLE` is short for `benchmark model BUNDLE`.",
)
app.add_typer(benchmark, name="benchmark")


@benchmark.command()
def model(
    source: str = typer.Argument(None, metavar="[BUNDLE|FILE.onnx]", help="Default: the bundled model."),
    data: str = typer.Option(None, "--data", help="Labelled pictures: for accuracy, int8 and real exit depths."),
    quick: bool = typer.Option(False, "--quick", help="Fewer pictures and rounds, nothing compiled."),
    teacher_weights: Path = typer.Option(
        None, "--teacher-weights", help="Safetensors file in timm's names: the teacher itself, not only its size."
    ),
    threads: int = typer.Option(None, "--threads", min=1, help="Of every system; default: one a core."),
    rounds: int = typer.Option(None, "--rounds", min=1, max=99, help="Default: 7, with --quick 3."),
    as_json: Path = typer.Option(None, "--json", metavar="FILE", help="Write everything as JSON; - prints it instead."),
    markdown: Path = typer.Option(None, "--markdown", metavar="FILE", help="Write the table as Markdown."),
) -> None:
    """Time, memory, size and accuracy of this model in all its forms, beside plain ViTs in onnxruntime and torch."""
    import dataclasses

    from .. import benchmark as measure
    from ..benchmark_table import as_markdown, show
    from ..calibrate import open_images

    plan = measure.QUICK if quick else measure.Plan()
    if rounds is not None:
        plan = dataclasses.replace(plan, rounds=rounds)
    images = open_images(data, limit=max(plan.judged, plan.pictures)) if data else None
    with tempfile.TemporaryDirectory() as scratch:
        result = measure.run(source, plan, images, data, threads, Path(scratch), teacher_weights, say)
    words = ["odevit-serve", "benchmark", *([source] if source else []), *(["--data", "DATA"] if data else [])]
    words += ["--teacher-weights", "FILE"] if teacher_weights else []
    words += ["--quick"] if quick else []
    words += [f"--threads {threads}"] if threads else []
    words += [f"--rounds {rounds}"] if rounds else []
    result = {"command": " ".join(words), **result}
    text = json.dumps(result, indent=2) + "\n"
    if markdown is not None:
        markdown.write_text(as_markdown(result), encoding="utf-8")
    if as_json is not None and str(as_json) == "-":
        typer.echo(text, nl=False)
        return
    if as_json is not None:
        as_json.write_text(text, encoding="utf-8")
    show(result)


@benchmark.command()
def serve(
    model: str = typer.Argument(None, metavar="[BUNDLE]", help="Default: the bundled model; `random`: random weights."),
    pictures: str = typer.Option(None, "--pictures", help="Folder to take pictures from; default: made-up ones."),
    count: int = typer.Option(200, "--count", min=1, help="How many different pictures to send."),
    clients: str = typer.Option("1,8,32,128", "--clients", help="Numbers of clients, with commas."),
    seconds: float = typer.Option(4.0, "--seconds", min=0.1, max=120.0, help="Of each measurement."),
    rounds: int = typer.Option(3, "--rounds", min=1, max=50),
    threads: int = typer.Option(None, "--threads", min=1, help="Of onnxruntime in each; default: one a core."),
    systems: str = typer.Option(None, "--systems", help="Of continuous,synchronous,fixed,litserve; default: all."),
    output: Path = typer.Option(None, "--output", "-o", help="Write the JSON here as well."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON to stdout instead of the table."),
) -> None:
    """Compare this engine with batch-synchronous exit, fixed depth, and LitServe, by images/s and latency."""
    require("export")
    from .. import benchmark_serve as measure
    from ..bundle import find
    from ..export.job import Settings, export
    from ..model import BundleModel, load

    names = [name.strip() for name in (systems or ",".join(measure.SYSTEMS)).split(",")]
    for name in names:
        if name not in measure.SYSTEMS:
            raise UsageError(f"unknown system {name!r}: choose of {', '.join(measure.SYSTEMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with it
    with tempfile.TemporaryDirectory() as scratch:
        chosen = measure.real_pictures(pictures, count) if pictures else measure.some_pictures(count, 32)
        folder = measure.random_bundle(Path(scratch) / "random", chosen) if model == "random" else find(model)
        loaded = load(folder)
        if not isinstance(loaded, BundleModel):
            raise UsageError(f"{model} is a single file: give the bundle it came from")
        spread = measure.depths(loaded, chosen)
        say(f"{loaded.config.name}: {len(chosen)} pictures, mean depth {spread['mean']:.1f} of {spread['full']}")
        unrolled = Path(scratch) / "unrolled.onnx"
        export(str(folder), Settings(format="onnx", output=str(unrolled)))
        result = measure.compare(folder, unrolled, chosen, _numbers(clients), seconds, rounds, threads, names, say)
    kind = "random weights, no trained model" if model == "random" else "bundle"
    result = {"model": loaded.config.name, "kind": kind, "depths": spread, **result}
    result["pictures"] = "from a folder" if pictures else "made up"
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print(result, measure.SYSTEMS)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"clients must be numbers with commas, not {text!r}") from None
    if not numbers or min(numbers) < 1 or max(numbers) > 1000:
        raise UsageError(f"clients must lie between 1 and 1000, not {text!r}")
    return numbers


def _print(result: dict[str, Any], systems: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, depths = Console(), result["depths"]
    console.print(
        f"{result['model']} ({result['kind']}; pictures {result['pictures']}, mean depth {depths['mean']:.1f} of "
        f"{depths['full']}), {result['threads']} threads, "
        f"medians of {result['rounds']} rounds of {result['seconds']:g} s"
    )
    table = Table(
        "clients", "system", "images/s", "p50 ms", "p95 ms", "p99 ms", "depth", "errors", box=None, pad_edge=False
    )
    for row in result["rows"]:
        times = [f"{row[key]:.0f}" for key in ("images_per_second", "p50_ms", "p95_ms", "p99_ms")]
        table.add_row(str(row["clients"]), row["system"], *times, f"{row['mean_depth']:.1f}", str(row["errors"]))
    console.print(table)
    for name in dict.fromkeys(row["system"] for row in result["rows"]):
        console.print(f"{name}: {systems[name]}")
    for clients, others in result["ratios"].items():
        parts = [f"{v['images_per_second']:.2f}x {name} (p99 {v['p99']:.2f}x)" for name, v in others.items()]
        console.print(f"{clients} clients, images/s of this engine: {', '.join(parts)}")
