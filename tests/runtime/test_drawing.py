"""Pictures are checked by the pixels that carry their message."""

from __future__ import annotations

import numpy as np
from PIL import Image

from odevit_serve.runtime import drawing as pictures
from odevit_serve.runtime.exits import ExitReason
from odevit_serve.runtime.results import Attention, Prediction, TraceStep


def test_overlay_is_hot_where_the_map_is() -> None:
    heat = np.zeros((4, 4))
    heat[0, 3] = 1.0
    got = np.asarray(pictures.overlay(Image.new("RGB", (64, 64), (90, 90, 90)), heat)).astype(int)
    assert got.shape == (384, 384, 3)
    hot, cold = got[20, 360], got[360, 20]
    assert hot.sum() > cold.sum() + 200
    assert hot[0] > hot[2]  # towards yellow


def test_overlay_keeps_shape_and_flat_maps() -> None:
    wide = pictures.overlay(Image.new("L", (800, 400)), np.ones((7, 7)))
    assert wide.size == (800, 400)
    assert np.asarray(wide).std((0, 1)).max() == 0


def test_overlays_per_head_and_mean() -> None:
    heads = np.random.default_rng(0).random((3, 4, 4)).astype(np.float32)
    got = pictures.overlays(Image.new("RGB", (40, 40)), Attention(5, heads))
    assert list(got) == ["mean", "head1", "head2", "head3"]
    assert not np.array_equal(np.asarray(got["head1"]), np.asarray(got["head2"]))


def prediction(steps: int, rule: str = "travel") -> Prediction:
    trace = tuple(
        TraceStep(i, i * 0.5, 1.0, None, 0.2 - 0.1 * i, 0.1, 1.0, 0.1 * i, "cat", 0.1 * i, score=0.15 * i)
        for i in range(1, steps + 1)
    )
    return Prediction(
        "cat",
        0,
        np.array([1.0]),
        ("cat",),
        steps,
        8,
        ExitReason.EARLY,
        rule,
        1.0,
        None,
        True,
        "a.png",
        0.0,
        0.0,
        trace,
        threshold=0.5,
    )


def test_trace_plot_draws_its_lines() -> None:
    for steps in (1, 2, 8):
        picture = pictures.trace_plot(prediction(steps))
        pixels = np.asarray(picture).reshape(-1, 3).astype(int)
        for color in (pictures.GREEN, pictures.BLUE, pictures.ORANGE):
            assert (np.abs(pixels - color).sum(1) < 12).sum() > 20 * steps


def test_what_a_rule_compares_is_what_is_drawn() -> None:
    def lines(rule: str) -> dict[str, list[float | None]]:
        panel = pictures._decision(prediction(8, rule), (8.0, ""))
        return {line.name: [None if y is None else round(y, 3) for y in line.y[:7]] for line in panel.lines}

    reached = [round(0.15 * i, 3) for i in range(1, 8)]
    assert set(lines("travel")) == {"margin", "0.5 x expected travel"}
    assert lines("drift")["what drift compares"] == reached  # times a travel of 1
    assert lines("confidence") == {"score": reached}


def test_line_goes_where_its_numbers_say() -> None:
    rising = pictures.plot([pictures.Panel("p", [pictures.Curve("", pictures.BLUE, [0, 1], [0, 1])])], "t", "x")
    pixels = np.abs(np.asarray(rising).astype(int) - pictures.BLUE).sum(2) < 12
    rows, columns = np.nonzero(pixels)
    assert rows[columns.argmax()] < rows[columns.argmin()]  # ends higher than it starts


def test_ticks() -> None:
    assert pictures._ticks([0, 1]) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert pictures._ticks([3.0, 3.0])[0] < 3.0 < pictures._ticks([3.0, 3.0])[-1]
    assert pictures._log_ticks([0.02, 3.0]) == [0.01, 0.1, 1.0, 10.0]
    for low, high in ((-1e-7, 1e-7), (1e9, 2e9), (-5, 12)):
        ticks = pictures._ticks([low, high])
        assert ticks[0] <= low
        assert ticks[-1] >= high
        assert len(ticks) < 12
