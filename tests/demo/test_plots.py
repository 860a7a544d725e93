"""The plots of the page: where numbers land in the drawing."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.demo import plots
from odevit_serve.demo.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, chart, histogram


def points(drawing: str) -> list[tuple[float, float]]:
    (line,) = re.findall(r'<polyline class="line c0" points="([^"]*)"', drawing)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())]


def test_a_line_goes_from_corner_to_corner_of_its_range() -> None:
    drawing = chart("t", [Series("a", 0, [0, 4], np.array([0.0, 1.0]))], 4, y_range=(0.0, 1.0))
    assert points(drawing) == [(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]


def test_what_is_no_number_is_left_out() -> None:
    drawing = chart("t", [Series("a", 0, [0, 1, 2], np.array([np.nan, 1.0, np.inf]))], 2)
    assert len(points(drawing)) == 1


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9),
    st.integers(0, 8),
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), max_size=20),
)
def test_any_chart_is_well_formed_and_inside_its_frame(values: list[float], exit_at: int, name: str) -> None:
    drawing = chart(name, [Series(name, 0, range(len(values)), np.array(values))], 8, exit_at, text=name, note=name)
    tree = ElementTree.fromstring(drawing)
    assert "".join(tree.find("figcaption").itertext()) == name + name  # type: ignore[union-attr]
    for x, y in points(drawing):
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(0, 1, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3, 5, [-2.0, 0.0, 2.0, 4.0])]
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert plots._ticks(low, high) == ticks


def test_a_histogram_has_a_bar_for_each_step_and_says_the_mean() -> None:
    drawing = histogram([1, 1, 3], 4)
    assert re.findall(r"<title>(\d+ at step \d+)</title>", drawing) == [
        "2 at step 1", "0 at step 2", "1 at step 3", "0 at step 4",
    ]  # fmt: skip
    assert "Depths of 3 pictures: 1.7 of 4 steps on average" in drawing
    assert histogram([], 4) == ""
