"""The guarantee: exact bounds, the sequence of tests, and 200 splits that count how often it fails."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from odevit_serve import bundle, calibrate, exits
from odevit_serve.calibrate import Recording, binomial_tail, choose, grid, images_needed, upper_bound
from odevit_serve.data import Images
from odevit_serve.errors import UsageError, UserError
from odevit_serve.model import BundleModel, load


def test_binomial_against_scipy() -> None:
    for n in (1, 2, 30, 299, 5000, 100_000):
        for k in {0, 1, n // 100, n // 10, n // 2, n - 1, n}:
            for p in (0.0, 1e-6, 0.01, 0.05, 0.5, 0.99, 1.0):
                assert binomial_tail(k, n, p) == pytest.approx(stats.binom.cdf(k, n, p), rel=1e-8, abs=1e-300)
    assert binomial_tail(-1, 5, 0.5) == 0.0


def test_upper_bound_against_scipy() -> None:
    for n in (10, 299, 4000):
        for k in (0, 1, n // 50, n // 2, n - 1):
            for delta in (0.001, 0.05, 0.3):
                assert upper_bound(k, n, delta) == pytest.approx(stats.beta.ppf(1 - delta, k + 1, n - k), rel=1e-9)
    assert upper_bound(7, 7, 0.05) == 1.0


def test_images_needed() -> None:
    tested = images_needed(0.01, 0.05) - calibrate.measuring(images_needed(0.01, 0.05))
    assert tested == 299
    for epsilon, delta in ((0.01, 0.05), (0.05, 0.1), (0.001, 0.01)):
        count = images_needed(epsilon, delta)
        assert binomial_tail(0, count - calibrate.measuring(count), epsilon) <= delta
        assert binomial_tail(0, count - 2 - calibrate.measuring(count - 2), epsilon) > delta


def synthetic(count: int, steps: int, rng: np.random.Generator) -> Recording:
    """Scores that rise unevenly; the chance that an answer still changes falls with the score."""
    scores = np.cumsum(rng.gamma(1.0, 1.0, (count, steps)), 1)
    final = rng.integers(0, 10, count)
    wrong = rng.random((count, steps)) < 0.5 * np.exp(-0.7 * scores)
    wrong[:, -1] = False
    answers = np.where(wrong, (final[:, None] + 1) % 10, final[:, None])
    zeros = np.zeros((count, steps))
    return Recording(scores, answers, zeros, zeros, zeros, np.zeros((count, steps + 1)), None)


def part(recording: Recording, rows: np.ndarray) -> Recording:
    labels = None if recording.labels is None else recording.labels[rows]
    return Recording(
        recording.scores[rows], recording.answers[rows], recording.margins[rows], recording.cls_speeds[rows],
        recording.growths[rows], recording.travels[rows], labels,
    )  # fmt: skip


def violations(population: Recording, count: int, epsilon: float, delta: float, splits: int = 200) -> tuple[int, int]:
    """Calibrate on `count` images drawn at random from a population; count the splits in which the truth is above."""
    failed = chosen = 0
    for split in range(splits):
        rows = np.random.default_rng(split).choice(
            len(population), count
        )  # with replacement: the population is the law
        first = calibrate.measuring(count)
        thresholds = grid(part(population, rows[:first]), lines=64)
        threshold = choose(part(population, rows[first:]), thresholds, epsilon, delta)
        if threshold is not None:
            chosen += 1
            steps = population.exit_steps(threshold)
            failed += float(calibrate.losses(population, steps, "agreement").mean()) > epsilon
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
    broken = 0
    for split in range(100):
        rows = np.random.default_rng(split).choice(len(population), 600)
        tested = part(population, rows[120:])
        best = None
        for threshold in grid(part(population, rows[:120]), lines=64):
            if calibrate.losses(tested, tested.exit_steps(threshold), "agreement").mean() > 0.05:
                break
            best = threshold
        assert best is not None
        broken += float(calibrate.losses(population, population.exit_steps(best), "agreement").mean()) > 0.05
    assert broken > allowed(0.1, 100)


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
    """Real trajectories of a real (if small) model, with travel from elsewhere."""
    model = load(tiny_bundle)
    assert isinstance(model, BundleModel)
    recorder = calibrate.Recorder(model, pictures, pictures.labels, exits.find("contraction"))
    recorder.apply(model.config.exit)
    return recorder.record(np.arange(1500))


def test_guarantee_on_real_scores(real: Recording) -> None:
    failed, chosen = violations(real, 500, 0.05, 0.1)
    assert chosen == 200
    assert failed <= allowed(0.1)


def test_recording_is_what_the_runtime_sees(real: Recording, tiny_bundle: Path, pictures: Images) -> None:
    model = load(tiny_bundle)
    for kappa in (0.02, 0.12, 0.4):
        steps = real.exit_steps(kappa)
        got = model.predict([np.asarray(pictures.read(i)) for i in range(200)], kappa=kappa)
        assert [p.steps for p in got] == steps[:200].tolist()
        assert [p.index for p in got] == real.answers_at(steps)[:200].tolist()
    assert (real.travels[:, -1] == 0).all()
    assert real.growths.shape == (1500, 8)


def test_lyapunov_cuts_only_what_is_less_stable(real: Recording) -> None:
    policy = calibrate.measure(real, exits.find("contraction"), 0.0, 0.02, "agreement")
    assert policy.lyapunov == pytest.approx(np.nanmax(real.growths))
    never = np.inf
    assert (real.exit_steps(never, policy.lyapunov * 1.0001) == 8).all()
    assert (real.exit_steps(never, policy.lyapunov * 0.5) < 8).any()
    calm = replace(real, growths=-np.abs(real.growths))
    assert calibrate.measure(calm, exits.find("contraction"), 0.0, 0.02, "agreement").lyapunov is None


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def test_calibrate_writes_a_proof(copy: Path, pictures: Images) -> None:
    before = bundle.read_config(copy)
    report = calibrate.calibrate(copy, pictures, 0.02, 0.05)
    after = bundle.read_config(copy)
    proof = after.exit.calibration
    assert proof is not None
    assert after.replace(exit=before.exit) == before
    assert (proof.epsilon, proof.delta, proof.images, proof.target) == (0.02, 0.05, 1200, "agreement")
    assert (proof.steps, proof.horizon) == (8, 4.0)
    assert proof.observed < proof.bound <= 0.02
    assert len(proof.data_sha256) == 64
    assert len(after.exit.travel) == 9
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
    again = calibrate.calibrate(copy, pictures, 0.02, 0.05)
    assert again.policy.threshold == pytest.approx(report.policy.threshold, rel=1e-3)  # batches differ, and with
    assert again.policy.calibration is not None  # them the last bits; the same images and seed give the same policy
    assert again.policy.calibration.data_sha256 == proof.data_sha256


@pytest.mark.parametrize("rule", ["confidence", "patience", "margin", "kl", "latent-diff", "contraction-extrapolated"])
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
