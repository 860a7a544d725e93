"""The comparison of servers as tables and sentences, from a result that is written by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from odevit_serve.benchmark.serve import SYSTEMS
from odevit_serve.benchmark.serve_table import HEAD, as_markdown, cells, facts, notes, show


def row(system: str, clients: int, **other: Any) -> dict[str, Any]:
    known = {"images_per_second": 350.19, "p50_ms": 2.834, "p95_ms": 4.6, "p99_ms": 123.4, "cpu_ms": 4.227}
    return {"system": system, "clients": clients, **known, "mean_depth": 2.32, "errors": 0, **other}


RESULT: dict[str, Any] = {
    "command": "odevit-serve benchmark serve photos", "model": "photos", "kind": "bundle", "pictures": "made up",
    "depths": {"full": 3, "mean": 2.285}, "threads": 2, "rounds": 3, "seconds": 4.0,
    "machine": {"cores": 4, "load_average": 1.13}, "versions": {"python": "3.11.7", "litserve": "0.2.19"},
    "rows": [
        row("continuous", 1), row("in-process", 1, p50_ms=2.0, cpu_ms=3.0), row("cnn", 1, mean_depth=None, errors=7),
        row("continuous", 32), row("in-process", 32, cpu_ms=5.0), row("many", 32),
    ],
    "of_in_process": {"1": {"continuous": 0.714}, "32": {"continuous": 1.02, "many": 1.155}},
    "ratios": {"1": {"cnn": {"images_per_second": 2.496, "p99": 0.504}}},
    "audit": {"32": {"throughput_lost": 0.051, "allowed": 0.062, "cpu_added": -0.013, "coverage": None,
                     "audited": 1234}},
}  # fmt: skip


def test_each_number_is_in_its_column() -> None:
    assert dict(zip(HEAD, cells(RESULT["rows"][2]), strict=True)) == {
        "clients": "1", "system": "cnn", "images/s": "350", "p50 ms": "2.8", "p95 ms": "5", "p99 ms": "123",
        "CPU ms": "4.23", "depth": "", "errors": "7",
    }  # fmt: skip
    assert cells(RESULT["rows"][0])[HEAD.index("depth")] == "2.3"


def figures(text: str) -> list[str]:
    return re.findall(r"[+-]?\d[\d.,]*\d%?|[+-]?\d%?", text)


def test_the_sentences_have_the_figures_that_the_rows_come_to() -> None:
    lines = notes(RESULT)
    assert [(line.partition(",")[0], figures(line)[1:]) for line in lines] == [
        ("1 client", ["0.71"]),
        ("1 client", ["+1.23", "+0.8"]),  # of CPU, and at the median
        ("32 clients", ["1.02", "1.16"]),
        ("32 clients", ["-0.77"]),  # the median of many has the queue in it
        ("1 client", ["2.50", "99", "0.50"]),  # p99
        ("32 clients", ["5.1%", "6.2%", "-1.3%", "1,234"]),
    ]
    assert "`continuous` 1.02, `many` 1.16" in lines[2]
    assert "coverage none" in lines[-1]
    covered = {**RESULT, "audit": {"8": {**RESULT["audit"]["32"], "coverage": 0.987}}}
    assert "coverage 98.7%" in notes(covered)[-1]


def test_one_side_alone_is_compared_with_nothing() -> None:
    alone = {**RESULT, "rows": [row("in-process", 1)], "of_in_process": {"1": {}}}
    assert not any("of CPU" in line for line in notes(alone))


def test_the_page_has_the_table_and_lines_of_a_readable_length() -> None:
    page = as_markdown(RESULT).splitlines()
    assert page[0] == "`odevit-serve benchmark serve photos`"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("|")]
    assert table[:2] == [list(HEAD), ["---"] * len(HEAD)]
    assert [[line[0], line[1].strip("`"), *line[2:]] for line in table[2:]] == [cells(own) for own in RESULT["rows"]]
    assert all(len(line) <= 120 for line in page)
    text = " ".join(" ".join(page).split())
    assert all(note in text for note in notes(RESULT))
    assert facts(RESULT) in text


def test_the_facts_name_machine_model_and_versions() -> None:
    text = facts(RESULT)
    assert figures(text) == ["2.3", "3", "2", "4", "1.1", "3", "4", "3.11.7", "0.2.19"]
    assert text.startswith("photos (bundle; pictures made up, ")
    assert text.endswith("python 3.11.7, litserve 0.2.19.")


def test_the_terminal_shows_the_same_and_what_each_system_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show(RESULT)
    lines = capsys.readouterr().out.splitlines()
    for own in RESULT["rows"]:
        assert any(line.split() == " ".join(cells(own)).split() for line in lines)
    named = [line for line in lines if line in {f"{name}: {words}" for name, words in SYSTEMS.items()}]
    assert [line.partition(":")[0] for line in named] == ["continuous", "in-process", "cnn", "many"]  # each once
    assert all(note.replace("`", "") in lines for note in notes(RESULT))
