"""What a fresh process pays, and that it is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from odevit_serve.benchmark.cost import fresh, peak_memory
from odevit_serve.errors import UserError

SHAPE = (3, 16, 16)


def test_a_fresh_process_is_measured(tiny_bundle: Path, tiny_files: dict[str, Path]) -> None:
    assert fresh(1, kind="peak")["macs_per_second"] > 1e7
    of_bundle = fresh(1, kind="bundle", path=tiny_bundle, batch=2, shape=SHAPE)
    of_file = fresh(1, kind="graph", path=tiny_files["onnx"], batch=2, shape=SHAPE)
    for found in (of_bundle, of_file):
        assert 0 < found["load_seconds"] < 60
        assert 20 < found["peak_megabytes"] < 2000


def test_memory_is_that_of_the_new_process_alone() -> None:
    """This one may have held anything before."""
    held = bytearray(1) * (150 * 2**20)  # every page of it
    mine = peak_memory()
    assert mine > len(held) / 2**20
    code = "from odevit_serve.benchmark.cost import peak_memory; print(peak_memory())"
    theirs = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 5 < theirs < mine - 100
    grown = code.replace("; print", "; held = bytearray(1) * (100 * 2**20); print")
    more = float(subprocess.run([sys.executable, "-c", grown], capture_output=True, text=True, check=True).stdout)
    assert more - theirs == pytest.approx(100, abs=20)


def test_a_process_that_fails_is_told_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"^measuring graph failed: .*none\.onnx does not exist") as failure:
        fresh(1, kind="graph", path="none.onnx", batch=1, shape=SHAPE)
    assert "\n" not in str(failure.value)
