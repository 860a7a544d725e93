"""What `calibrate` measures, proves and writes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from odevit_serve import bundle
from odevit_serve.data.datasets import Images
from odevit_serve.errors import UsageError, UserError
from odevit_serve.guarantee import calibrate
from odevit_serve.guarantee.recording import Recording
from odevit_serve.runtime import exits
from odevit_serve.runtime.graph_files import read
from odevit_serve.runtime.model import load


@pytest.mark.parametrize(("rule", "thresholds"), [("travel", (0.02, 0.12, 0.4)), ("drift", (0.1,)), ("kl", (-0.01,))])
def test_recording_is_what_the_runtime_sees(
    real: Recording, tiny_bundle: Path, pictures: Images, rule: str, thresholds: tuple[float, ...]
) -> None:
    model = load(tiny_bundle)
    travel = np.array(model.config.exit.travel)
    for threshold in thresholds:
        steps = real.exit_steps(real.scores(exits.find(rule), travel), threshold)
        got = model.predict([np.asarray(pictures.read(i)) for i in range(200)], rule=rule, threshold=threshold)
        assert [p.steps for p in got] == steps[:200].tolist()
        assert [p.index for p in got] == real.answers_at(steps)[:200].tolist()
    assert (real.travels[:, -1] == 0).all()
    assert (np.diff(real.lyapunov_times) >= 0).all()


def test_rules_compete_on_the_measuring_images_alone(real: Recording) -> None:
    rivals = calibrate.compete(real, calibrate.competitors("auto"), 0.05, "agreement", None)
    assert [r.mean_steps for r in rivals] == sorted(r.mean_steps for r in rivals)
    assert {r.name for r in rivals} == {name for name, rule in exits.RULES.items() if rule.exports}
    assert all(r.observed <= 0.05 for r in rivals)


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def test_calibrate_writes_a_proof(copy: Path, pictures: Images) -> None:
    before = bundle.read_config(copy)
    report = calibrate.calibrate(copy, pictures, 0.02, 0.05)
    after = bundle.read_config(copy)
    proof = after.exit.calibration
    assert proof is not None
    assert after.replace(exit=before.exit, confidence=before.confidence) == before
    assert (proof.epsilon, proof.delta, proof.images, proof.target) == (0.02, 0.05, 1200, "agreement")
    assert proof.setting == load(copy).graphs.setting
    assert (proof.setting.steps, proof.setting.horizon, proof.setting.precision) == (8, 4.0, "fp32")
    assert len(proof.setting.step) == len(proof.setting.stem) == 64
    assert sum(proof.exits.values()) == pytest.approx(1.0, abs=1e-3)
    assert proof.contracting is not None
    assert 0 < proof.contracting < 1
    assert proof.observed < proof.bound <= 0.02
    assert len(proof.data_sha256) == 64
    assert (len(after.exit.travel), after.exit.horizon) == (9, 4.0)
    assert after.exit.travel[-1] == 0
    assert report.chosen.mean_steps < 8
    assert report.chosen.threshold == after.exit.threshold
    unsafe = [row for row in report.rows if row.threshold < after.exit.threshold]
    assert unsafe
    assert unsafe[0].bound > 0.02 or unsafe[0].mean_steps <= report.chosen.mean_steps
    model = load(copy)
    assert model.guarantee == proof
    answers = [model.predict(np.asarray(pictures.read(i))) for i in range(40)]
    assert all(answer.guaranteed for answer in answers)
    assert not model.predict(np.asarray(pictures.read(0)), deadline_ms=60_000).guaranteed
    names = [rival.name for rival in report.rivals]
    assert names[-3:] == ["fixed, 1 step", "fixed, 2 steps", "fixed, 3 steps"]
    assert names[0] == after.exit.rule
    again = calibrate.calibrate(copy, pictures, 0.02, 0.05)
    assert again.policy.threshold == pytest.approx(report.policy.threshold, rel=1e-3)  # batches differ, and with
    assert again.policy.calibration is not None  # them the last bits; the same images and seed give the same policy
    assert again.policy.calibration.data_sha256 == proof.data_sha256


@pytest.mark.parametrize("rule", ["confidence", "patience", "margin", "kl", "latent-diff", "contraction", "travel"])
def test_any_rule_can_be_calibrated(copy: Path, pictures: Images, rule: str) -> None:
    report = calibrate.calibrate(copy, pictures.subset(range(400)), 0.05, 0.1, rule=rule)
    assert bundle.read_config(copy).exit.rule == rule
    answer = load(copy).predict(np.asarray(pictures.read(3)))
    assert answer.guaranteed
    assert 1 <= answer.steps <= 8
    assert report.chosen.bound <= 0.05


def test_a_rule_of_ones_own_that_looks_at_travel(copy: Path, pictures: Images) -> None:
    @exits.rule("own", needs_travel=True)
    def own(readings: exits.Readings) -> np.ndarray:
        return readings.margin - 0.1 * readings.travel

    try:
        report = calibrate.calibrate(copy, pictures.subset(range(300)), 0.05, 0.1, rule="own")
        assert np.isfinite(report.policy.threshold)
        assert load(copy).predict(np.asarray(pictures.read(0))).guaranteed
    finally:
        del exits.RULES["own"]


def test_accuracy_target(copy: Path, pictures: Images) -> None:
    report = calibrate.calibrate(copy, pictures, 0.02, 0.05, target="accuracy")
    assert report.full_accuracy is not None
    assert report.chosen.accuracy is not None
    assert report.full_accuracy - report.chosen.accuracy <= report.chosen.bound <= 0.02
    agreement = calibrate.calibrate(copy, pictures, 0.02, 0.05)
    assert report.chosen.mean_steps <= agreement.chosen.mean_steps + 0.2  # most answers here are wrong anyway
    with pytest.raises(UserError, match="needs labels"):
        calibrate.calibrate(copy, replace(pictures, labels=None), 0.02, 0.05, target="accuracy")
    with pytest.raises(UserError, match="needs labels"):
        calibrate.calibrate(copy, replace(pictures, classes=tuple("vwxyz")), 0.02, 0.05, target="accuracy")


def test_too_few_images_change_nothing(copy: Path, pictures: Images) -> None:
    before = (copy / bundle.CONFIG).read_bytes()
    with pytest.raises(UserError, match="needs at least 374 images, and there are 300; nothing was changed"):
        calibrate.calibrate(copy, pictures.subset(range(300)), 0.01, 0.05)
    assert (copy / bundle.CONFIG).read_bytes() == before


def test_unreadable_images_are_left_out(copy: Path, pictures: Images) -> None:
    def read(i: int) -> object:
        if i % 10 == 0:
            raise OSError("broken")
        return pictures.read(i)

    report = calibrate.calibrate(copy, replace(pictures, read=read).subset(range(400)), 0.05, 0.1)
    assert report.skipped == 40
    before = (copy / bundle.CONFIG).read_bytes()
    with pytest.raises(UserError, match="too few"):
        calibrate.calibrate(copy, replace(pictures, read=read).subset(range(374)), 0.01, 0.05)
    assert (copy / bundle.CONFIG).read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epsilon": 0.0}, "epsilon must lie between 0 and 1, not 0.0"),
        ({"delta": 1.5}, "delta must lie between 0 and 1, not 1.5"),
        ({"target": "speed"}, "unknown target 'speed'"),
        ({"rule": "guess"}, "unknown rule"),
        ({"rule": "fixed"}, "nothing to calibrate"),
    ],
)
def test_bad_settings(copy: Path, pictures: Images, settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        calibrate.calibrate(copy, pictures, **settings)


def test_open_images(tmp_path: Path, pictures: Images) -> None:
    x = np.stack([np.asarray(pictures.read(i)) for i in range(30)])
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(30) % 5, x_test=x[:10], y_test=np.arange(10) % 5)
    assert len(calibrate.open_images(str(tmp_path / "d.npz"))) == 10
    assert len(calibrate.open_images(str(tmp_path / "d.npz"), "train", limit=7)) == 7
    with pytest.raises(UsageError, match="no split 'val'"):
        calibrate.open_images(str(tmp_path / "d.npz"), "val")
    from PIL import Image

    for i in range(10):
        folder = tmp_path / "tree" / ("ant", "bee")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i]).save(folder / f"{i}.png")
    assert calibrate.open_images(str(tmp_path / "tree")).classes == ("ant", "bee")
    shutil.make_archive(str(tmp_path / "tree"), "zip", tmp_path / "tree")
    assert len(calibrate.open_images(str(tmp_path / "tree.zip"))) == 10


def test_a_proof_for_other_steps_is_a_bundle_of_its_own(copy: Path, tmp_path: Path, pictures: Images) -> None:
    few = pictures.subset(range(400))
    with pytest.raises(UsageError, match="give --output"):
        calibrate.calibrate(copy, few, 0.05, 0.1, steps=5)
    before = (copy / bundle.CONFIG).read_bytes()
    calibrate.calibrate(copy, few, 0.05, 0.1, steps=5, output=tmp_path / "five")
    assert (copy / bundle.CONFIG).read_bytes() == before
    model = load(tmp_path / "five")
    assert model.config.integration.steps == 5
    assert model.predict(np.asarray(pictures.read(0))).guaranteed
    assert not model.predict(np.asarray(pictures.read(0)), steps=8).guaranteed


def test_other_graphs_are_not_covered_by_the_proof(copy: Path, pictures: Images) -> None:
    calibrate.calibrate(copy, pictures.subset(range(400)), 0.05, 0.1)
    picture = np.asarray(pictures.read(0))
    assert load(copy).predict(picture).guaranteed
    step = read(copy / bundle.STEP)
    step.metadata_props[[p.key for p in step.metadata_props].index("graph")].value = "another"
    onnx.save(step, copy / bundle.STEP)
    assert not load(copy).predict(picture).guaranteed


@pytest.mark.parametrize("solver", ["heun", "ab2"])
def test_a_proof_for_another_solver_is_a_bundle_of_its_own(
    copy: Path, tmp_path: Path, pictures: Images, solver: str
) -> None:
    few, other = pictures.subset(range(400)), tmp_path / solver
    with pytest.raises(UsageError, match="give --output"):
        calibrate.calibrate(copy, few, 0.05, 0.1, solver=solver)
    with pytest.raises(UsageError, match="unknown solver 'magic'"):
        calibrate.calibrate(copy, few, 0.05, 0.1, solver="magic", output=other)
    calibrate.calibrate(copy, few, 0.05, 0.1, solver=solver, steps=6, output=other)
    model, source = load(other), load(copy)
    assert (model.config.integration.solver, model.config.integration.steps) == (solver, 6)
    assert model.guarantee is not None
    assert model.guarantee.setting.solver == solver
    for row in range(5):
        picture = np.asarray(pictures.read(row))
        answer = model.predict(picture)
        assert answer.guaranteed
        same = source.predict(picture, solver=solver, steps=6, rule="fixed")  # by copies of the graphs
        assert model.predict(picture, rule="fixed").margin == pytest.approx(same.margin, abs=1e-4)
    assert not source.predict(picture, solver=solver, steps=6, rule="fixed").guaranteed
