"""`odevit-serve benchmark`: what a model costs here; `benchmark serve`: ways to serve it, under the same load;
`benchmark own`: what training on somebody's own photographs gives.
"""

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
from ..files import atomic
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

OUTPUT, AS_JSON = "Write everything to this file as JSON, too.", "Print JSON to stdout instead of the table."
AS_MARKDOWN = "Write the table as Markdown."


@benchmark.command()
def model(
    source: str = typer.Argument(None, metavar="[BUNDLE|FILE.onnx]", help="Default: the bundled model."),
    data: str = typer.Option(None, "--data", help="Labelled pictures: for accuracy, int8 and real exit depths."),
    quick: bool = typer.Option(False, "--quick", help="Fewer pictures and rounds, nothing compiled."),
    teacher_weights: Path = typer.Option(
        None, "--teacher-weights", help="Safetensors file in timm's names: the teacher itself, not only its size."
    ),
    threads: int = typer.Option(None, "--threads", min=1, help="Threads of every system. Default: one per core."),
    rounds: int = typer.Option(None, "--rounds", min=1, max=99, help="Default: 7, with --quick 3."),
    output: Path = typer.Option(None, "--output", "-o", metavar="FILE", help=OUTPUT),
    as_json: bool = typer.Option(False, "--json", help=AS_JSON),
    markdown: Path = typer.Option(None, "--markdown", metavar="FILE", help=AS_MARKDOWN),
) -> None:
    """Time, memory, size and accuracy of this model in all its forms, beside plain ViTs in onnxruntime and torch."""
    import dataclasses

    from ..benchmark import compare as measure
    from ..benchmark.table import as_markdown, show
    from ..guarantee.calibrate import open_images

    plan = measure.QUICK if quick else measure.BenchmarkPlan()
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
    if markdown is not None:
        markdown.write_text(as_markdown(result), encoding="utf-8")
    if not _written(result, output, as_json):
        show(result)


@benchmark.command()
def serve(
    model: str = typer.Argument(None, metavar="[BUNDLE]", help="Default: the bundled model; `random`: random weights."),
    pictures: str = typer.Option(None, "--pictures", help="Folder to take pictures from; default: made-up ones."),
    count: int = typer.Option(200, "--count", min=1, help="How many different pictures to send."),
    quick: bool = typer.Option(False, "--quick", help="1 and 32 clients, 2 rounds of 2 s: about 3 minutes."),
    clients: str = typer.Option(None, "--clients", help="Numbers of clients, with commas. Default: 1,8,32,128."),
    seconds: float = typer.Option(
        None, "--seconds", min=0.1, max=120.0, help="Length of each measurement. Default: 4."
    ),
    rounds: int = typer.Option(None, "--rounds", min=1, max=50, help="Default: 3."),
    threads: int = typer.Option(None, "--threads", min=1, help="Threads of onnxruntime. Default: one per core."),
    systems: str = typer.Option(
        None,
        "--systems",
        help="Some of continuous,audited,synchronous,fixed,litserve,in-process,cnn,many,tensors,grpc. Default: all but "
        "audited.",
    ),
    output: Path = typer.Option(None, "--output", "-o", metavar="FILE", help=OUTPUT),
    as_json: bool = typer.Option(False, "--json", help=AS_JSON),
    markdown: Path = typer.Option(None, "--markdown", metavar="FILE", help=AS_MARKDOWN),
) -> None:
    """Compare this engine with batch-synchronous exit, fixed depth, LitServe and no server: images/s, latency, CPU.

    `many`, `tensors` and `grpc` are other ways to ask this engine, from 32 clients on for the first two.
    """
    require("export")
    from ..benchmark import pictures as sent
    from ..benchmark import serve as measure
    from ..benchmark.serve_table import as_markdown, show
    from ..bundle import find
    from ..export.job import Settings, export
    from ..runtime.model import load_bundle

    default = [name for name in measure.SYSTEMS if name != "audited"]
    names = [name.strip() for name in systems.split(",")] if systems else default
    for name in names:
        if name not in measure.SYSTEMS:
            raise UsageError(f"unknown system {name!r}: choose of {', '.join(measure.SYSTEMS)}")
    if "grpc" in names:
        require("grpc")
    given_options = [
        (f"--count {count}", count != 200), ("--quick", quick), (f"--clients {clients}", clients),
        (f"--seconds {seconds}", seconds), (f"--rounds {rounds}", rounds), (f"--threads {threads}", threads),
        (f"--systems {systems}", systems),
    ]  # fmt: skip
    own = ("1,32", 2.0, 2) if quick else ("1,8,32,128", 4.0, 3)
    clients, seconds, rounds = clients or own[0], seconds or own[1], rounds or own[2]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with it
    with tempfile.TemporaryDirectory() as scratch:
        chosen = sent.real_pictures(pictures, count) if pictures else sent.some_pictures(count, 32)
        if model == "random":
            from ..benchmark.torch_rows import random_bundle

            folder = random_bundle(Path(scratch) / "random", chosen)
        else:
            folder = find(model)
        loaded = load_bundle(folder)
        spread = measure.depths(loaded, chosen)
        say(f"{loaded.config.name}: {len(chosen)} pictures, mean depth {spread['mean']:.1f} of {spread['full']}")
        if "audited" in names and loaded.config.exit.calibration is None:
            raise UsageError(f"{loaded.config.name} has no guarantee that could be audited: calibrate it first")
        unrolled = Path(scratch) / "unrolled.onnx"
        export(str(folder), Settings(format="onnx", output=str(unrolled)))
        result = measure.compare(folder, unrolled, chosen, _numbers(clients), seconds, rounds, threads, names, say)
    kind = "random weights, no trained model" if model == "random" else "bundle"
    result = {"model": loaded.config.name, "kind": kind, "depths": spread, **result}
    result["pictures"] = "from a folder" if pictures else "made up"
    words = ["odevit-serve benchmark serve", *([model] if model else []), *(["--pictures FOLDER"] if pictures else [])]
    words += [text for text, given in given_options if given]
    result = {"command": " ".join(words), **result}
    if markdown is not None:
        markdown.write_text(as_markdown(result), encoding="utf-8")
    if not _written(result, output, as_json):
        show(result)


