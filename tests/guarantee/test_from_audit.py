"""A proof from the recordings of a server, written by hand so that the right threshold is known."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from odevit_serve import bundle
from odevit_serve.config import Confidence, Unsure
from odevit_serve.errors import UserError
from odevit_serve.guarantee.audit_file import Audited, AuditWriter, head
from odevit_serve.guarantee.bounds import upper_bound
from odevit_serve.guarantee.from_audit import calibrate_from_audit
from odevit_serve.guarantee.thresholds import measuring
from odevit_serve.runtime.model import load_bundle

STEPS, COUNT = 8, 400


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """With a mark for unsure answers, proven by another policy."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    known = Confidence(2.0, 100, 0.2, 0.1, Unsure(0.4, 0.1, 0.05, 90))
    bundle.write_config(folder, bundle.read_config(folder).replace(confidence=known))
    return folder


def settles(at: int, early: int = 1) -> Audited:
    """An image whose answer is `early` before step `at` and 0 from it on; its score is 0 there and 1 a step more."""
    scores = tuple(float(step - at) for step in range(1, STEPS + 1))
    answers = tuple(early if step < at else 0 for step in range(1, STEPS + 1))
    return Audited(at, 0, 0, True, scores, answers, (0.0,) * STEPS)


def record(folder: Path, file: Path, images: list[Audited], name: str = "") -> None:
    model = load_bundle(folder)
    config = model.config.replace(name=name or model.config.name)
    writer = AuditWriter(file, head(config, model.graphs.setting))
    for image in images:
        writer.write(image)
    writer.close()


def test_the_threshold_is_that_at_which_answers_settle(copy: Path, tmp_path: Path) -> None:
    ends = np.random.default_rng(0).integers(1, STEPS, COUNT)
    record(copy, tmp_path / "audit", [settles(int(at)) for at in ends])
    before = (copy / bundle.CONFIG).read_bytes()
    report = calibrate_from_audit(copy, tmp_path / "audit", 0.02, 0.05, seed=7, threads=1, output=tmp_path / "new")
    tested = np.random.default_rng(7).permutation(COUNT)[measuring(COUNT) :]
    policy, proof = report.policy, report.policy.calibration
    assert proof is not None
    assert -1 < policy.threshold <= 0  # below, every image ends before it has settled
    assert report.chosen.mean_steps == pytest.approx(ends[tested].mean())
    assert report.chosen.time_saved == pytest.approx(1 - ends[tested].mean() / STEPS)
    assert (report.chosen.observed, report.chosen.bound) == (0.0, upper_bound(0, len(tested), 0.05))
    assert (proof.epsilon, proof.delta, proof.images, proof.target) == (0.02, 0.05, len(tested), "agreement")
    assert "400 images that a server audited" in proof.chosen
    assert proof.exits["stopped early"] == 1
    assert policy.lyapunov is None  # nothing grows, so no limit is ever reached
    assert (copy / bundle.CONFIG).read_bytes() == before
    model, own = load_bundle(tmp_path / "new"), bundle.read_config(copy).exit
    assert model.config.exit == policy
    assert model.guarantee == proof
    assert (policy.rule, policy.travel, policy.horizon) == (own.rule, own.travel, own.horizon)


def test_errors_at_the_threshold_are_counted(copy: Path, tmp_path: Path) -> None:
    """One image in fifty ends as if it had settled, with another answer than at the end."""
    liars = [replace(settles(3), answers=(1,) * (STEPS - 1) + (0,)) for _ in range(8)]
    record(copy, tmp_path / "audit", [settles(3)] * 392 + liars)
    with pytest.raises(UserError, match=r"no threshold could be proven to err on at most 0\.015 .* by the 320 audited"):
        calibrate_from_audit(copy, tmp_path / "audit", 0.015, 0.05, threads=1)
    assert bundle.read_config(copy).exit.calibration is None
    report = calibrate_from_audit(copy, tmp_path / "audit", 0.05, 0.05, threads=1)  # in place
    tested = np.random.default_rng(0).permutation(COUNT)[measuring(COUNT) :]
    assert report.chosen.observed == np.mean(tested >= 392)
    assert report.chosen.bound <= 0.05
    assert bundle.read_config(copy).exit == report.policy


def test_growth_ends_an_image_before_its_score_does(copy: Path, tmp_path: Path) -> None:
    """The Lyapunov times of every image pass 1 at step 3, where its answer settles; the score notices at step 7."""
    grows = replace(settles(3), scores=(-9.0,) * 6 + (5.0,) * 2, lyapunov_times=(0.1, 0.2, *(1.0,) * (STEPS - 2)))
    record(copy, tmp_path / "audit", [grows] * COUNT)
    report = calibrate_from_audit(copy, tmp_path / "audit", 0.05, 0.05, threads=1)
    assert report.policy.lyapunov == 1
    assert report.policy.threshold > -9
    assert report.chosen.mean_steps == 3
    assert report.policy.calibration is not None
    assert report.policy.calibration.exits["Lyapunov time"] == 1


def test_what_the_limit_ends_too_early_counts_against_every_threshold(copy: Path, tmp_path: Path) -> None:
    """The measuring images settle before they reach the limit, the testing images after it."""
    times, scores = (0.1, 0.2, *(1.0,) * (STEPS - 2)), (-9.0,) * 6 + (5.0,) * 2
    soon, late = (replace(settles(at), scores=scores, lyapunov_times=times) for at in (3, 5))
    measured = np.random.default_rng(0).permutation(COUNT)[: measuring(COUNT)]
    record(copy, tmp_path / "audit", [soon if i in measured else late for i in range(COUNT)])
    with pytest.raises(UserError, match="no threshold could be proven"):
        calibrate_from_audit(copy, tmp_path / "audit", 0.05, 0.05, threads=1)


def test_only_the_newest_are_looked_at(copy: Path, tmp_path: Path) -> None:
    """The camera has changed since: what the old images say holds no longer."""
    record(copy, tmp_path / "audit", [settles(7)] * 300 + [settles(2)] * 300, name="renamed")
    report = calibrate_from_audit(copy, tmp_path / "audit", 0.05, 0.05, threads=1, output=tmp_path / "new", limit=300)
    assert report.chosen.mean_steps == 2
    with pytest.raises(UserError, match="needs at least 74 images, and there are 60; nothing was changed"):
        calibrate_from_audit(copy, tmp_path / "audit", 0.05, 0.05, threads=1, limit=60)


def test_recordings_of_another_setting_prove_nothing(copy: Path, tmp_path: Path) -> None:
    record(copy, tmp_path / "audit", [settles(2)] * 100)
    config = bundle.read_config(copy)
    bundle.write_config(copy, config.replace(exit=replace(config.exit, rule="drift")))
    with pytest.raises(UserError, match="its 100 images were answered by another model, rule or setting"):
        calibrate_from_audit(copy, tmp_path / "audit", 0.05, 0.05, threads=1)


def test_the_temperature_stays_and_the_mark_for_unsure_answers_goes(copy: Path, tmp_path: Path) -> None:
    """It was proven for the depths of another policy."""
    known = bundle.read_config(copy).confidence
    assert known is not None
    assert known.unsure is not None
    record(copy, tmp_path / "audit", [settles(2)] * 100)
    calibrate_from_audit(copy, tmp_path / "audit", 0.05, 0.05, threads=1)
    assert bundle.read_config(copy).confidence == replace(known, unsure=None)
