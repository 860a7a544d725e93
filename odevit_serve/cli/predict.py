"""`odevit-serve predict`: an answer for every picture, with the depth it took."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ..errors import UsageError, UserError
from . import TRUST, app, require, say

if TYPE_CHECKING:
    from ..runtime.model import Model
    from ..runtime.options import RequestOptions
    from ..runtime.results import Prediction, Result


@app.command()
def predict(
    paths: list[str] = typer.Argument(..., metavar="PATH", help="Files, folders, globs; - for standard input."),
    model: str = typer.Option(
        None, "--model", "-m", help="Bundle folder, .onnx file, name or hf:NAME[@REVISION]. Default: the bundled one."
    ),
    top: int = typer.Option(3, "--top", min=1, help="How many classes to show."),
    rule: str = typer.Option(None, help="Exit rule in place of the bundle's own; needs --threshold."),
    threshold: float = typer.Option(None, help="Threshold of --rule: exit once its score reaches it."),
    steps: int = typer.Option(None, help="Cut the horizon into this many steps."),
    solver: str = typer.Option(None, help="euler, ab2, midpoint, heun, rk4 or anderson. Default: the bundle's."),
    splitting: str = typer.Option(None, help="parallel, lie or strang. Default: the bundle's."),
    tolerance: float = typer.Option(
        None, min=0.0, help="Take several steps at once where the estimated error of CLS is at most this."
    ),
    max_steps: int = typer.Option(None, help="Stop after this many steps at the latest."),
    no_adaptive: bool = typer.Option(False, "--no-adaptive", help="Full depth for every picture."),
    attention: Path = typer.Option(None, metavar="DIR", help="Write CLS attention maps as PNGs, per head and mean."),
    animate: bool = typer.Option(False, "--animate", help="With --attention: also a WebP of the maps over time."),
    trace: Path = typer.Option(None, metavar="DIR", help="Write the numbers of every step, as PNG and JSON."),
    as_json: bool = typer.Option(False, "--json", help="One JSON list on stdout."),
    as_jsonl: bool = typer.Option(False, "--jsonl", help="One JSON object a line on stdout."),
    as_csv: bool = typer.Option(False, "--csv", help="CSV on stdout."),
    output: Path = typer.Option(
        None, "--output", "-o", help="Write answers here, .jsonl or .parquet; an interrupted run is continued."
    ),
    ray: bool = typer.Option(False, "--ray", help="With --output: by a pool of actors on Ray Data (extra `ray`)."),
    actors: int = typer.Option(None, "--actors", min=1, help="With --ray: number of actors; default: one per CPU."),
    device: str = typer.Option("cpu", help="cpu, cuda, tensorrt or auto."),
    threads: int = typer.Option(None, min=1, help="Threads of onnxruntime. Default: one per core."),
    trust: bool = TRUST,
) -> None:
    """Classify pictures, each with just the depth it needs."""
    if as_json + as_jsonl + as_csv > 1:
        raise UsageError("give one of --json, --jsonl and --csv")
    if output is None and (ray or actors):
        raise UsageError("--ray and --actors need --output FILE, where the answers go")
    if output is not None and (as_json + as_jsonl + as_csv or attention is not None or trace is not None):
        raise UsageError("--output writes only answers: leave out --json, --jsonl, --csv, --attention and --trace")
    if animate and attention is None:
        raise UsageError("--animate needs --attention DIR, the folder it writes to")
    import warnings

    from ..data import images
    from ..runtime.model import load
    from ..runtime.options import RequestOptions
    from ..runtime.results import Failure

    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    options = RequestOptions(
        steps=steps, max_steps=max_steps, rule=rule, threshold=threshold, adaptive=not no_adaptive, solver=solver,
        splitting=splitting, tolerance=tolerance, trace=trace is not None, attention=attention is not None,
    )  # fmt: skip
    if output is not None:
        _to_file(paths, output, model, options, top, (device, threads, trust), ray, actors)
        return
    loaded = load(model, device, threads, trust)
    _quote(loaded, steps=steps, solver=solver, splitting=splitting, tolerance=tolerance)
    empty: list[str] = []
    results = loaded.stream(sources(paths, empty), options)
    kind = "json" if as_json else "jsonl" if as_jsonl else "csv" if as_csv else "table"
    writer = _WRITERS[kind](sys.stdout, top)
    keeper = _Keeper(loaded.integrated(solver, splitting, tolerance), attention, trace, animate, steps)
    failures: list[str] = []
    with progress(paths) as advance:
        for result in results:
            if isinstance(result, Failure):
                failures.append(result.message)
            else:
                keeper.keep(result)
            writer.write(result)
            advance()
    writer.close()
    if empty:
        failures.append(f"no pictures in {', '.join(empty)} ({', '.join(sorted(images.SUFFIXES))})")
    if failures:
        for message in failures:
            say(message)
        if len(failures) > 1:
            say(f"{len(failures)} inputs could not be answered")
        raise typer.Exit(1)
    keeper.report()


def _quote(model: Model, **asked: Any) -> None:
    """Say what is known of an integration that is not the bundle's own."""
    from dataclasses import replace

    from ..model_card import accuracy_at

    given = {name: value for name, value in asked.items() if value is not None}
    own = model.config.integration
    if given and (other := replace(own, **given)) != own and (text := accuracy_at(model.config, other)[0]):
        say(f"note: {text}")


