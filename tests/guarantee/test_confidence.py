"""Probabilities that mean something, and a mark on answers that may be wrong: laws, oracles, one bundle through all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from camera import shots
from PIL import Image
from scipy import stats

import odevit_serve
from odevit_serve import bundle
from odevit_serve.config import Confidence, Unsure
from odevit_serve.data.datasets import Images
from odevit_serve.errors import UserError
from odevit_serve.export import job
from odevit_serve.guarantee import confidence
from odevit_serve.guarantee.calibrate import calibrate
from odevit_serve.model_card import card
from odevit_serve.runtime.dynamics import softmax
from odevit_serve.runtime.results import Prediction
from odevit_serve.serving.engine import Engine


def drawn(count: int, temperature: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n,5], and labels that follow their probabilities at a temperature."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (count, 5))
    chances = softmax(logits / temperature).cumsum(1)
    return logits, (rng.random((count, 1)) > chances).sum(1).clip(0, 4)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_the_temperature_is_found_and_makes_probabilities_true(temperature: float) -> None:
    logits, labels = drawn(6000, temperature, 1)
    found = confidence.fit_temperature(logits, labels)
    assert found == pytest.approx(temperature, rel=0.08)
    assert confidence.negative_log_likelihood(logits, labels, found) <= confidence.negative_log_likelihood(
        logits, labels, temperature
    )
    others, truth = drawn(6000, temperature, 2)
    assert confidence.calibration_error(others, truth, found) < 0.02
    if temperature != 1.0:
        assert confidence.calibration_error(others, truth) > 0.05


def test_calibration_error_by_hand() -> None:
    logits = np.log(np.array([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.3, 0.7]]))
    assert confidence.calibration_error(logits, np.array([0, 1, 1, 1])) == pytest.approx((2 * 0.4 + 2 * 0.3) / 4)


def broken_marks(
    logits: np.ndarray, labels: np.ndarray, alpha: float, delta: float, images: int, draws: int = 200
) -> tuple[int, int, list[float]]:
    """Draws whose unmarked answers are wrong on more than alpha of the whole population, those that found a threshold,
    and the part they mark. As `calibrate` does it: temperature and thresholds from a fifth, the test on the rest."""
    broken, marked = 0, []
    for draw in range(draws):
        rows = np.random.default_rng(draw).choice(len(labels), images)  # with replacement: the population is the law
        first, second = rows[: images // 5], rows[images // 5 :]
        try:
            found = confidence.measure_confidence(
                (logits[first], labels[first]), (logits[second], labels[second]), alpha, delta
            )
        except confidence.NoMark:
            continue
        assert found.unsure is not None
        left = confidence.confidences(logits, found.temperature) >= found.unsure.threshold
        broken += float((logits[left].argmax(1) != labels[left]).mean()) > alpha
        marked.append(float(1 - left.mean()))
    return broken, len(marked), marked


@pytest.mark.parametrize(("alpha", "images", "hard"), [(0.05, 1500, 1.0), (0.1, 1000, 1.5), (0.2, 600, 2.5)])
def test_answers_that_are_not_marked_are_right_as_often_as_promised(alpha: float, images: int, hard: float) -> None:
    """200 draws each; how often unmarked answers are wrong on all 20,000 is known. Below the error of all of them."""
    logits, labels = drawn(20_000, hard, 3)
    assert (logits.argmax(1) != labels).mean() > 1.3 * alpha  # so that the mark has work to do
    broken, chosen, marked = broken_marks(logits, labels, alpha, 0.1, images)
    assert chosen > 120
    assert broken <= stats.binom.ppf(0.999, 200, 0.1)
    assert 0.02 < np.mean(marked) < 0.9


def test_a_confidence_that_says_nothing_proves_nothing() -> None:
    """Labels that do not depend on the logits: hardly any draw may find a threshold, and each that does is wrong."""
    logits, labels = drawn(20_000, 1.0, 5)
    labels = np.random.default_rng(6).permutation(labels)
    _, chosen, _ = broken_marks(logits, labels, 0.1, 0.1, 400)
    assert chosen <= stats.binom.ppf(0.999, 200, 0.1)


def test_too_few_images_prove_nothing() -> None:
    logits, labels = drawn(60, 1.0, 4)
    with pytest.raises(UserError, match="no threshold on the probability could be proven to leave at most"):
        confidence.measure_confidence((logits, labels), (logits, labels), 0.01, 0.05)


@pytest.fixture(scope="module")
def marked(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose answers are marked below the middle of their confidence."""
    folder = tmp_path_factory.mktemp("marked")
    shutil.copytree(tiny_bundle, folder, dirs_exist_ok=True)
    config = bundle.read_config(folder)
    bundle.write_config(folder, config.replace(confidence=Confidence(0.5, 100, 0.2, 0.1)))
    answers = odevit_serve.load(folder, threads=1).predict(shots(60, 4, noise=60.0))
    middle = float(np.median([answer.probability for answer in answers]))
    unsure = Unsure(middle, 0.1, 0.05, 30, 0.5, 0.05, 0.09)
    bundle.write_config(folder, config.replace(confidence=Confidence(0.5, 100, 0.2, 0.1, unsure)))
    return folder


