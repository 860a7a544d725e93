"""The animation shows each map of the trajectory in turn, waits at the exit, and can be read back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from odevit_serve.runtime import animation
from odevit_serve.runtime.drawing import ORANGE
from odevit_serve.runtime.exits import ExitReason
from odevit_serve.runtime.results import Attention, Prediction


def answer(steps: int, full: int) -> Prediction:
    chances = np.array([0.1, 0.9])
    return Prediction(
        "bee", 1, chances, ("ant", "bee"), steps, full, ExitReason.EARLY, "travel", 1.0, None, True, "p.png", 0.0, 0.0
    )


def test_the_heat_moves_and_the_exit_is_marked(tmp_path: Path) -> None:
    maps = []
    for step in range(5):  # the hot patch goes from the left to the right
        heat = np.zeros((2, 5, 5), np.float32)
        heat[:, 2, step] = 1.0
        maps.append(Attention(step, heat))
    picture = Image.new("RGB", (50, 50), (90, 90, 90))
    shown, durations = animation.frames(picture, maps, answer(2, 4))
    assert len(shown) == len(durations) == 4 * animation.BETWEEN + 1
    hottest = []
    for frame in shown:
        row = np.asarray(frame)[animation.SIDE // 2].astype(int).sum(-1)
        hottest.append(float(np.average(np.arange(len(row)), weights=row - row.min())))
    assert all(a < b for a, b in itertools.pairwise(hottest))
    waits = [i for i, time in enumerate(durations) if time == animation.PAUSE]
    assert waits == [2 * animation.BETWEEN, 4 * animation.BETWEEN]
    # The orange part of the time line grows, and the mark of the exit is at half of it.
    line = [np.all(np.asarray(f)[animation.SIDE + 50] == ORANGE, -1).sum() for f in shown]
    assert all(a < b for a, b in itertools.pairwise(line))
    dark = np.asarray(shown[0])[animation.SIDE + 38].sum(-1) < 200
    assert abs(np.flatnonzero(dark).mean() - animation.SIDE / 2) < 3
    animation.save(tmp_path / "a.webp", picture, maps, answer(2, 4))
    read = Image.open(tmp_path / "a.webp")
    assert [frame.info["duration"] for frame in ImageSequence.Iterator(read) if frame.load()] == durations
    assert read.info["loop"] == 0


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "odevit_serve", *map(str, words)], capture_output=True, text=True)


def test_the_command(tiny_bundle: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    out = tmp_path / "out"
    words = ("predict", tmp_path / "wide.png", "-m", tiny_bundle, "--attention", out, "--animate", "--steps", 6)
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    read = Image.open(out / "wide.webp")
    # Maps are drawn as the stills are: the frame at the exit is the picture of the mean map there.
    read.seek(json.loads(done.stdout)[0]["steps"] * animation.BETWEEN)
    size = read.size[0]
    frame = np.asarray(read.convert("RGB").crop((0, 0, size, animation.SIDE)), float)
    still = np.asarray(Image.open(out / "wide-mean.png").convert("RGB").resize((size, animation.SIDE)), float)
    assert np.corrcoef(frame.ravel(), still.ravel())[0, 1] > 0.95
    assert read.n_frames <= 6 * animation.BETWEEN + 1  # frames that look the same may be merged


def test_the_animation_of_the_readme_is_small_and_moves() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "attention.webp"
    assert path.stat().st_size < 500_000
    assert getattr(Image.open(path), "n_frames", 1) > 8


@pytest.mark.parametrize(
    ("words", "message"), [(["--animate"], "--animate needs --attention DIR, the folder it writes to")]
)
def test_bad_usage(words: list[str], message: str, tiny_bundle: Path, tmp_path: Path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "p.png")
    done = run("predict", tmp_path / "p.png", "-m", tiny_bundle, *words)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (2, "", message)
