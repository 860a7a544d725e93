"""The guarantee: exact bounds, the sequence of tests, and 200 splits that count how often it fails."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from scipy import stats

from odevit_serve import bundle
from odevit_serve.config import Confidence
from odevit_serve.data.datasets import Images
from odevit_serve.errors import UsageError, UserError
from odevit_serve.export import job
from odevit_serve.guarantee import calibrate
from odevit_serve.guarantee.calibrate import binomial_tail, choose, grid, images_needed, upper_bound
from odevit_serve.guarantee.of_file import calibrate_file
from odevit_serve.guarantee.recording import Recorder, Recording
from odevit_serve.runtime import exits
from odevit_serve.runtime.graph_files import read
from odevit_serve.runtime.model import BundleModel, load


def test_images_needed() -> None:
    tested = images_needed(0.01, 0.05) - calibrate.measuring(images_needed(0.01, 0.05))
    assert tested == 299
    for epsilon, delta in ((0.01, 0.05), (0.05, 0.1), (0.001, 0.01)):
        count = images_needed(epsilon, delta)
        assert binomial_tail(0, count - calibrate.measuring(count), epsilon) <= delta
        assert binomial_tail(0, count - 2 - calibrate.measuring(count - 2), epsilon) > delta


SCORE = exits.RULES["margin"]


def synthetic(count: int, steps: int, rng: np.random.Generator) -> Recording:
    """Margins that rise unevenly; the chance that an answer still changes falls with them."""
    margin = np.cumsum(rng.gamma(1.0, 1.0, (count, steps)), 1)
    final = rng.integers(0, 10, count)
    wrong = rng.random((count, steps)) < 0.5 * np.exp(-0.7 * margin)
    wrong[:, -1] = False
    answers = np.where(wrong, (final[:, None] + 1) % 10, final[:, None])
    zeros = np.zeros((count, steps))
    logits = np.eye(10, dtype=np.float32)[answers]
    return Recording(1.0, logits, margin, zeros, zeros, zeros, zeros, np.zeros((count, steps + 1)))


def violations(population: Recording, count: int, epsilon: float, delta: float, splits: int = 200) -> tuple[int, int]:
    """Calibrate on `count` images drawn at random from a population; count the splits in which the truth is above."""
    failed = chosen = 0
    truth = population.scores(SCORE)
    for split in range(splits):
        rows = np.random.default_rng(split).choice(
            len(population), count
        )  # with replacement: the population is the law
        first = calibrate.measuring(count)
        measured, tested = population.subset(rows[:first]), population.subset(rows[first:])
        thresholds = grid(measured, measured.scores(SCORE), lines=64)
        threshold = choose(tested, tested.scores(SCORE), thresholds, epsilon, delta)
        if threshold is not None:
            chosen += 1
            failed += float(population.errors(population.exit_steps(truth, threshold)).mean()) > epsilon
    return failed, chosen


def allowed(delta: float, splits: int = 200) -> int:
    """Violations that chance alone exceeds once in a thousand repetitions of this test, at a true rate of delta."""
    return int(stats.binom.ppf(0.999, splits, delta))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.05, 0.1), (0.1, 0.2)])
def test_guarantee_on_synthetic_scores(epsilon: float, delta: float) -> None:
    population = synthetic(40_000, 10, np.random.default_rng(0))
    failed, chosen = violations(population, 600, epsilon, delta)
    assert chosen == 200
    assert failed <= allowed(delta)  # 35 and 57 of 200
    assert failed > 0  # and the bound is not idle: it is tight enough to be hit


def test_the_test_can_fail() -> None:
    """Without the bound (taking the observed rate for the true one) half of the splits break the promise."""
    population = synthetic(40_000, 10, np.random.default_rng(0))
    broken, truth = 0, population.scores(SCORE)
    for split in range(100):
        rows = np.random.default_rng(split).choice(len(population), 600)
        measured, tested = population.subset(rows[:120]), population.subset(rows[120:])
        scores, best = tested.scores(SCORE), None
        for threshold in grid(measured, measured.scores(SCORE), lines=64):
            if tested.errors(tested.exit_steps(scores, threshold)).mean() > 0.05:
                break
            best = threshold
        assert best is not None
        broken += float(population.errors(population.exit_steps(truth, best)).mean()) > 0.05
    assert broken > allowed(0.1, 100)


def test_a_trajectory_without_numbers_is_an_error_at_every_threshold() -> None:
    recording = synthetic(400, 5, np.random.default_rng(1))
    recording.logits[7, 2:] = np.nan
    for threshold in (-np.inf, 0.5, np.inf):
        assert recording.errors(recording.exit_steps(recording.scores(SCORE), threshold))[7]
    recording.logits[:40] = np.nan
    thresholds = grid(recording, recording.scores(SCORE))
    assert choose(recording, recording.scores(SCORE), thresholds, 0.05, 0.1) is None


@pytest.fixture(scope="module")
def pictures() -> Images:
    from PIL import Image

    rng = np.random.default_rng(3)
    coarse = rng.integers(0, 256, (1500, 4, 4, 3), dtype=np.uint8)
    array = coarse.repeat(5, 1).repeat(5, 2)
    array[:, ::2] = rng.integers(0, 256, (1500, 1, 1, 3), dtype=np.uint8)
    return Images(
        [str(i) for i in range(1500)], np.arange(1500) % 5, ("ant", "bee", "cat", "dog", "eel"),
        lambda i: Image.fromarray(array[i]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def real(tiny_bundle: Path, pictures: Images) -> Recording:
    """Real trajectories of a real (if small) model."""
    model = load(tiny_bundle)
    assert isinstance(model, BundleModel)
    return Recorder(model, pictures, pictures.labels).record(np.arange(1500))


def test_guarantee_on_real_scores(real: Recording) -> None:
    failed, chosen = violations(real, 500, 0.05, 0.1)
    assert chosen == 200
    assert failed <= allowed(0.1)


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


def test_the_lyapunov_limit_is_the_smallest_that_spends_its_share(real: Recording) -> None:
    never = np.full(real.answers.shape, -np.inf)
    limit = calibrate.lyapunov_limit(real, 0.2)
    assert limit is not None
    wrong = int(real.errors(real.exit_steps(never, np.inf, limit)).sum())
    assert upper_bound(wrong, len(real), 0.5) <= 0.25 * 0.2
    assert (real.exit_steps(never, np.inf, limit) < 8).any()  # it decides
    smaller = max(t for t in np.unique(real.lyapunov_times[:, :-1]) if t < limit)
    wrong = int(real.errors(real.exit_steps(never, np.inf, float(smaller))).sum())
    assert upper_bound(wrong, len(real), 0.5) > 0.25 * 0.2
    assert calibrate.lyapunov_limit(real.subset(np.arange(200)), 0.01) is None  # too few to know
    calm = replace(real, exponent=-np.abs(real.exponent), _scores={})
    assert calibrate.lyapunov_limit(calm, 0.2) is None


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


def test_a_proof_for_an_exported_file(tiny_bundle: Path, pictures: Images, tmp_path: Path) -> None:
    """Of 10 steps where the bundle has 8: what was exported carries no proof, and earns one of its own."""
    exported, proven = tmp_path / "ten.onnx", tmp_path / "proven.onnx"
    settings = job.Settings(format="onnx-adaptive", steps=10, output=str(exported), max_drop=100.0)
    job.export(str(tiny_bundle), settings)
    some = pictures.subset(np.arange(200))
    assert not load(exported, threads=1).predict(np.asarray(some.read(0))).guaranteed
    report = calibrate_file(exported, some, 0.05, 0.05, threads=1, output=proven)
    model = load(proven, threads=1)
    proof = model.guarantee
    assert proof is not None
    assert (proof.setting.steps, proof.images) == (10, 160)
    assert report.chosen.bound <= 0.05
    later = [np.asarray(pictures.read(i)) for i in range(300, 700)]
    early, full = model.predict(later), model.predict(later, threshold=float("inf"))
    assert all(answer.guaranteed for answer in early)
    assert {answer.steps for answer in full} == {10}
    assert np.mean([a.steps for a in early]) < 10
    assert np.mean([a.index != b.index for a, b in zip(early, full, strict=True)]) <= 0.08  # 160 images prove 5%
    assert not model.predict(later[0], threshold=report.policy.threshold + 1).guaranteed


def test_a_file_of_fixed_depth_gets_probabilities_and_no_proof(
    tiny_files: dict[str, Path], pictures: Images, tmp_path: Path
) -> None:
    path, fitted = tiny_files["onnx"], tmp_path / "fitted.onnx"
    some = pictures.subset(range(300))
    with pytest.raises(UsageError, match="has a fixed depth of 8 steps: nothing ends early in it, and there is no"):
        calibrate_file(path, replace(some, labels=None), 0.05, 0.05)
    with pytest.raises(UserError, match="at least 100 labelled images, and there are 60"):
        calibrate_file(path, some.subset(range(60)), 0.05, 0.05)
    before = load(path, threads=1)
    answers = before.predict([np.asarray(some.read(i)) for i in range(300)])
    own = replace(some, labels=np.array([answer.index for answer in answers]))  # right each time: it may be surer
    found = calibrate_file(path, own, 0.05, 0.05, threads=1, output=fitted, unsure=0.1)
    assert isinstance(found, Confidence)
    assert found.temperature < 1
    assert found.unsure is not None
    after = load(fitted, threads=1)
    assert after.config.confidence == found
    assert after.config.exit == before.config.exit
    later = after.predict(np.asarray(some.read(0)))
    assert later.index == answers[0].index
    assert later.probability > answers[0].probability
    assert later.unsure in (True, False)


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
