"""The scripts that take figures by hand still fit the package they measure."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("bench_*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_what_there_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    try:
        runpy.run_path(str(path), run_name="imported")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("odevit_serve"):
            raise
        pytest.skip(f"needs {error.name}")