def _to_file(
    paths: list[str],
    output: Path,
    model: str | None,
    options: RequestOptions,
    top: int,
    how: tuple[str, int | None, bool],
    on_ray: bool,
    actors: int | None,
) -> None:
    from ..bundle import find
    from ..offline.run import Work, run

    if "-" in paths:
        raise UsageError("--output takes files and folders, not standard input")
    if output.suffix == ".parquet":
        require("parquet")
    if on_ray:
        require("ray")
    work = Work(str(find(model).resolve()), options, top, *how)
    with progress(paths) as advance:
        made, before, failed = run(paths, output, work, on_ray, actors, advance)
    say(f"{made} answers added to {output}" + (f", {before} were there before" if before else ""))
    if failed:
        say(f"{failed} inputs could not be answered: see the column `error`")
        raise typer.Exit(1)


def sources(paths: list[str], empty: list[str]) -> Iterator[Any]:
    """What the arguments stand for; folders that hold no picture are added to `empty`."""
    from ..data import images

    for argument in paths:
        found = False
        for path in images.walk([argument]):
            found = True
            yield _stdin if path == "-" else path
        if not found:
            empty.append(argument)


class _StandardInput:
    """Standard input as a source of one picture, kept because it cannot be read twice."""

    name = "stdin"
    data: bytes | None = None

    def read(self, size: int) -> bytes:
        if self.data is None:
            self.data = sys.stdin.buffer.read(size)
        return self.data


_stdin = _StandardInput()


def progress(paths: list[str]) -> Any:
    """A bar on stderr where someone watches and there is more than a glance to wait for."""
    import os

    def nothing() -> None:
        pass

    if not sys.stderr.isatty() or (len(paths) < 20 and not any(os.path.isdir(p) or "*" in p for p in paths)):
        return nullcontext(nothing)
    return _Bar(paths)


