"""`benchmark` as it is typed: what is asked for is checked, and the result is printed, written and repeatable."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from odevit_serve import cli
from odevit_serve.benchmark.serve_table import as_markdown
from odevit_serve.errors import UsageError, UserError
from odevit_serve.train import own_benchmark

SHORT = ("--systems", "in-process", "--count", 6, "--seconds", 0.1, "--rounds", 1, "--threads", 1)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["benchmark", *map(str, words)], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_one_command_family() -> None:
    page = run("--help").output
    assert all(name in page for name in ("model", "serve", "own"))
    assert "--teacher-weights" in run("model", "--help").output
    assert "--clients" in run("serve", "--help").output
    assert "no model 'no-such'" in str(run("no-such").exception)  # short for `model no-such`


def test_without_torch_the_rest_is_measured(tiny_bundle: Path, tmp_path: Path) -> None:
    """As on a lean install: torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from odevit_serve.benchmark import compare as benchmark; import dataclasses\n"
        "benchmark.QUICK = dataclasses.replace(benchmark.QUICK, batches=(1, 2), pictures=2, rounds=1, grown=2)\n"
        f"sys.argv = ['odevit-serve', 'benchmark', {str(tiny_bundle)!r}, '--quick', '--threads', '1']\n"
        "sys.argv += ['--json', '--output', 'all.json', '--rounds', '2', '--markdown', 'table.md']\n"
        "from odevit_serve.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert json.loads((tmp_path / "all.json").read_text()) == got
    assert {row["where"] for row in got["rows"]} == {"odevit-serve"}
    assert any("torch is not installed" in sentence for sentence in got["left_out"])
    assert {curve["over"] for curve in got["growth"]} == {"batch", "steps"}
    assert got["command"] == f"odevit-serve benchmark {tiny_bundle} --quick --threads 1 --rounds 2"
    assert got["settings"]["rounds"] == 2
    assert f"`{got['command']}`" in (tmp_path / "table.md").read_text()


def test_servers_are_compared_and_the_result_is_written(tiny_bundle: Path, tmp_path: Path) -> None:
    words = ["serve", tiny_bundle, *SHORT, "--clients", "1,2", "-o", tmp_path / "all.json"]
    done = run(*words, "--json", "--markdown", tmp_path / "table.md")
    assert done.exit_code == 0, done.output
    got = json.loads(done.stdout)
    assert json.loads((tmp_path / "all.json").read_text()) == got
    assert (tmp_path / "table.md").read_text() == as_markdown(got)
    assert [(row["system"], row["clients"]) for row in got["rows"]] == [("in-process", 1), ("in-process", 2)]
    assert all(row["images"] > 0 and row["errors"] == 0 for row in got["rows"])
    assert (got["kind"], got["pictures"], got["threads"], got["rounds"]) == ("bundle", "made up", 1, 1)
    options = "--count 6 --clients 1,2 --seconds 0.1 --rounds 1 --threads 1 --systems in-process"
    assert got["command"] == f"odevit-serve benchmark serve {tiny_bundle} {options}"
    assert sum(got["depths"]["counts"].values()) == 6


def test_pictures_of_a_folder_are_sent_and_shown_in_a_table(tiny_bundle: Path, tmp_path: Path) -> None:
    from odevit_serve.benchmark.pictures import some_pictures

    for number, picture in enumerate(some_pictures(3, 16)):
        (tmp_path / f"{number}.png").write_bytes(picture)
    done = run("serve", tiny_bundle, *SHORT, "--clients", "1", "--pictures", tmp_path)
    assert done.exit_code == 0, done.output
    assert "3 pictures" in done.stderr
    assert "pictures from a folder" in done.stdout
    assert any(line.split()[:2] == ["1", "in-process"] for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--systems", "in-process,magic"], UsageError, "unknown system 'magic'"),
        (["--clients", "1,x"], UsageError, "clients must be numbers with commas, not '1,x'"),
        (["--clients", "0"], UsageError, "clients must lie between 1 and 1000, not '0'"),
        (["--clients", "8,1001"], UsageError, "clients must lie between 1 and 1000"),
        (["--systems", "audited"], UsageError, "has no guarantee that could be audited"),
        (["--pictures", "EMPTY"], UserError, "has no pictures"),
    ],
)
def test_bad_usage_of_serve(
    tiny_bundle: Path, tmp_path: Path, words: list[str], error: type[UserError], message: str
) -> None:
    given = [str(tmp_path) if word == "EMPTY" else word for word in words]
    found = run("serve", tiny_bundle, *SHORT, *given).exception
    assert type(found) is error
    assert message in str(found)


MEASURED: dict[str, Any] = {
    "kinds": ["ape", "bat"], "photographs": 1110, "held_out": 60, "seconds": 330.0, "threads": 2, "epsilon": 0.025,
    "rows": [
        {"name": "the largest class", "accuracy": 0.5, "interval": [0.4, 0.6], "macs": 0.0, "steps": None},
        {"name": "early exit", "accuracy": 0.9, "interval": [0.85, 0.95], "macs": 117.4e6, "steps": 2.314},
    ],
}  # fmt: skip


def test_ones_own_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement itself takes minutes: here is what the command asks of it, and makes of it."""
    asked: list[Any] = []
    monkeypatch.setattr(own_benchmark, "run", lambda *given: asked.append(given) or MEASURED)
    words = [
        "own", "photos", "--kinds", 2, "--photographs", 9, "--held-out", 7, "--minutes", 0.5, "--seed", 3,
        "--leave-out", "cow", "--leave-out", "dog", "--start", "mine", "--teacher-weights", "t.safetensors",
    ]  # fmt: skip
    done = run(*words, "-o", tmp_path / "all.json")
    assert done.exit_code == 0, done.output
    assert asked[0][:3] == (
        "photos", own_benchmark.Task(2, 9, 7, 0.5, 3, "mine", ("cow", "dog")), Path("t.safetensors"),
    )  # fmt: skip
    assert json.loads((tmp_path / "all.json").read_text()) == MEASURED
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for figure in ("2 kinds", "1,110 photographs", "60 others", "5.5 minutes", "2 threads", "2.5%"):
        assert figure in " ".join(lines)
    assert "the largest class 50.0% 40.0% to 60.0% 0" in lines
    assert "early exit 90.0% 85.0% to 95.0% 2.31 117" in lines
    assert json.loads(run(*words, "--json").stdout) == MEASURED


def test_a_folder_without_classes_is_told(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    assert isinstance(run("own", tmp_path / "some").exception, UserError)
