"""Answers of many pictures in one file: the same as `predict`, and the same after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import png, until
from typer.testing import CliRunner

import odevit_serve
from odevit_serve.cli import app
from odevit_serve.errors import UsageError
from odevit_serve.offline.answers import AnswersFile, row_of


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(200):
        (folder / f"{i:03}.png").write_bytes(b"no picture" if i == 77 else png(i))
    return folder


@pytest.fixture(scope="module")
def expected(pictures: Path, tiny_bundle: Path) -> list[dict[str, Any]]:
    model = odevit_serve.load(tiny_bundle, threads=1)
    files = sorted(str(p) for p in pictures.iterdir())
    return [row_of(result, 3) for result in model.predict(files, errors="return")]


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """But for the last digits, which depend on the batch mates."""
    found = sorted(found, key=lambda row: row["source"])
    assert [row["source"] for row in found] == [row["source"] for row in expected]
    for one, other in zip(found, expected):
        for key, value in other.items():
            if isinstance(value, float):
                assert one[key] == pytest.approx(value, rel=1e-3, abs=1e-4)
            elif key not in ("labels", "probabilities"):
                assert one[key] == value


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_folder_of_200_pictures(
    pictures: Path, tiny_bundle: Path, expected: list[dict[str, Any]], tmp_path: Path, form: str
) -> None:
    target = tmp_path / f"answers.{form}"
    command = ["predict", str(pictures), "-m", str(tiny_bundle), "--threads", "1", "--output", str(target)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1  # one is no picture
    same(read(target), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == [target.name, f"{target.name}.settings.json"]
    (pictures / "new.png").write_bytes(png(500))
    try:
        again = CliRunner().invoke(app, command)
    finally:
        (pictures / "new.png").unlink()
    assert again.exit_code == 0
    assert "1 answers added" in again.stderr
    assert "200 were there before" in again.stderr
    assert len(read(target)) == 201
    other = CliRunner().invoke(app, [*command, "--max-steps", "2"])
    assert isinstance(other.exception, UsageError)
    assert "other settings" in str(other.exception)


def test_a_killed_run_is_continued(
    pictures: Path, tiny_bundle: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    target = tmp_path / "answers.parquet"
    journal = tmp_path / "answers.parquet.journal.jsonl"
    slow = (
        "import time\nfrom odevit_serve.offline import answers\nanswers.SYNC = 1\n"
        "write = answers.AnswersFile.write\n"
        "def slowly(self, row):\n    time.sleep(0.02)\n    write(self, row)\n"
        "answers.AnswersFile.write = slowly\nfrom odevit_serve.cli import main\nmain()\n"
    )
    words = ["predict", str(pictures), "-m", str(tiny_bundle), "--threads", "1", "--output", str(target)]
    process = subprocess.Popen([sys.executable, "-c", slow, *words], stderr=subprocess.DEVNULL)
    until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 20, 120)
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    kept = journal.read_bytes()
    assert kept.count(b"\n") < 200
    with journal.open("ab") as half:
        half.write(b'{"source": "half of a r')
    result = CliRunner().invoke(app, words)
    assert "were there before" in result.stderr
    same(read(target), expected)


@given(cut=st.integers(0, 400))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_journal_cut_anywhere_loses_only_the_row_that_was_cut(tmp_path: Path, cut: int) -> None:
    from odevit_serve.runtime.results import Failure

    target = tmp_path / "answers.jsonl"
    target.unlink(missing_ok=True)
    rows = [row_of(Failure(f"{i}.png", "ä" * i), 3) for i in range(4)]
    with AnswersFile(target, {}) as answers:
        for row in rows:
            answers.write(row)
    content = target.read_bytes()
    os.truncate(target, min(cut, len(content)))
    whole = content[:cut].count(b"\n")
    with AnswersFile(target, {}) as answers:
        assert answers.done == {f"{i}.png" for i in range(whole)}
        for row in rows[whole:]:
            answers.write(row)
        answers.finish()
    assert target.read_bytes() == content


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="not made by this command"), AnswersFile(tmp_path / "mine.jsonl", {}):
        pass
    assert (tmp_path / "mine.jsonl").read_text() == "precious"
    with pytest.raises(UsageError, match="must end in"):
        AnswersFile(tmp_path / "answers.csv", {})


DYING = """
import os, signal
from pathlib import Path
from odevit_serve.offline import run

class Dying(run.Answerer):
    def __call__(self, batch):
        for name in ("answered", "killed"):
            try:
                (Path(os.environ["MARKS"]) / name).touch(exist_ok=False)
            except FileExistsError:
                continue
            if name == "killed":
                next(self.rows(map(str, batch["source"])))  # in the middle of its batch
                os.kill(os.getpid(), signal.SIGKILL)
            break
        return super().__call__(batch)

run.Answerer = Dying
from odevit_serve.cli import main
main()
"""


@pytest.mark.slow
def test_by_actors_of_ray_one_of_which_is_killed(
    pictures: Path, tiny_bundle: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The second batch that is begun, by whichever actor, kills it: no row is lost, and none is there twice."""
    pytest.importorskip("ray.data", reason="needs the extra `ray`")
    target, marks = tmp_path / "answers.jsonl", tmp_path / "marks"
    marks.mkdir()
    words = ["predict", str(pictures), "-m", str(tiny_bundle), "--ray", "--actors", "2", "--output", str(target)]
    quiet = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1", "MARKS": str(marks)}
    # For a machine that does other things as well: Ray gives its own processes half a minute to start.
    quiet |= {"RAY_raylet_start_wait_time_s": "200", "RAY_agent_register_timeout_ms": "200000"}
    quiet |= {"RAY_worker_niceness": "0"}
    done = subprocess.run([sys.executable, "-c", DYING, *words], env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr  # one is no picture
    assert (marks / "killed").exists()
    assert "200 answers added" in done.stderr, done.stderr
    same(read(target), expected)