def test_calibrate_fits_a_temperature_where_there_are_labels(tiny_bundle: Path, tmp_path: Path) -> None:
    taken, model = shots(300, 0, noise=60.0), odevit_serve.load(tiny_bundle, threads=1)
    labels = np.array([answer.index for answer in model.predict(taken, adaptive=False)])
    images = Images([str(i) for i in range(300)], labels, model.labels, lambda i: Image.fromarray(taken[i]))
    report = calibrate(tiny_bundle, images, 0.05, 0.05, "travel", threads=1, output=tmp_path / "new", unsure=0.1)
    known = bundle.read_config(tmp_path / "new").confidence
    assert known == report.confidence
    assert known is not None
    assert known.temperature < 1  # it is right more often than it says
    assert known.error is not None
    assert known.error_before is not None
    assert known.error < known.error_before
    assert known.unsure is not None
    assert known.unsure.bound <= 0.1


def test_one_temperature_and_one_mark_everywhere(marked: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    known = bundle.read_config(marked).confidence
    assert known is not None
    assert known.unsure is not None
    pictures, model = shots(40, 5, noise=60.0), odevit_serve.load(marked, threads=1)
    wanted = model.predict(pictures)
    assert {answer.unsure for answer in wanted} == {True, False}
    raw = odevit_serve.load(tiny_bundle, threads=1).predict(pictures, threshold=model.config.exit.threshold)
    assert {answer.unsure for answer in raw} == {None}
    path = tmp_path / "model.onnx"
    job.export(str(marked), job.Settings(format="onnx-adaptive", output=str(path)))
    with Engine(model, slots=4) as engine:
        served = [future.result(30) for future in engine.submit_many(pictures)]
    assert [entry.to_dict()["unsure"] for entry in served] == [answer.unsure for answer in wanted]
    file = odevit_serve.load(path, threads=1).predict(pictures)
    for other in (file, [entry.prediction for entry in served]):
        for answer, own in zip(other, wanted, strict=True):
            assert np.allclose(answer.probabilities, own.probabilities, atol=1e-5)
            assert answer.unsure == own.unsure
    same = [(a, r) for a, r in zip(wanted, raw, strict=True) if a.steps == r.steps]
    assert len(same) > 20
    for answer, plain in same:
        assert np.allclose(softmax(np.log(plain.probabilities) / known.temperature), answer.probabilities, atol=1e-6)
        assert answer.unsure == (answer.probability < known.unsure.threshold)
    trace = model.predict(pictures[0], trace=True)
    assert isinstance(trace, Prediction)
    assert trace.trace[-1].probability == pytest.approx(trace.probability, abs=1e-6)
    text = card(model.config, "mine")
    assert "expected calibration error" in text
    assert "marked as unsure" in text


def test_an_export_of_other_steps_keeps_the_temperature_and_drops_the_proof(marked: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    job.export(str(marked), job.Settings(steps=6, output=str(path), max_drop=100.0))
    found = odevit_serve.load(path, threads=1).config.confidence
    assert found is not None
    assert found.unsure is None
    assert json.loads(bundle.read_config(marked).to_json())["confidence"]["temperature"] == found.temperature


def test_unsure_needs_labels(tiny_bundle: Path, tmp_path: Path) -> None:
    images = Images(["a"] * 200, None, (), lambda i: Image.new("RGB", (16, 16)))
    with pytest.raises(UserError, match="--unsure is a fraction, and needs labels"):
        calibrate(tiny_bundle, images, 0.05, 0.05, output=tmp_path / "new", unsure=0.1)
