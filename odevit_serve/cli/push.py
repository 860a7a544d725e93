"""`odevit-serve push`: a bundle on the Hugging Face Hub."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import typer

from .. import bundle
from ..errors import UsageError, UserError
from . import app, require, say


@app.command()
def push(
    source: str = typer.Argument(..., metavar="BUNDLE", help="Bundle folder or name."),
    name: str = typer.Argument(..., metavar="NAME", help="OWNER/MODEL on the Hub."),
    private: bool = typer.Option(False, "--private", help="Make a new repository private."),
    message: str = typer.Option("", "--message", help="Message of the commit."),
    remote_code: bool = typer.Option(
        False, "--remote-code", help="Add the files that transformers' trust_remote_code needs."
    ),
) -> None:
    """Upload a bundle with its card and digests, and print the name that pins exactly this revision."""
    require("hub")
    if remote_code:
        require("train")
    from ..hub import push as upload

    folder = bundle.find(source)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a single file: push the bundle it was exported from")
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / folder.name
        _prepare(folder, ready, name, remote_code)
        pinned = upload(ready, name, private, message)
    say(f"next: odevit-serve predict --model {pinned} PICTURE")
    typer.echo(pinned)


def _prepare(folder: Path, ready: Path, name: str, remote_code: bool) -> None:
    """A copy of the bundle as it is pushed: complete, and with a card that names it as it is called on the Hub."""
    from ..hub import members, split
    from ..model_card import card

    config = bundle.read_config(folder)
    for part in (bundle.WEIGHTS, bundle.STEM, bundle.STEP, bundle.ATTENTION):
        if not (folder / part).is_file():
            raise UserError(f"{folder} has no {part}: {bundle.remake(folder)}")
    ready.mkdir()
    for path in members(folder):
        shutil.copyfile(path, ready / path.name)
    bundle.write_config(ready, config)  # with what transformers reads of it, which older bundles do not have
    if remote_code:
        from ..train.hf import write_remote_code

        write_remote_code(ready)
    own = folder / bundle.CARD
    if not own.is_file() or own.read_text(encoding="utf-8") == card(config, folder.name):  # nobody has edited it
        (ready / bundle.CARD).write_text(card(config, f"hf:{split(name)[0]}"), encoding="utf-8")
