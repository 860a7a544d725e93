"""`predict` and `calibrate` as a user runs them: output, messages, exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve.bundle import read_config, write_config

RNG = np.random.default_rng(0)


def run(*words: object, data: bytes | None = None) -> subprocess.CompletedProcess[str]:
    code = "import sys; from odevit_serve.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, input=data, capture_output=True, env=environment, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "pictures"
    (place / "inner").mkdir(parents=True)
    for i in range(5):
        array = RNG.integers(0, 256, (24, 20, 3), dtype=np.uint8)
        Image.fromarray(array).save(place / ("inner" if i > 2 else "") / f"{i}.png")
    (place / "notes.txt").write_text("not a picture, and not asked for")
    return place


def test_table(folder: Path, tiny_bundle: Path) -> None:
    got = run("predict", folder, "-m", tiny_bundle, "--top", 2)
    assert got.returncode == 0, got.stderr
    lines = got.stdout.splitlines()
    assert len(lines) == 10
    assert "/8 stopped early" in lines[0]
    assert "█" in lines[0]
    assert "%" in lines[1]


def test_json_jsonl_csv_agree(folder: Path, tiny_bundle: Path) -> None:
    pattern = str(folder / "*.png")  # a glob that no shell has expanded
    as_json = json.loads(run("predict", pattern, "-m", tiny_bundle, "--json").stdout)
    as_lines = [json.loads(line) for line in run("predict", pattern, "-m", tiny_bundle, "--jsonl").stdout.splitlines()]
    as_csv = list(csv.DictReader(io.StringIO(run("predict", pattern, "-m", tiny_bundle, "--csv").stdout)))
    assert len(as_json) == 3
    for a, b, c in zip(as_json, as_lines, as_csv, strict=True):
        assert a["label"] == b["label"] == c["label_1"]
        assert a["steps"] == b["steps"] == int(c["steps"])
        assert a["exit_sentence"].startswith("stopped early: ")


def test_stdin_attention_and_trace(folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    data = (folder / "1.png").read_bytes()
    out = tmp_path / "out"
    got = run("predict", "-", "-m", tiny_bundle, "--json", "--attention", out, "--trace", out, data=data)
    assert got.returncode == 0, got.stderr
    answer = json.loads(got.stdout)[0]
    assert answer["source"] == "stdin"
    names = sorted(path.name for path in out.iterdir())
    assert names == [
        "stdin-head1.png", "stdin-head2.png", "stdin-head3.png", "stdin-mean.png", "stdin-trace.json",
        "stdin-trace.png",
    ]  # fmt: skip
    steps = json.loads((out / "stdin-trace.json").read_text())["trace"]
    assert len(steps) == answer["steps"]
    assert set(steps[0]) >= {"speed", "exponent", "travel", "margin", "probability"}
    for name in names:
        if name.endswith("png"):
            Image.open(out / name).load()


def test_same_names_do_not_overwrite_each_other(folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "0.png", folder / "inner" / "0.png")
    run("predict", folder / "0.png", folder / "inner" / "0.png", "-m", tiny_bundle, "--trace", tmp_path / "t")
    assert {path.name for path in (tmp_path / "t").glob("*.png")} == {"0-trace.png", "0-2-trace.png"}


def test_goes_on_past_bad_files(folder: Path, tiny_bundle: Path) -> None:
    whole = (folder / "0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:300])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.gif").write_text("hello")
    got = run("predict", folder, "missing.png", "-m", tiny_bundle, "--jsonl")
    assert got.returncode == 1
    answers = [json.loads(line) for line in got.stdout.splitlines()]
    assert sum("label" in answer for answer in answers) == 5
    assert sum("error" in answer for answer in answers) == 4
    for words in (
        "cut.png is damaged",
        "empty.jpg is empty",
        "text.gif is not a picture",
        "missing.png does not exist",
    ):
        assert words in got.stderr
    assert "4 inputs could not be answered" in got.stderr
    assert "Traceback" not in got.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--threshold", "nan"], 2, "threshold must be a number, not NaN"),
        (["--rule", "guess"], 2, "unknown rule 'guess'"),
        (["--rule", "confidence"], 2, "needs a threshold"),
        (["--max-steps", "0"], 2, "max_steps must be at least 1, not 0"),
        (["--json", "--csv"], 2, "give one of"),
        (["--device", "tpu"], 2, "unknown device 'tpu'"),
        (["--device", "cuda"], 1, "device 'cuda' is not available"),
        (["--no-adaptive", "--rule", "kl"], 2, "need adaptive depth"),
    ],
)
def test_bad_usage(folder: Path, tiny_bundle: Path, words: list[str], code: int, message: str) -> None:
    got = run("predict", folder / "0.png", "-m", tiny_bundle, *words)
    assert (got.returncode, got.stdout) == (code, "")
    assert message in got.stderr
    assert got.stderr.count("\n") == 1


def test_bad_bundles(folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(tiny_bundle, tmp_path / "broken"))
    (broken / "step.onnx").write_bytes((broken / "step.onnx").read_bytes()[:5000])
    for model, message in (
        (broken, "step.onnx is not a readable"),
        (folder, "has no config.json"),
        ("no", "no model 'no'"),
    ):
        got = run("predict", folder / "0.png", "-m", model)
        assert got.returncode == 1
        assert message in got.stderr
        assert got.stderr.count("\n") == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    got = run("predict", empty, "-m", tiny_bundle)
    assert (got.returncode, got.stderr.count("\n")) == (1, 1)
    assert "no pictures in" in got.stderr
    got = run("predict", empty, folder / "0.png", "-m", tiny_bundle, "--jsonl")
    assert (got.returncode, got.stderr.count("\n")) == (1, 1)  # the picture is answered all the same
    assert f"no pictures in {empty}" in got.stderr
    assert json.loads(got.stdout)["source"] == str(folder / "0.png")


def test_calibrate_then_predict(tiny_bundle: Path, folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    coarse = RNG.integers(0, 256, (700, 4, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=coarse.repeat(4, 1).repeat(4, 2))
    few = run("calibrate", copy, "--data", tmp_path / "data.npz", "--epsilon", 0.001)
    assert few.returncode == 1
    assert "needs at least" in few.stderr
    got = run("calibrate", copy, "--data", tmp_path / "data.npz", "--epsilon", 0.05, "--delta", 0.1)
    assert got.returncode == 0, got.stderr
    assert "->" in got.stdout
    assert "of images like the 560 tested, with confidence 90%" in got.stderr
    assert Image.open(copy / "calibration.png").size[0] > 300
    answer = json.loads(run("predict", folder / "0.png", "-m", copy, "--json").stdout)[0]
    assert answer["guaranteed"] is True
    as_json = run(
        "calibrate", copy, "--data", tmp_path / "data.npz", "--epsilon", 0.05, "--json", "--plot", tmp_path / "p.png"
    )
    assert json.loads(as_json.stdout)["calibration"]["images"] == 560
    assert (tmp_path / "p.png").exists()
    bad = run("calibrate", copy / "step.onnx", "--data", tmp_path / "data.npz")
    assert (bad.returncode, "is one part of a bundle: give the folder it lies in" in bad.stderr) == (1, True)


@pytest.mark.slow
def test_a_large_folder_streams_in_constant_memory(tiny_bundle: Path, tmp_path: Path) -> None:
    """8,000 files take no more memory than 800 (hard links: the disk need not hold them)."""
    source = tmp_path / "s.png"
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(source)
    peaks = []
    for count in (800, 8000):
        place = tmp_path / f"n{count}"
        place.mkdir()
        for i in range(count):
            os.link(source, place / f"{i:06}.png")
        code = (
            "import sys, resource; from odevit_serve.cli import app\n"
            f"sys.argv = ['x', 'predict', {str(place)!r}, '-m', {str(tiny_bundle)!r}, '--jsonl']\n"
            "try: app()\nexcept SystemExit: pass\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert len(done.stdout.splitlines()) == count
        peaks.append(int(done.stderr.split()[-1]))
    assert peaks[1] < peaks[0] + 8000  # kB: the names in one folder are all that grows


def test_progress_is_kept_off_stdout(folder: Path, tiny_bundle: Path) -> None:
    """On a terminal a bar is shown on stderr, and stdout is clean JSON all the same."""
    import pty

    parent, child = pty.openpty()
    code = "import sys; from odevit_serve.cli import main; main()"
    command = [sys.executable, "-c", code, "predict", str(folder), "-m", str(tiny_bundle), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=child, check=True)
    os.close(child)
    shown = os.read(parent, 100_000).decode(errors="replace")
    os.close(parent)
    assert len(json.loads(done.stdout)) == 5
    assert "5/5" in shown


def test_measured_accuracy_is_quoted_for_other_steps(folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    write_config(copy, read_config(copy).replace(metrics={"accuracy_by_steps": {"4": 0.5, "8": 0.9}}))
    picture = next(folder.glob("*.png"))
    said = {n: run("predict", picture, "-m", copy, "--steps", n).stderr for n in (3, 4, 8)}
    assert "note: measured accuracy 50.0% at 4 steps, 90.0% at the bundle's own 8" in said[4]
    assert "note: accuracy was never measured at 3 steps, only at 4, 8" in said[3]
    assert "measured" not in said[8]
