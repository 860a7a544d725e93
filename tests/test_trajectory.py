"""What the page computes by itself: trajectories by other solvers, exits along them, and words about costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve import load
from odevit_serve.bundle import Teacher
from odevit_serve.demo import cards, plots, trajectory
from odevit_serve.demo.trajectory import Choice
from odevit_serve.engine import Engine
from odevit_serve.errors import UserError


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with Engine(load(tiny_bundle, threads=1), slots=4) as engine:
        yield engine


def picture(seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((48, 40), Image.Resampling.BICUBIC)


def by_hand(engine: Engine, choice: Choice, solver: str) -> trajectory.Run:
    own = picture()
    return trajectory._by_hand(engine.model, "tiny", own, own, choice.depth(engine.model.config), solver)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_is_what_predict_gives(engine: Engine, tiny_bundle: Path, seed: int) -> None:
    run, alone = trajectory.run(engine, "tiny", picture(seed), Choice()), load(tiny_bundle).predict(picture(seed))
    assert (run.label, run.steps, run.reason) == (alone.label, alone.steps, alone.exit)
    np.testing.assert_allclose(run.way.probabilities[run.steps - 1], alone.probabilities, atol=1e-5)
    assert run.way.maps.shape[:2] == (run.depth.steps + 1, engine.model.config.architecture.heads)
    np.testing.assert_allclose(run.way.maps[run.steps], load(tiny_bundle).attention(picture(seed)).heads, atol=1e-5)


@pytest.mark.parametrize("choice", [Choice(), Choice(threshold=0.02, rule="contraction"), Choice(max_steps=3)])
def test_steps_made_here_are_those_of_the_engine(engine: Engine, choice: Choice) -> None:
    mine, theirs = by_hand(engine, choice, "euler"), trajectory.run(engine, "tiny", picture(), choice)
    assert (mine.steps, mine.reason) == (theirs.steps, theirs.reason)
    for name in ("logits", "margin", "speed", "cls_speed", "travel", "cls", "maps"):
        np.testing.assert_allclose(getattr(mine.way, name), getattr(theirs.way, name), rtol=1e-3, atol=1e-4)


def test_solvers_of_higher_order_are_nearer_to_the_truth(engine: Engine) -> None:
    def end(solver: str, steps: int) -> np.ndarray:
        return by_hand(engine, Choice(steps=steps, adaptive=False), solver).way.cls[-1]

    truth = end("rk4", 32)
    errors = {name: float(np.linalg.norm(end(name, 8) - truth)) for name in ("euler", "ab2", "midpoint", "heun", "rk4")}
    assert errors["rk4"] < errors["heun"] < errors["euler"] / 3
    assert errors["ab2"] < errors["euler"] / 2
    assert errors["midpoint"] < errors["euler"] / 3


def test_only_graphs_of_plain_euler_steps_lend_psi(tiny_bundles: Callable[..., Path]) -> None:
    model = load(tiny_bundles(solver="heun"), threads=1)
    assert trajectory.solvers(model.config) == ["heun"]
    with Engine(model, slots=2) as engine:
        assert trajectory.run(engine, "tiny", picture(), Choice()).solver == "heun"
        with pytest.raises(UserError, match="steps by heun alone, not by rk4"):
            trajectory.run(engine, "tiny", picture(), Choice(solver="rk4"))


def test_the_guarantee_is_told_for_the_very_settings_only(tiny_bundle: Path) -> None:
    from dataclasses import replace

    from odevit_serve.bundle import Calibration, read_config

    config = read_config(tiny_bundle)
    own = config.integration
    proof = Calibration(0.02, 0.05, 1234, "", steps=own.steps, horizon=own.horizon)
    config = config.replace(exit=replace(config.exit, calibration=proof))
    told = cards.guarantee(config, Choice())
    assert "Guaranteed" in told
    assert "95%" in told
    assert "2.0%" in told
    assert "1,234" in told
    for other in (Choice(threshold=0.5), Choice(max_steps=2), Choice(steps=5), Choice(solver="rk4")):
        assert "No guarantee at this setting" in cards.guarantee(config, other), other
    assert "Full depth" in cards.guarantee(config, Choice(adaptive=False))


def test_the_exit_is_marked_where_margin_and_travel_cross(engine: Engine) -> None:
    run = trajectory.run(engine, "tiny", picture(1), Choice())
    assert run.steps < run.depth.steps  # else there is no crossing to see
    left = run.depth.threshold * run.way.travel
    assert run.way.margin[run.steps - 1] >= left[run.steps - 1]
    assert (run.way.margin[: run.steps - 1] < left[: run.steps - 1]).all()
    drawn = plots.contraction(run)
    assert f"cross at step {run.steps}" in drawn
    assert 'class="ring"' in drawn
    assert f"Contracted at step {run.steps} of {run.depth.steps}" in cards.sentence(run)


def test_plots_hold_no_nan_and_escape_names(engine: Engine, tiny_bundle: Path) -> None:
    from dataclasses import replace

    run = trajectory.run(engine, "tiny", picture(), Choice())
    run = replace(run, labels=("<b>", *run.labels[1:]))
    drawn = plots.trajectory(run, trajectory.head(tiny_bundle)) + cards.answer(run)
    assert "nan" not in drawn.replace("NaN", "nan").replace("Finance", "")
    assert "<b>&lt;" not in drawn.replace("<b>&lt;b&gt;", "")
    assert "&lt;b&gt;" in drawn
    assert drawn.count("<svg") == drawn.count("<title>") == 5


def test_the_cost_against_the_teacher_is_in_time_too_where_the_bundle_has_it(engine: Engine) -> None:
    from dataclasses import replace

    run = trajectory.run(engine, "tiny", picture(), Choice())
    for time, words in ((None, "not measured"), (4.0, "50% less <span>(about 40.0 ms)</span>")):
        config = run.config.replace(teacher=Teacher("timm:vit.tag", time=time))
        shown = cards.answer(replace(run, config=config, seconds=0.02, full_seconds=0.01))
        assert words in shown, time
        assert ">vit</span>" in shown


def test_the_head_is_that_of_the_graph(engine: Engine, tiny_bundle: Path, tmp_path: Path) -> None:
    found = trajectory.head(tiny_bundle)
    assert found is not None
    run = trajectory.run(engine, "tiny", picture(), Choice())
    np.testing.assert_allclose(run.way.cls[1:] @ found[0].T + found[1], run.way.logits, atol=1e-3)
    assert trajectory.head(tmp_path) is None
    assert "Colours" not in plots.path(run, None)


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_any_number_of_steps_can_be_drawn(engine: Engine, tiny_bundle: Path, steps: int) -> None:
    run = trajectory.run(engine, "tiny", picture(), Choice(steps=steps if steps < 32 else 24, adaptive=False))
    assert plots.trajectory(run, trajectory.head(tiny_bundle)).count("<figure") == 5
    assert cards.attention(run, 99, "head 2", 0.5).count("data-step") == 1
