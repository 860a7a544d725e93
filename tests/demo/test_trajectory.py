"""What the page computes by itself: trajectories by other solvers, exits along them, and words about costs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve import load
from odevit_serve.config import TeacherFacts
from odevit_serve.demo import html as cards
from odevit_serve.demo import plots, trajectory, weights
from odevit_serve.demo.trajectory import Choice
from odevit_serve.runtime.exits import ExitReason
from odevit_serve.serving.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with Engine(load(tiny_bundle, threads=1), slots=4) as engine:
        yield engine


def picture(seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((48, 40), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_is_what_predict_gives(engine: Engine, tiny_bundle: Path, seed: int) -> None:
    run, alone = trajectory.run(engine, "tiny", picture(seed), Choice()), load(tiny_bundle).predict(picture(seed))
    assert (run.label, run.steps, run.reason) == (alone.label, alone.steps, alone.exit)
    np.testing.assert_allclose(run.trajectory.probabilities[run.steps - 1], alone.probabilities, atol=1e-5)
    assert run.trajectory.maps.shape[:2] == (run.depth.steps + 1, engine.model.config.architecture.heads)
    np.testing.assert_allclose(
        run.trajectory.maps[run.steps], load(tiny_bundle).attention(picture(seed)).heads, atol=1e-5
    )


@pytest.mark.parametrize("choice", [Choice(), Choice(threshold=0.02, rule="travel"), Choice(max_steps=3)])
def test_the_trajectory_is_what_the_engine_sees(engine: Engine, choice: Choice) -> None:
    run = trajectory.run(engine, "tiny", picture(), choice)
    whole = engine.submit(picture(), adaptive=False, trace=True, states=True).result()
    np.testing.assert_allclose(run.trajectory.margin, [s.margin for s in whole.prediction.trace], atol=1e-4)
    np.testing.assert_allclose(run.trajectory.exponent, [s.exponent for s in whole.prediction.trace], atol=1e-4)
    np.testing.assert_allclose(run.trajectory.cls, np.stack(whole.states)[:, 0], atol=1e-4)


def test_solvers_of_higher_order_are_nearer_to_the_truth(engine: Engine) -> None:
    def end(solver: str, steps: int) -> np.ndarray:
        choice = Choice(steps=steps, adaptive=False, solver=solver)
        return trajectory.run(engine, "tiny", picture(), choice).trajectory.cls[-1]

    truth = end("rk4", 32)
    errors = {name: float(np.linalg.norm(end(name, 8) - truth)) for name in ("euler", "ab2", "midpoint", "heun", "rk4")}
    assert errors["rk4"] < errors["heun"] < errors["euler"] / 3
    assert errors["ab2"] < errors["euler"] / 2
    assert errors["midpoint"] < errors["euler"] / 3


def test_a_bundle_of_any_solver_takes_any_other(tiny_bundles: Callable[..., Path]) -> None:
    model = load(tiny_bundles(solver="heun"), threads=1)
    with Engine(model, slots=2) as engine:
        assert trajectory.run(engine, "tiny", picture(), Choice()).solver == "heun"
        assert trajectory.run(engine, "tiny", picture(), Choice(solver="rk4")).solver == "rk4"


def test_the_guarantee_is_told_for_the_very_settings_only(tiny_bundle: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from odevit_serve.bundle import read_config, write_config
    from odevit_serve.config import Calibration

    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    config = read_config(folder)
    proof = Calibration(0.02, 0.05, 1234, "", load(folder).graphs.setting)
    write_config(folder, config.replace(exit=replace(config.exit, calibration=proof)))
    model = load(folder)
    told = cards.guarantee(model, Choice())
    assert "Guaranteed" in told
    assert "95%" in told
    assert "2.0%" in told
    assert "1,234" in told
    for other in (Choice(threshold=0.5), Choice(max_steps=2), Choice(steps=5), Choice(solver="rk4")):
        assert "No guarantee at this setting" in cards.guarantee(model, other), other
    assert "Full depth" in cards.guarantee(model, Choice(adaptive=False))


def test_the_exit_is_marked_where_margin_and_travel_cross(engine: Engine) -> None:
    run = trajectory.run(engine, "tiny", picture(1), Choice())
    assert run.steps < run.depth.steps  # else there is no crossing to see
    left = run.depth.threshold * run.trajectory.travel
    assert run.trajectory.margin[run.steps - 1] >= left[run.steps - 1]
    assert (run.trajectory.margin[: run.steps - 1] < left[: run.steps - 1]).all()
    drawn = plots.decision(run)
    assert f"reached at step {run.steps}" in drawn
    assert "expected travel" in drawn
    assert 'class="ring"' in drawn
    assert f"Stopped early at step {run.steps} of {run.depth.steps}: the margin reached" in cards.sentence(run)


@pytest.mark.parametrize(("rule", "threshold"), [("drift", 0.2), ("confidence", 0.6), ("contraction", -0.01)])
def test_what_is_drawn_is_what_the_rule_decides_by(engine: Engine, rule: str, threshold: float) -> None:
    """Also where that is not the margin against the travel."""
    run = trajectory.run(engine, "tiny", picture(1), Choice(rule=rule, threshold=threshold))
    assert (run.trajectory.score[: run.steps - 1] < threshold).all()
    assert np.isnan(run.trajectory.score[-1])
    drawn = plots.decision(run)
    if run.reason is ExitReason.EARLY:
        assert run.trajectory.score[run.steps - 1] >= threshold
        assert f"reached at step {run.steps}" in drawn
    assert rule in drawn
    assert "No rule ends this image early" in plots.decision(
        trajectory.run(engine, "tiny", picture(1), Choice(adaptive=False))
    )


def test_plots_hold_no_nan_and_escape_names(engine: Engine, tiny_bundle: Path) -> None:
    from dataclasses import replace

    run = trajectory.run(engine, "tiny", picture(), Choice())
    run = replace(run, labels=("<b>", *run.labels[1:]))
    drawn = plots.trajectory(run, weights.head(tiny_bundle)) + cards.answer(run)
    assert "nan" not in drawn.replace("NaN", "nan").replace("Finance", "")
    assert "<b>&lt;" not in drawn.replace("<b>&lt;b&gt;", "")
    assert "&lt;b&gt;" in drawn
    assert drawn.count("<svg") == drawn.count("<title>") == 6


def test_the_cost_against_the_teacher_is_in_time_too_where_the_bundle_has_it(engine: Engine) -> None:
    from dataclasses import replace

    run = trajectory.run(engine, "tiny", picture(), Choice())
    for time, words in ((None, "not measured"), (4.0, "50% less <span>(about 40.0 ms)</span>")):
        config = run.config.replace(teacher=TeacherFacts("timm:vit.tag", time=time))
        shown = cards.answer(replace(run, config=config, seconds=0.02, full_seconds=0.01))
        assert words in shown, time
        assert ">vit</span>" in shown
    whole = trajectory.run(engine, "tiny", picture(), Choice(adaptive=False))
    shown = cards.answer(replace(whole, seconds=0.02, full_seconds=0.9))
    assert "the same <span>(20.0 ms)</span>" in shown  # one measurement, not two that differ by chance


def test_the_head_is_that_of_the_graph(engine: Engine, tiny_bundle: Path, tmp_path: Path) -> None:
    found = weights.head(tiny_bundle)
    assert found is not None
    run = trajectory.run(engine, "tiny", picture(), Choice())
    np.testing.assert_allclose(run.trajectory.cls[1:] @ found[0].T + found[1], run.trajectory.logits, atol=1e-3)
    assert weights.head(tmp_path) is None
    assert "Colours" not in plots.path(run, None)


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_any_number_of_steps_can_be_drawn(engine: Engine, tiny_bundle: Path, steps: int) -> None:
    run = trajectory.run(engine, "tiny", picture(), Choice(steps=steps if steps < 32 else 24, adaptive=False))
    assert plots.trajectory(run, weights.head(tiny_bundle)).count("<figure") == 6
    assert cards.attention(run, 99, "head 2", 0.5).count("data-step") == 1


@pytest.mark.parametrize("attention", ["dot", "l2"])
def test_the_energy_is_that_of_the_analysis(tiny_bundles: Callable[..., Path], attention: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from odevit_serve.demo.energy import cls_energy
    from odevit_serve.train.analysis.energy import energy
    from odevit_serve.train.model import ODEViT

    folder = tiny_bundles(attention=attention)
    model, states = ODEViT.from_pretrained(folder), torch.randn(4, 19, 24)
    with torch.no_grad():
        wanted = energy(model.psi.attention, states)[:, :, 0].numpy()
    found = cls_energy(folder, model.config.architecture, states.numpy())
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert cls_energy(tmp_path, model.config.architecture, states.numpy()) is None
