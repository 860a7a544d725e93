"""`odevit-serve train` and `odevit-serve val`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from .. import bundle
from ..errors import UsageError, UserError
from . import DATA, SPLIT, TEACHER_WEIGHTS, app, require, say


@app.command()
def train(
    data: str = typer.Argument(
        None, metavar="[DATA]", help="Image folder, zip file, CIFAR folder or .npz, or hf:NAME."
    ),
    config: str = typer.Option(None, "--config", help="Recipe: a TOML file, or the name of a shipped one."),
    teacher: str = typer.Option(None, "--teacher", help="timm:NAME or hf:NAME. Without a teacher: from scratch."),
    teacher_weights: Path = TEACHER_WEIGHTS,
    teacher_head: str = typer.Option(None, "--teacher-head", help="own, probe or finetune."),
    preset: str = typer.Option(None, "--preset", help="Shape of the model: see `odevit-serve info --list`."),
    epochs: int = typer.Option(None, "--epochs", help="Epochs of the student."),
    batch_size: int = typer.Option(None, "--batch-size"),
    lr: float = typer.Option(None, "--lr"),
    seed: int = typer.Option(None, "--seed"),
    self_supervised: bool = typer.Option(False, "--self-supervised", help="Follow the teacher's states; no labels."),
    settings: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help="Any setting of the recipe."),
    output: Path = typer.Option(Path("runs/train"), "--output", "-o", help="Run folder."),
    resume: Path = typer.Option(
        None, "--resume", metavar="RUN", help="Go on with the run in this folder; other options change its recipe."
    ),
    list_recipes: bool = typer.Option(False, "--list", help="List the shipped recipes."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check and print the recipe as JSON; train nothing."),
) -> None:
    """Train an ODE-ViT, from scratch or by following a teacher; interrupt it any time and go on with --resume."""
    from ..train.recipe import RECIPES, SELF_SUPERVISED, read_recipe

    if list_recipes:
        for path in sorted(RECIPES.glob("*.toml")):
            first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            typer.echo(f"{path.stem:24} {first}")
        return
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
    given = [f"{key}={json.dumps(str(v) if isinstance(v, Path) else v)}" for key, v in options.items() if v is not None]
    if self_supervised:
        given += [f"losses.{key}={value}" for key, value in SELF_SUPERVISED.items()]
    if resume is not None:
        if config is not None:
            raise UsageError("--resume goes on with the recipe of the run: change parts of it with --set")
        config, output = str(resume / "recipe.json"), resume
        if not Path(config).is_file():
            raise UserError(f"{resume} holds no run to resume: it has no recipe.json")
    elif (output / "last.pt").exists() or (output / "bundle").exists():
        raise UsageError(f"{output} already holds a run: --resume {output}, or choose another --output")
    recipe = read_recipe(config, [*given, *settings])
    if dry_run:
        typer.echo(json.dumps(recipe.to_dict(), indent=2))
        return
    require("train")
    from ..train.run import train as run

    try:
        folder = run(recipe, output, say)
    except KeyboardInterrupt:
        say(f"interrupted; go on with: odevit-serve train --resume {output}")
        raise typer.Exit(130) from None
    say(f"bundle: {folder}")
    say(f"next: odevit-serve export {folder} --format parts, then odevit-serve predict --model {folder} PICTURE")


def numbers(text: str | None) -> list[float]:
    """Comma-separated numbers of an option."""
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UsageError(f"expected numbers separated by commas, not {text!r}") from None


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
    robustness: bool = typer.Option(False, "--robustness", help="Also with every solver, and on worse pictures."),
    curve: Path = typer.Option(None, "--curve", metavar="PNG", help="Draw accuracy by step, on past the horizon."),
    limit: int = typer.Option(0, "--limit", help="Use this many images only, chosen by seed."),
    batch_size: int = typer.Option(64, "--batch-size"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON to stdout."),
    as_csv: bool = typer.Option(False, "--csv", help="Print CSV to stdout."),
) -> None:
    """Measure accuracy at 1, 3 and 5, and agreement with the teacher, by steps and by horizon."""
    require("train")
    from ..train.curves import draw_depth
    from ..train.val import by_step, table, validate

    walked = by_step(model, data, split, limit, batch_size, say) if curve else []
    rows = validate(
        model,
        data,
        split=split,
        steps=[int(n) for n in numbers(steps)],
        horizons=numbers(horizons),
        solver=solver,
        splitting=splitting,
        teacher=teacher or "",
        teacher_weights=str(teacher_weights or ""),
        robustness=robustness,
        limit=limit,
        batch_size=batch_size,
        say=say,
    )
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
