"""A proof for what was exported, by running the file itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.config import Confidence, Unsure
from odevit_serve.data.datasets import Images
from odevit_serve.errors import UsageError, UserError
from odevit_serve.export import job
from odevit_serve.guarantee.bounds import binomial_tail
from odevit_serve.guarantee.confidence import fit_temperature
from odevit_serve.guarantee.of_file import BEFORE, Answers, Runner, calibrate_file, candidates, errors
from odevit_serve.guarantee.thresholds import measuring
from odevit_serve.runtime.graph_files import read, write_metadata
from odevit_serve.runtime.model import FileModel, load

EPSILON, DELTA = 0.05, 0.05


def arrays(images: Images, rows: Any) -> list[np.ndarray]:
    return [np.asarray(images.read(int(row))) for row in rows]


@given(st.floats(-1e6, 1e6))
def test_thresholds_lie_around_that_of_the_file_strictest_first(own: float) -> None:
    found = candidates(own)
    assert found == sorted(set(found), reverse=True)
    assert float(np.float32(own)) in found
    assert all(value == np.float32(value) for value in found)  # as the graph compares them
    size = abs(own) or 1.0
    assert found[0] == pytest.approx(own + 16 * size)
    assert found[-1] == pytest.approx(own - size)


def test_an_answer_is_an_error_where_it_differs_or_full_depth_has_none() -> None:
    def answers(*index: int) -> Answers:
        return Answers(np.array(index), np.ones(4), np.zeros(4), np.zeros((4, 2)))

    assert errors(answers(0, 1, -1, 2), answers(0, 2, -1, 2)) == 2
    assert errors(answers(0, -1, 1, 2), answers(0, 1, -1, 2)) == 2


def test_a_picture_that_cannot_be_read_keeps_its_place_and_has_no_answer(
    tiny_files: dict[str, Path], pictures: Images
) -> None:
    def read(i: int) -> Any:
        if i == 2:
            raise OSError("broken")
        return pictures.read(i)

    seen: list[None] = []
    rows = np.array([4, 2, 0])
    runner = Runner(FileModel(tiny_files["onnx"], threads=1), replace(pictures, read=read), lambda: seen.append(None))
    found = runner.run(rows, None)
    alone = load(tiny_files["onnx"], threads=1).predict(arrays(pictures, (4, 0)))
    assert found.index.tolist() == [alone[0].index, -1, alone[1].index]
    assert np.isnan(found.logits[1]).all()
    assert found.steps.tolist() == [8, 8, 8]
    assert len(seen) == 3
    chances = np.exp(found.logits[[0, 2]]) / np.exp(found.logits[[0, 2]]).sum(-1, keepdims=True)
    np.testing.assert_allclose(chances, [answer.probabilities for answer in alone], rtol=1e-5)


def with_confidence(path: Path, target: Path, known: Confidence) -> Path:
    graph = read(path)
    write_metadata(graph, load(path).config.replace(confidence=known))
    target.write_bytes(graph.SerializeToString())
    return target


def test_logits_are_those_before_the_temperature_of_the_file(
    tiny_files: dict[str, Path], pictures: Images, tmp_path: Path
) -> None:
    hot = with_confidence(tiny_files["onnx"], tmp_path / "hot.onnx", Confidence(3.0))
    plain, same = (
        Runner(FileModel(path, threads=1), pictures, lambda: None).run(np.arange(9), None).logits
        for path in (tiny_files["onnx"], hot)
    )
    np.testing.assert_allclose(plain - plain[:, :1], same - same[:, :1], atol=1e-4)


def test_what_is_reported_is_what_the_written_file_does(
    tiny_files: dict[str, Path], pictures: Images, tmp_path: Path
) -> None:
    """Counted again on the testing images; the label is what full depth says of three images in four."""
    path, some, out = tiny_files["onnx-adaptive"], pictures.subset(range(250)), tmp_path / "proven.onnx"
    bytes_before = path.read_bytes()
    full = load(path, threads=1).predict(arrays(some, range(250)), threshold=math.inf)
    labels = np.array([(answer.index + (i % 4 == 0)) % 5 for i, answer in enumerate(full)])
    some = replace(some, labels=labels)
    report = calibrate_file(path, some, EPSILON, DELTA, seed=3, threads=1, output=out, chosen_as="by hand")
    assert path.read_bytes() == bytes_before
    tested = np.random.default_rng(3).permutation(250)[measuring(250) :]
    early = load(out, threads=1).predict(arrays(some, tested))  # by the threshold that was written
    differs = [answer.index != full[row].index for answer, row in zip(early, tested)]
    row, proof = report.chosen, report.policy.calibration
    assert proof is not None
    assert (row.observed, row.mean_steps) == (np.mean(differs), np.mean([answer.steps for answer in early]))
    assert row.accuracy == np.mean([answer.index == labels[i] for answer, i in zip(early, tested)])
    assert report.full_accuracy == np.mean(tested % 4 != 0)
    assert row.mean_steps < 8
    assert row.time_saved == pytest.approx(1 - row.mean_steps / 8)
    assert (proof.images, proof.chosen, proof.bound) == (len(tested), "by hand", row.bound)
    ends = [answer.exit.short for answer in early]
    assert proof.exits == {name: pytest.approx(ends.count(name) / len(ends), abs=1e-4) for name in set(ends)}
    assert load(out).config.exit == report.policy
    known = report.confidence
    assert known is not None
    assert load(out).config.confidence == known
    fitted = np.random.default_rng(3).permutation(250)[: measuring(250)]
    chances = np.array([answer.probabilities for answer in load(out, threads=1).predict(arrays(some, fitted))])
    logits = np.log(chances) * known.temperature
    assert known.temperature == pytest.approx(fit_temperature(logits, labels[fitted]), rel=1e-3)
    assert known.images == measuring(250)


def test_thresholds_are_tested_in_order_until_one_fails(
    tiny_files: dict[str, Path], pictures: Images, tmp_path: Path
) -> None:
    out = tmp_path / "proven.onnx"
    report = calibrate_file(
        tiny_files["onnx-adaptive"], pictures.subset(range(250)), EPSILON, DELTA, threads=1, output=out
    )
    thresholds = [row.threshold for row in report.rows]
    assert thresholds == sorted(thresholds, reverse=True)
    proof = report.policy.calibration
    assert proof is not None
    passed = [binomial_tail(round(row.observed * proof.images), proof.images, EPSILON) <= DELTA for row in report.rows]
    assert passed.index(False) == len(passed) - 1  # it ends with the first that fails
    assert report.chosen == report.rows[-2]
    values = candidates(load(tiny_files["onnx-adaptive"]).config.exit.threshold)
    right = [value for value, rival in zip(values, report.rivals) if rival.observed <= EPSILON]
    assert thresholds[0] == values[max(0, len(right) - 1 - BEFORE)]  # a little before the last that looked right


def test_few_errors_among_few_images_are_no_proof(
    tiny_files: dict[str, Path], pictures: Images, tmp_path: Path
) -> None:
    """At an epsilon just above what a threshold errs on, it looks right, and its bound says that it is not proven."""
    path, some, out = tiny_files["onnx-adaptive"], pictures.subset(range(250)), tmp_path / "proven.onnx"
    failed = calibrate_file(path, some, EPSILON, DELTA, threads=1, output=out).rows[-1]
    looser = failed.observed + 0.005
    again = calibrate_file(path, some, looser, DELTA, threads=1, output=out)
    assert again.rows[-1] == failed
    assert again.chosen.threshold > failed.threshold
    assert again.chosen.bound <= looser < failed.bound


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


def test_a_mark_for_unsure_answers_does_not_outlive_the_threshold_it_was_proven_for(
    tiny_files: dict[str, Path], pictures: Images, tmp_path: Path
) -> None:
    """Without labels the temperature stays, and nothing proves the mark anew."""
    marked = Confidence(2.0, 100, 0.2, 0.1, Unsure(0.4, 0.1, 0.05, 90))
    path = with_confidence(tiny_files["onnx-adaptive"], tmp_path / "marked.onnx", marked)
    report = calibrate_file(path, replace(pictures.subset(range(250)), labels=None), EPSILON, DELTA, threads=1)
    assert report.confidence is None
    assert load(path).config.confidence == replace(marked, unsure=None)


def test_without_a_proof_nothing_is_written(tiny_files: dict[str, Path], pictures: Images, tmp_path: Path) -> None:
    """Pictures that cannot be read are errors at every threshold."""

    def read(i: int) -> Any:
        if i % 10 == 0:
            raise OSError("broken")
        return pictures.read(i)

    path = tmp_path / "own.onnx"
    path.write_bytes(tiny_files["onnx-adaptive"].read_bytes())
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"no threshold could be proven to err on at most 0\.05 .* nothing was"):
        calibrate_file(path, replace(pictures, read=read).subset(range(250)), EPSILON, DELTA, threads=1)
    for alpha, labels in ((0.1, None), (1.5, pictures.labels)):
        some = replace(pictures, labels=labels).subset(range(250))
        with pytest.raises(UserError, match="--unsure is a fraction, and needs labels"):
            calibrate_file(path, some, EPSILON, DELTA, threads=1, unsure=alpha)
    with pytest.raises(UserError, match="needs at least 374 images, and there are 250"):
        calibrate_file(path, pictures.subset(range(250)), 0.01, DELTA, threads=1)
    assert path.read_bytes() == before