class _Bar:
    def __init__(self, paths: list[str]):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from ..data import images

        total = sum(1 for _ in images.walk(paths))
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn())
        # With both streams on one terminal, rows are printed above the bar; a redirected stdout stays untouched.
        self._bar = Progress(
            *columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty(), transient=True
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class _Keeper:
    """Writes the maps and traces of each answer under a name of its own."""

    def __init__(
        self,
        model: Model,
        attention: Path | None,
        trace: Path | None,
        animate: bool = False,
        steps: int | None = None,
    ):
        self.model, self.attention, self.trace, self.animate, self.steps = model, attention, trace, animate, steps
        if animate and not hasattr(model, "attention_steps"):
            raise UsageError(f"{model.path} is a single file and shows no steps: --animate needs a bundle")
        self._names: dict[str, int] = {}
        for folder in (attention, trace):
            if folder is not None:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise UserError(f"{folder} cannot be made a folder ({error.strerror})") from None

    def keep(self, result: Prediction) -> None:
        if self.attention is None and self.trace is None:
            return
        from ..runtime import drawing as pictures

        stem = Path(result.source).stem or "picture"
        self._names[stem] = seen = self._names.get(stem, 0) + 1
        name = stem if seen == 1 else f"{stem}-{seen}"
        if self.attention is not None and result.attention is not None:
            seen_part = self._seen(result)
            for kind, picture in pictures.overlays(seen_part, result.attention).items():
                picture.save(self.attention / f"{name}-{kind}.png")
            if self.animate:
                from ..runtime import animation

                maps = self.model.attention_steps(self._source(result), steps=self.steps)  # type: ignore[attr-defined]
                animation.save(self.attention / f"{name}.webp", seen_part, maps, result)
        if self.trace is not None:
            pictures.trace_plot(result).save(self.trace / f"{name}-trace.png")
            (self.trace / f"{name}-trace.json").write_text(json.dumps(result.to_dict(), indent=2) + "\n")

    def _seen(self, result: Prediction) -> Any:
        """The part of the picture that the model saw, read again: pictures are not held while they are computed."""
        from ..data import images

        return images.shown(self._source(result), self.model.config.preprocessing)

    def _source(self, result: Prediction) -> Any:
        return _stdin if result.source == _stdin.name else result.source

    def report(self) -> None:
        for folder, what in ((self.attention, "attention maps"), (self.trace, "traces")):
            if folder is not None:
                say(f"{what} are in {folder}")


class _Writer(ABC):
    def __init__(self, out: TextIO, top: int):
        self.out, self.top, self.count = out, top, 0

    def write(self, result: Result) -> None:
        self.count += 1
        self.row(result)
        self.out.flush()

    @abstractmethod
    def row(self, result: Result) -> None: ...

    def close(self) -> None:
        self.out.flush()


def _plain(result: Result, top: int) -> dict[str, Any]:
    from ..runtime.results import Failure

    if isinstance(result, Failure):
        return {"source": result.source, "error": result.message}
    return result.to_dict(top)


class _Jsonl(_Writer):
    def row(self, result: Result) -> None:
        self.out.write(json.dumps(_plain(result, self.top), ensure_ascii=False) + "\n")


class _Json(_Writer):
    def row(self, result: Result) -> None:
        self.out.write(("[\n" if self.count == 1 else ",\n") + json.dumps(_plain(result, self.top), ensure_ascii=False))

    def close(self) -> None:
        self.out.write("\n]\n" if self.count else "[]\n")


class _Csv(_Writer):
    def row(self, result: Result) -> None:
        import csv

        from ..runtime.results import Failure

        writer = csv.writer(self.out)
        if self.count == 1:
            ranks = [f"{what}_{i + 1}" for i in range(self.top) for what in ("label", "probability")]
            writer.writerow(
                [
                    "source",
                    *ranks,
                    "steps",
                    "full_steps",
                    "exit",
                    "margin",
                    "exponent",
                    "milliseconds",
                    "unsure",
                    "error",
                ]
            )
        if isinstance(result, Failure):
            writer.writerow([result.source, *[""] * (2 * self.top + 7), result.message])
            return
        best: list[Any] = [value for pair in result.top(self.top) for value in pair]
        best += [""] * (2 * self.top - len(best))
        time = round(1000 * (result.read_seconds + result.compute_seconds), 3)
        numbers = [
            result.steps,
            result.full_steps,
            result.exit.short,
            result.margin,
            result.exponent,
            time,
            result.unsure,
        ]
        writer.writerow([result.source, *best, *numbers, ""])


class _Table(_Writer):
    """Rows as they come: a folder of any size shows its first answer at once."""

    BAR = 10

    def row(self, result: Result) -> None:
        from ..runtime.results import Failure

        if isinstance(result, Failure):
            return
        name = result.source if len(result.source) <= 36 else "..." + result.source[-33:]
        depth = f"{result.steps}/{result.full_steps} {result.exit.short}" + ", unsure" * bool(result.unsure)
        for rank, (label, value) in enumerate(result.top(self.top)):
            bar = ("█" * round(value * self.BAR)).ljust(self.BAR, "·")
            first = f"{name:<36}  " if rank == 0 else " " * 38
            line = f"{first}{label[:24]:<24} {bar} {value:6.1%}"
            self.out.write(f"{line}  {depth}\n" if rank == 0 else f"{line}\n")


_WRITERS: dict[str, Callable[[TextIO, int], _Writer]] = {"json": _Json, "jsonl": _Jsonl, "csv": _Csv, "table": _Table}
