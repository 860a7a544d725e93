"""`push`: what is uploaded is a copy that is complete, named as it is called on the Hub, and nothing else changes."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from odevit_serve import bundle, cli, hub
from odevit_serve.errors import UsageError, UserError
from odevit_serve.model_card import card, write_card

PARTS = (bundle.WEIGHTS, bundle.STEM, bundle.STEP, bundle.ATTENTION)
Uploads = list[tuple[dict[str, bytes], tuple[Any, ...]]]


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    """The files that would go to the Hub, and with what; tests/test_hub.py has the way there."""
    seen: Uploads = []

    def upload(folder: Path, *given: Any) -> str:
        seen.append(({path.name: path.read_bytes() for path in folder.iterdir()}, given))
        return "hf:someone/mine@abc"

    monkeypatch.setattr(hub, "push", upload)
    return seen


@pytest.fixture
def mine(tiny_bundle: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "mine"))
    write_card(folder)
    return folder


def push(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["push", *map(str, words)])


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_name_that_pins_it_goes_to_stdout_and_the_bundle_stays_as_it_is(mine: Path, uploads: Uploads) -> None:
    (mine / "calibration.png").write_bytes(b"not part of the bundle")
    before = digests(mine)
    done = push(mine, "someone/mine", "--private", "--message", "Better")
    assert done.stdout == "hf:someone/mine@abc\n"
    assert "odevit-serve predict --model hf:someone/mine@abc" in done.stderr
    assert digests(mine) == before
    ((files, given),) = uploads
    assert given == ("someone/mine", True, "Better")
    assert set(files) == {*PARTS, bundle.CONFIG, bundle.PROCESSOR, bundle.CARD}
    for name in (*PARTS, bundle.CONFIG):
        assert hashlib.sha256(files[name]).hexdigest() == before[name]


def test_a_card_that_nobody_edited_names_the_model_as_on_the_hub(mine: Path, uploads: Uploads) -> None:
    config = bundle.read_config(mine)
    assert f"--model {mine.name} " in (mine / bundle.CARD).read_text()
    push(mine, "hf:someone/else")
    (mine / bundle.CARD).unlink()
    push(mine, "someone/else")
    for files, _ in uploads:
        assert files[bundle.CARD].decode() == card(config, "hf:someone/else")


def test_an_edited_card_is_pushed_as_it_is(mine: Path, uploads: Uploads) -> None:
    (mine / bundle.CARD).write_text("# Größe\n", encoding="utf-8")
    push(mine, "someone/mine")
    assert uploads[0][0][bundle.CARD].decode() == "# Größe\n"


def test_the_folder_one_is_in_can_be_pushed(mine: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    assert push(".", "someone/mine").exit_code == 0
    assert uploads[0][0][bundle.CARD].decode() == card(bundle.read_config(mine), "hf:someone/mine")


def test_what_transformers_reads_is_added_to_an_older_bundle(mine: Path, uploads: Uploads) -> None:
    (mine / bundle.PROCESSOR).unlink()
    push(mine, "someone/mine")
    assert b"crop_pct" in uploads[0][0][bundle.PROCESSOR]
    assert not (mine / bundle.PROCESSOR).exists()


def test_remote_code_goes_along_and_is_named_in_the_configuration(mine: Path, uploads: Uploads) -> None:
    push(mine, "someone/mine", "--remote-code")
    files = uploads[0][0]
    config = bundle.Config.from_json(files[bundle.CONFIG].decode())
    modules = {value.partition(".")[0] for value in config.auto_map.values()}
    assert modules
    assert {f"{name}.py" for name in modules} <= set(files)
    assert not list(mine.glob("*.py"))
    assert bundle.read_config(mine).auto_map == {}


@pytest.mark.parametrize("part", PARTS)
def test_a_bundle_that_lacks_a_part_is_refused_with_what_makes_it(mine: Path, uploads: Uploads, part: str) -> None:
    (mine / part).unlink()
    found = push(mine, "someone/mine").exception
    assert isinstance(found, UserError)
    assert f"has no {part}" in str(found)
    assert str(mine) in str(found)
    assert not uploads


def test_a_single_file_is_no_bundle(tiny_files: dict[str, Path], uploads: Uploads) -> None:
    found = push(tiny_files["onnx"], "someone/mine").exception
    assert isinstance(found, UsageError)
    assert "push the bundle" in str(found)
    assert not uploads
