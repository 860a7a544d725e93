"""Small versions of the long runs: fuzzing, load of all kinds, SIGKILL. docs/hardening.md has the long ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hardening.fuzz import TARGETS, fuzz
from hardening.soak import soak

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("target", "cases"), [(n, 30 if n in ("bundle", "onnx") else 150) for n in TARGETS])
def test_what_is_almost_right_is_answered_or_refused_in_a_sentence(target: str, cases: int, tmp_path: Path) -> None:
    report = fuzz(target, tmp_path, 120.0, cases)
    assert not report["findings"], "\n".join(report["findings"])
    assert report["cases"] >= cases / 2
    assert len(report["ends"]) > 1  # some are read, some are refused


def test_nothing_is_lost_or_leaked_under_load_of_all_kinds() -> None:
    report = soak(400, 120.0)
    assert not report["faults"]
    assert report["lost"] == report["wrong"] == 0
    assert report["asked"].keys() >= {"good", "malformed", "slow", "cancelled", "burst"}
    images = report["images"]
    assert images["accepted"] == images["answered"] + images["cancelled"] + images["failed"] > 100
    assert report["descriptors"][1] <= report["descriptors"][0] + 4


@pytest.mark.slow
@pytest.mark.parametrize(("program", "times"), [("serve", 3), ("predict", 3), ("train", 2)])
def test_killed_at_random_moments_nothing_is_broken(program: str, times: int) -> None:
    """In a process of its own: it forks, which one with threads should not."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "CI": "1"}
    words = [sys.executable, "-m", "hardening.kill", program, "--times", str(times)]
    done = subprocess.run(words, env=environment, cwd=TESTS, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["killed"] >= times
