"""The comparison itself: all systems in one run, and its sums are right."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from odevit_serve.benchmark.pictures import some_pictures
from odevit_serve.benchmark.serve import SYSTEMS, WAYS, audit_cost, compare, ratios, shares
from odevit_serve.benchmark.serve_table import as_markdown
from odevit_serve.benchmark.servers import BY_LITSERVE


def test_this_engine_against_the_others() -> None:
    rows = [
        {"system": "continuous", "clients": 8, "images_per_second": 30.0, "p99_ms": 10.0},
        {"system": "fixed", "clients": 8, "images_per_second": 15.0, "p99_ms": 40.0},
    ]
    assert ratios(rows) == {"8": {"fixed": {"images_per_second": 2.0, "p99": 0.25}}}
    assert shares([*rows, {**rows[1], "system": "in-process"}]) == {"8": {"continuous": 2.0}}


def test_a_system_that_answered_nothing_is_compared_with_nothing() -> None:
    rows = [
        {"system": "continuous", "clients": 8, "images_per_second": 30.0, "p99_ms": 10.0},
        {"system": "in-process", "clients": 8, "images_per_second": 0.0, "p99_ms": math.nan},
    ]
    assert ratios(rows) == {}
    assert shares(rows) == {}


def test_the_cost_of_the_audit_is_that_of_neighbouring_rounds() -> None:
    def run(speed: float, **more: float) -> dict[str, float]:
        return {"images_per_second": speed, "cpu_ms": 1000 / speed, "mean_depth": 2.0, **more}

    plain = [run(100.0), run(200.0), run(50.0)]
    audited = [run(90.0, audited=8, dropped=0), run(150.0, audited=9, dropped=1), run(45.0, audited=2, dropped=0)]
    found = audit_cost({("continuous", 8): plain, ("audited", 8): audited, ("fixed", 8): plain}, 8)["8"]
    assert found["throughput_lost"] == pytest.approx(0.1)
    assert found["cpu_added"] == pytest.approx(1 / 9)
    assert found["allowed"] == pytest.approx(0.02 * 4 + 0.03)
    assert found["coverage"] == pytest.approx(19 / 20)
    assert audit_cost({("continuous", 8): plain}, 8) == {}


@pytest.mark.slow
def test_all_are_compared(tiny_bundle: Path, tmp_path: Path) -> None:
    from odevit_serve.export.job import Settings, export

    unrolled = tmp_path / "unrolled.onnx"
    export(str(tiny_bundle), Settings(format="onnx", output=str(unrolled)))
    systems = [name for name in SYSTEMS if name != "audited"]  # a random model has no guarantee
    if not importlib.util.find_spec("litserve"):
        systems = [name for name in systems if name not in BY_LITSERVE]
    result = compare(tiny_bundle, unrolled, some_pictures(20, 16), [1, 32], 0.5, 1, 1, systems)
    first = [name for name in systems if WAYS.get(name, 1) == 1]
    assert [row["system"] for row in result["rows"]] == [*first, *systems]
    assert all(row["images"] > 0 and row["errors"] == 0 for row in result["rows"])
    assert set(result["ratios"]["32"]) == set(systems[1:])
    assert set(result["of_in_process"]["32"]) == {"continuous", *WAYS}
    depths = {row["system"]: row["mean_depth"] for row in result["rows"] if row["clients"] == 32}
    assert depths["grpc"] == pytest.approx(depths["in-process"], abs=1.5)  # read from another kind of answer
    assert result["audit"] == {}
    assert all(row["cpu_ms"] > 0 for row in result["rows"])
    rest = {"command": "x", "model": "m", "kind": "k", "pictures": "p", "depths": {"mean": 1.0, "full": 8}}
    text = as_markdown({**rest, **result})
    assert all(
        f"| {row['clients']} | `{row['system']}` | {row['images_per_second']:.0f} |" in text for row in result["rows"]
    )
    assert f"`many` {result['of_in_process']['32']['many']:.2f}" in text
    assert "1 client, a request minus an image in process: " in text
    assert {row["mean_depth"] for row in result["rows"] if row["system"] == "cnn"} <= {None}
