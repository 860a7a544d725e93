"""`odevit-serve embed`: pictures as vectors, for search, clustering or a classifier of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from . import app, say
from .predict import progress, sources


@app.command()
def embed(
    paths: list[str] = typer.Argument(..., metavar="PATH", help="Files, folders, globs; - for standard input."),
    output: Path = typer.Option(Path("embeddings.npz"), "--output", "-o", help="FILE.npz or FILE.parquet."),
    model: str = typer.Option(None, "--model", "-m", help="Bundle folder, name or hf:NAME. Default: the bundled one."),
    rule: str = typer.Option(None, help="Exit rule in place of the bundle's own; needs --threshold."),
    threshold: float = typer.Option(None, help="Threshold of --rule: exit once its score reaches it."),
    steps: int = typer.Option(None, help="Cut the horizon into this many steps."),
    max_steps: int = typer.Option(None, help="Stop after this many steps at the latest."),
    no_adaptive: bool = typer.Option(False, "--no-adaptive", help="Full depth for every picture."),
    device: str = typer.Option("cpu", help="cpu, cuda, tensorrt or auto."),
    threads: int = typer.Option(None, min=1, help="Threads of onnxruntime. Default: one per core."),
) -> None:
    """Write the CLS state of pictures at their exit, one vector a picture."""
    import warnings

    from ..data import images
    from ..errors import UserError
    from ..runtime import embeddings
    from ..runtime.results import Failure

    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    embeddings.check_target(output)
    loaded = embeddings.load(model, device, threads)
    settings: dict[str, Any] = {
        "steps": steps, "max_steps": max_steps, "rule": rule, "threshold": threshold, "adaptive": not no_adaptive,
    }  # fmt: skip
    empty: list[str] = []
    found: list[embeddings.Embedding] = []
    failures: list[str] = []
    with progress(paths) as advance:
        for result in loaded.embed(sources(paths, empty), **settings):
            if isinstance(result, Failure):
                failures.append(result.message)
            else:
                found.append(result)
            advance()
    if empty:
        failures.append(f"no pictures in {', '.join(empty)} ({', '.join(sorted(images.SUFFIXES))})")
    if found:
        try:
            embeddings.write(output, found)
        except OSError as error:
            raise UserError(f"{output} cannot be written ({error.strerror or error})") from None
        depth = sum(one.prediction.steps for one in found) / len(found)
        say(f"{len(found)} vectors of {len(found[0].vector)} numbers are in {output}; mean depth {depth:.2f} steps")
    for message in failures:
        say(message)
    if failures:
        raise typer.Exit(1)