@benchmark.command()
def own(
    data: str = typer.Argument(..., metavar="FOLDER", help="A folder for each kind of photograph."),
    kinds: int = typer.Option(8, "--kinds", min=2, help="How many kinds are drawn."),
    photographs: int = typer.Option(55, "--photographs", min=3, help="Photographs of each kind for training."),
    held_out: int = typer.Option(50, "--held-out", min=5, help="At most so many of each kind to measure on."),
    minutes: float = typer.Option(5.0, "--minutes", min=0.1, help="As in `train`."),
    seed: int = typer.Option(0, "--seed", min=0, help="Seed of the draw and of training."),
    start: str = typer.Option("", "--start", metavar="BUNDLE", help="As in `train`."),
    leave_out: list[str] = typer.Option([], "--leave-out", metavar="KIND", help="Kind that is not drawn; repeatable."),
    teacher_weights: Path = typer.Option(None, "--teacher-weights", help="Also a probe on this ViT-Ti/16."),
    output: Path = typer.Option(None, "--output", "-o", metavar="FILE", help=OUTPUT),
    as_json: bool = typer.Option(False, "--json", help=AS_JSON),
) -> None:
    """Run `train` on some photographs of a folder, and measure it on others, beside simpler methods."""
    require("train")
    require("export")
    from ..train import own_benchmark as measure

    task = measure.Task(kinds, photographs, held_out, minutes, seed, start, tuple(leave_out))
    with tempfile.TemporaryDirectory() as scratch:
        result = measure.run(data, task, teacher_weights, Path(scratch), say)
    if _written(result, output, as_json):
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    proof = f"early exit proven at {result['epsilon']:.1%}" if result["epsilon"] else "early exit not calibrated"
    console.print(
        f"{kinds} kinds, {result['photographs']:,} photographs, {result['held_out']:,} others to measure on; "
        f"{result['seconds'] / 60:.1f} minutes from the command to the bundle, {result['threads']} threads; {proof}"
    )
    table = Table("", "accuracy", "95% interval", "mean steps", "million multiply-adds", box=None, pad_edge=False)
    for row in result["rows"]:
        low, high = row["interval"]
        steps = "" if row["steps"] is None else f"{row['steps']:.2f}"
        between = f"{low:.1%} to {high:.1%}"
        table.add_row(row["name"], f"{row['accuracy']:.1%}", between, steps, f"{row['macs'] / 1e6:,.0f}")
    console.print(table)


def _written(result: dict[str, Any], output: Path | None, as_json: bool) -> bool:
    """Write the result where it is wanted; whether it went to stdout."""
    text = json.dumps(result, indent=2)
    if output is not None:
        with atomic(output) as path:
            path.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    return as_json


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"clients must be numbers with commas, not {text!r}") from None
    if not numbers or min(numbers) < 1 or max(numbers) > 1000:
        raise UsageError(f"clients must lie between 1 and 1000, not {text!r}")
    return numbers
