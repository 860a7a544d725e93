"""`odevit-serve train`."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .. import bundle
from ..errors import UsageError, UserError
from ..schema import build
from . import TEACHER_WEIGHTS, app, require, say

if TYPE_CHECKING:
    from ..train.finish import Finished

WORK = "training"  # in the folder of a run on somebody's own pictures: train/own.py


@app.command()
def train(
    data: str = typer.Argument(
        None, metavar="[DATA]", help="Folder with a folder for each class, zip file, CIFAR folder, .npz, or hf:NAME."
    ),
    minutes: float = typer.Option(None, "--minutes", min=0.1, help="Minutes until the bundle is finished. Default: 5."),
    epochs: int = typer.Option(None, "--epochs", min=0, help="Passes over the pictures, in place of minutes."),
    start: str = typer.Option(None, "--start", metavar="BUNDLE", help="Start from it. Default: the bundled model."),
    size: int = typer.Option(
        None, "--size", min=1, help="Side of the pictures in pixels. Default: 96; with --start, that of the bundle."
    ),
    epsilon: float = typer.Option(None, "--epsilon", help="Epsilon of the guarantee of early exit. Default: 0.01."),
    config: str = typer.Option(None, "--config", help="Recipe: a TOML file, or the name of a shipped one."),
    teacher: str = typer.Option(None, "--teacher", help="timm:NAME or hf:NAME: follow this teacher."),
    teacher_weights: Path = TEACHER_WEIGHTS,
    teacher_head: str = typer.Option(None, "--teacher-head", help="own, probe or finetune."),
    preset: str = typer.Option(None, "--preset", help="Shape of the model: see `odevit-serve info --list`."),
    batch_size: int = typer.Option(None, "--batch-size", min=1),
    lr: float = typer.Option(None, "--lr"),
    seed: int = typer.Option(None, "--seed", min=0),
    self_supervised: bool = typer.Option(False, "--self-supervised", help="Follow the teacher's states; no labels."),
    settings: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help="Any setting of the recipe."),
    output: Path = typer.Option(None, "--output", "-o", help="Run folder. Default: runs/mine; of a recipe runs/train."),
    resume: Path = typer.Option(
        None, "--resume", metavar="RUN", help="Continue the run in this folder; other options change what it does."
    ),
    list_recipes: bool = typer.Option(False, "--list", help="List the shipped recipes."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check and print what was asked as JSON; train nothing."),
) -> None:
    """Train on your own pictures: `train PHOTOS` starts from the bundled model and ends with a bundle to serve.

    With a recipe, preset, teacher or --set it trains a new model, from scratch or by following the teacher.
    It can be interrupted at any time and continued with --resume.
    """
    from ..train.recipe import SELF_SUPERVISED, read_recipe

    begun = time.monotonic()
    if list_recipes:
        _list_recipes()
        return
    by_recipe = bool(settings or self_supervised) or any(
        value is not None for value in (config, teacher, teacher_weights, teacher_head, preset)
    )
    if resume is not None:
        by_recipe = not (resume / WORK).is_dir() or by_recipe
    given = {"minutes": minutes, "start": start, "size": size, "epsilon": epsilon}
    if not by_recipe:
        asked = {"data": data, "epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed, **given}
        own(asked, output or Path("runs/mine"), resume, dry_run, begun)
        return
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name} is for training on your own pictures, without a recipe, teacher or preset")
    output = output or Path("runs/train")
    options = {
        "data.source": data,
        "teacher.source": teacher,
        "teacher.weights": teacher_weights,
        "teacher.head": teacher_head,
        "preset": preset,
        "training.epochs": epochs,
        "training.batch_size": batch_size,
        "training.lr": lr,
        "training.seed": seed,
    }
    words = [f"{key}={_toml(value)}" for key, value in options.items() if value is not None]
    if self_supervised:
        words += [f"losses.{key}={value}" for key, value in SELF_SUPERVISED.items()]
    if resume is not None:
        if config is not None:
            raise UsageError("--resume uses the recipe of the run: change parts of it with --set")
        config, output = str(resume / "recipe.json"), resume
        if not Path(config).is_file():
            raise UserError(f"{resume} holds no run to resume: it has no recipe.json")
    elif (output / "last.pt").exists() or (output / "bundle").exists():
        raise UsageError(f"{output} already holds a run: --resume {output}, or choose another --output")
    recipe = read_recipe(config, [*words, *settings])
    if dry_run:
        typer.echo(json.dumps(recipe.to_dict(), indent=2))
        return
    require("train")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # notes to those who program torch, once a process
    from ..train.run import train as run

    first = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    try:
        folder = run(recipe, output, say)
    except KeyboardInterrupt:
        if first:
            say(f"interrupted; continue with: odevit-serve train --resume {output}")
        raise typer.Exit(130) from None
    if first:
        say(f"bundle: {folder}")
        say(f"next: odevit-serve export {folder} --format parts, then odevit-serve predict --model {folder} PICTURE")


def _toml(value: Any) -> str:
    """As --set would have it; TOML knows none of the surrogates that JSON makes of some characters."""
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _list_recipes() -> None:
    from ..train.recipe import RECIPES

    for path in sorted(RECIPES.glob("*.toml")):
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        typer.echo(f"{path.stem:24} {first}")


def own(asked: dict[str, Any], output: Path, resume: Path | None, dry_run: bool, begun: float) -> None:
    """Train on somebody's own pictures and say what came out."""
    options = {key: value for key, value in asked.items() if value is not None}
    if dry_run:
        typer.echo(json.dumps(options, indent=2))
        return
    require("train")
    require("export")
    from ..export import parts
    from ..train import own as flow

    if resume is not None:
        known = flow.read_run(resume)
        if known is None:
            raise UserError(f"{resume} holds no run to resume")
        options, output = {**known["wanted"], **options}, resume
    elif (output / WORK).exists() or (output / bundle.CONFIG).exists():
        raise UsageError(f"{output} already holds a run: --resume {output}, or choose another --output")
    if "data" not in options:
        raise UsageError("no data: name a folder, a zip file, an .npz file or hf:NAME")
    wanted = build(flow.Wanted, options, "")
    try:
        made = flow.train(wanted, output, parts, say, begun, resume is not None)
    except KeyboardInterrupt:
        say(f"interrupted; continue with: odevit-serve train --resume {output}")
        raise typer.Exit(130) from None
    _tell(made, time.monotonic() - begun)
    if made.interrupted:
        raise typer.Exit(130)


def _tell(made: Finished, seconds: float) -> None:
    from ..train.progress import clock

    low, high = made.interval
    those = "the same photographs that chose it" if made.chosen_by else "photographs that it never saw"
    say(f"accuracy: {made.accuracy:.1%} of {made.images:,} {those} (95% interval {low:.1%} to {high:.1%})")
    pair = made.confusion
    if pair is None:
        say("no class was confused with another")
    else:
        say(f"most often confused: {pair.one} and {pair.other}, {pair.mistakes} of {pair.images} photographs of them")
    steps = f"{made.mean_steps:.1f} steps"
    say(f"one picture takes {made.milliseconds:.0f} ms here, from file to answer ({steps} on average)")
    folder = shlex.quote(str(made.folder))
    say(f"{folder} is finished after {clock(seconds)}")
    say(f"next: odevit-serve serve {folder}, odevit-serve demo --model {folder}")
