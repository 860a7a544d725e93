"""The benchmark's result as a table: every number in its column, and nothing lost that was left out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.benchmark.table import HEAD, as_markdown, cells, facts, growth_lines, show

ROW: dict[str, Any] = {
    "system": "this model", "where": "odevit-serve", "batch": 8, "images_per_second": 612.34,
    "images_per_second_spread": [590.0, 1234.5], "p50_ms": 1.5333, "p95_ms": 12.345, "macs": 138429312.0,
    "of_peak": 0.6905, "mean_steps": 2.5, "load_seconds": 0.14592, "peak_megabytes": 126.504, "file_bytes": 4649412,
    "accuracy": 0.42254, "agreement": 1.0,
}  # fmt: skip
LEAN = {
    "system": "timm ViT", "where": "torch eager", "batch": 1, "images_per_second": 5.0,
    "images_per_second_spread": [5.0, 5.0], "p50_ms": 200.0, "p95_ms": 201.0, "macs": 2e9, "of_peak": 1.0,
    "mean_steps": None, "load_seconds": None, "peak_megabytes": None, "file_bytes": None, "accuracy": None,
}  # fmt: skip
RESULT: dict[str, Any] = {
    "command": "odevit-serve benchmark photos", "model": "photos",
    "settings": {"threads": 2, "rounds": 3, "pictures": 32, "pictures_are": "noise"},
    "machine": {"processor": "EPYC", "cores": 4, "memory_gib": 23.5, "load_average": 1.15},
    "versions": {"python": "3.11.7", "numpy": "2.4.6"},
    "peak_macs_per_second": {"median": 123.06e9, "spread": [121e9, 124e9]},
    "rows": [ROW, LEAN],
    "growth": [{"over": "tokens", "sizes": [7, 19], "images_per_second": [100.0, 50.0], "exponent": 1.234}],
    "accuracy_of": "284 images",
    "left_out": ["Nothing of note."],
}  # fmt: skip


def test_each_number_is_in_its_column() -> None:
    assert dict(zip(HEAD, cells(ROW), strict=True)) == {
        "system": "this model", "in": "odevit-serve", "batch": "8", "images/s": "612", "min to max": "590 to 1234",
        "p50 ms": "1.53", "p95 ms": "12.3", "peak MB": "127", "load s": "0.146", "file MB": "4.65", "MMAC": "138",
        "steps": "2.50", "of peak": "0.69", "accuracy": "42.3%", "agrees": "100.0%",
    }  # fmt: skip


def test_what_was_not_measured_leaves_its_cell_empty() -> None:
    found = dict(zip(HEAD, cells(LEAN), strict=True))
    empty = {name for name, text in found.items() if not text}
    assert empty == {"peak MB", "load s", "file MB", "steps", "accuracy", "agrees"}


@given(st.floats(1e-6, 1e9))
def test_a_figure_keeps_three_digits(value: float) -> None:
    text = cells({**LEAN, "p50_ms": value})[HEAD.index("p50 ms")]
    assert float(text) == pytest.approx(value, rel=0.005)
    digits = text.replace(".", "").lstrip("0")
    assert len(digits) <= 4 if value < 1000 else "." not in text  # 9.996 is 10.00


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_a_figure_that_is_none(value: float, text: str) -> None:
    assert cells({**LEAN, "p50_ms": value})[HEAD.index("p50 ms")] == text


def test_the_page_has_everything() -> None:
    page = as_markdown(RESULT).splitlines()
    assert page[0] == "`odevit-serve benchmark photos`"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("|")]
    assert table == [list(HEAD), ["---"] * len(HEAD), cells(ROW), cells(LEAN)]
    assert "- images/s by tokens (7: 100, 19: 50.0); time grows as tokens^1.23" in page
    assert page[-2:] == ["", "- Nothing of note."]
    assert set(facts(RESULT)) <= set(page)
    assert "Left out:" not in as_markdown({**RESULT, "left_out": []})


def test_the_sentences_name_what_the_table_stands_on() -> None:
    text = " ".join(facts(RESULT))
    for words in (
        "medians of 3 interleaved rounds of 32 pictures (noise), 2 threads on 4 cores of EPYC, 23.5 GiB",
        "123 GMAC/s (121 to 124)", "python 3.11.7, numpy 2.4.6", "284 images",
    ):  # fmt: skip
        assert words in text
    unknown = {**RESULT, "machine": {**RESULT["machine"], "memory_gib": None}}
    del unknown["accuracy_of"]
    text = " ".join(facts(unknown))
    assert "GiB" not in text
    assert "Accuracy" not in text
    assert growth_lines({}) == []


def test_the_terminal_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    show(RESULT)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert all(any(line.split() == " ".join(cells(row)).split() for line in lines) for row in (ROW, LEAN))
    assert "left out: Nothing of note." in lines
    assert growth_lines(RESULT)[0] in lines
