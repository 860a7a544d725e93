"""`load` and `predict`: every form of input, order, bad ones among good ones, bundles and single files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import odevit_serve
from odevit_serve import Failure, Prediction, load
from odevit_serve.errors import UsageError, UserError
from odevit_serve.export.job import Settings, export
from odevit_serve.runtime import exits
from odevit_serve.runtime.exits import ExitReason
from odevit_serve.runtime.model import CAPACITY, BundleModel, FileModel, Reader

ARRAYS = [np.random.default_rng(i).integers(0, 256, (20 + i, 30, 3), dtype=np.uint8) for i in range(40)]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> BundleModel:
    loaded = load(tiny_bundle)
    assert isinstance(loaded, BundleModel)
    return loaded


@pytest.fixture
def files(tiny_files: dict[str, Path]) -> dict[str, Path]:
    return tiny_files


def test_every_form_gives_the_same_answer(model: BundleModel, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(ARRAYS[0]).save(path)
    data = path.read_bytes()
    forms = [path, str(path), data, bytearray(data), io.BytesIO(data), Image.open(path), ARRAYS[0], ARRAYS[0] / 255]
    answers = [model.predict(form) for form in forms]
    assert all(isinstance(answer, Prediction) for answer in answers)
    assert len({(a.label, a.steps, a.exit, round(a.probability, 5)) for a in answers}) == 1
    many = model.predict(forms[:2] + forms[6:])
    assert [m.steps for m in many] == [answers[0].steps] * 4
    assert len(model.predict(np.stack([ARRAYS[0]] * 3))) == 3
    assert model.predict([]) == []


def test_prediction(model: BundleModel) -> None:
    answer = model.predict(ARRAYS[1], trace=True, attention=True)
    assert answer.label == model.labels[answer.index] == answer.top(1)[0][0]
    assert answer.probabilities.sum() == pytest.approx(1)
    values = [value for _, value in answer.top(99)]
    assert values == sorted(values, reverse=True)
    assert len(values) == 5
    assert 1 <= answer.steps <= answer.full_steps == 8
    assert answer.exit is ExitReason.EARLY
    assert answer.margin > 0
    assert answer.compute_seconds > 0
    assert [s.step for s in answer.trace] == list(range(1, answer.steps + 1))
    assert answer.trace[-1].probability == pytest.approx(answer.probability, abs=1e-5)
    assert answer.attention.heads.shape == (3, 4, 4)
    plain = answer.to_dict(2)
    assert plain["exit"] == "stopped early"
    assert len(plain["top"]) == 2
    import json

    json.dumps(plain, allow_nan=False)


def test_many_come_back_in_order(model: BundleModel) -> None:
    alone = [model.predict(array) for array in ARRAYS]
    together = model.predict(ARRAYS)
    assert [(a.index, a.steps) for a in together] == [(a.index, a.steps) for a in alone]
    assert len({a.steps for a in alone}) > 2


def test_bad_among_good(model: BundleModel, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    sources = [ARRAYS[0], tmp_path / "bad.jpg", tmp_path / "none.png", ARRAYS[1], np.full((4, 4, 3), np.nan), tmp_path]
    got = model.predict(sources, errors="return")
    assert [isinstance(r, Failure) for r in got] == [False, True, True, False, True, True]
    assert "not a picture" in got[1].message
    assert got[3].steps == model.predict(ARRAYS[1]).steps
    with pytest.raises(UserError, match=r"bad\.jpg is not a picture"):
        model.predict(sources)
    with pytest.raises(UserError, match="does not exist"):
        model.predict(tmp_path / "none.png")


def test_settings(model: BundleModel) -> None:
    full = model.predict(ARRAYS[2], adaptive=False)
    assert (full.steps, full.exit, full.guaranteed) == (8, ExitReason.HORIZON, True)
    short = model.predict(ARRAYS[2], max_steps=2, adaptive=False)
    assert (short.steps, short.full_steps, short.exit) == (2, 8, ExitReason.BUDGET)
    fine = model.predict(ARRAYS[2], steps=32, adaptive=False)
    assert (fine.steps, fine.full_steps) == (32, 32)
    assert np.abs(fine.probabilities - full.probabilities).max() < 0.1
    assert model.predict(ARRAYS[2], threshold=0).steps == 1
    assert model.predict(ARRAYS[2], threshold=1e9).steps == 8
    settled = model.predict(ARRAYS[2], rule="confidence", threshold=0.2)
    assert settled.exit is ExitReason.EARLY
    assert settled.sentence == "stopped early: the score of the rule 'confidence' reached its threshold"
    late = model.predict(ARRAYS[2], deadline_ms=1e-6, adaptive=False)
    assert (late.steps, late.exit) == (1, ExitReason.DEADLINE)
    with pytest.raises(UsageError, match="threshold must be a number"):
        model.predict(ARRAYS[2], threshold=float("nan"))
    with pytest.raises(UsageError, match="errors must be"):
        model.predict(ARRAYS[2], errors="ignore")


def test_a_registered_rule_reaches_predict(model: BundleModel) -> None:
    @odevit_serve.rule("third step")
    def third(readings: odevit_serve.Readings) -> np.ndarray:
        return readings.step.astype(float)

    try:
        assert model.predict(ARRAYS[0], rule="third step", threshold=3).steps == 3
    finally:
        del exits.RULES["third step"]


def test_attention_at_any_step_equals_torch(model: BundleModel, tiny_bundle: Path) -> None:
    import torch

    from odevit_serve.train.model import ODEViT

    reference = ODEViT.from_pretrained(tiny_bundle)
    with torch.no_grad():
        x = reference.stem(torch.from_numpy(model.prepare(ARRAYS[3])[None]))
        states = [x, *(point.state for point in reference.trajectory(x))]
        expected = [reference.cls_attention(state)[0].reshape(3, 4, 4).numpy() for state in states]
    for step in (0, 1, 5, 8):
        got = model.attention(ARRAYS[3], step=step)
        assert got.step == step
        assert np.abs(got.heads - expected[step]).max() < 1e-5
        assert np.allclose(got.mean, got.heads.mean(0))
    assert [a.step for a in model.attention_steps(ARRAYS[3])] == list(range(9))
    last = model.attention(ARRAYS[3])
    assert last.step == model.predict(ARRAYS[3]).steps
    assert np.abs(last.heads - expected[last.step]).max() < 1e-5
    with pytest.raises(UsageError, match="between 0 and 8, not 9"):
        model.attention(ARRAYS[3], step=9)
    with pytest.raises(UserError, match="does not exist"):
        model.attention("none.png")


def test_streams_hold_only_what_is_on_its_way(model: BundleModel) -> None:
    """A generator of 2,000 images is never read further ahead than a fixed number."""
    drawn, most, given = 0, 0, 0

    def source() -> Iterator[np.ndarray]:
        nonlocal drawn
        for i in range(2000):
            drawn += 1
            yield ARRAYS[i % len(ARRAYS)]

    for result in model.stream(source()):
        assert isinstance(result, Prediction)
        given += 1
        most = max(most, drawn - given)
    assert given == 2000
    assert most <= Reader.AHEAD + 9 * CAPACITY


def test_streams_may_interleave(model: BundleModel) -> None:
    first, second = model.stream(ARRAYS), model.stream(ARRAYS[::-1])
    pairs = list(zip(first, second))
    assert [a.steps for a, _ in pairs] == [b.steps for _, b in pairs][::-1]
    left = model.stream(ARRAYS)
    next(left)
    left.close()
    assert len(model.predict(ARRAYS[:3])) == 3


def test_infinite_answers_are_failures(model: BundleModel) -> None:
    from odevit_serve.runtime.slots import Job, Outcome

    logits = np.array([np.nan] * 5, np.float32)
    outcome = Outcome(Job(0, model.depth()), 3, ExitReason.HORIZON, logits, 1.0, 0.0, 0.0, 0.0)
    failed = model.slots(1).finish(outcome, "x.png")
    assert failed == Failure("x.png", "x.png: the trajectory produced NaN or infinity after 3 steps")


def test_single_files_agree_with_the_bundle(model: BundleModel, files: dict[str, Path]) -> None:
    for kind, settings in (("onnx", {"adaptive": False}), ("onnx-adaptive", {})):
        single = load(files[kind])
        assert isinstance(single, FileModel)
        assert single.labels == model.labels
        for own, other in zip(single.predict(ARRAYS), model.predict(ARRAYS, **settings)):
            assert (own.index, own.steps, own.exit) == (other.index, other.steps, other.exit)
            assert np.abs(own.probabilities - other.probabilities).max() < 1e-4
            assert own.margin is None


def test_single_file_settings(model: BundleModel, files: dict[str, Path]) -> None:
    adaptive, fixed = load(files["onnx-adaptive"]), load(files["onnx"])
    for settings in ({"threshold": 0.3}, {"max_steps": 3}, {"threshold": 0.05, "max_steps": 5}):
        own, other = adaptive.predict(ARRAYS, **settings), model.predict(ARRAYS, **settings)
        assert [(a.steps, a.exit) for a in own] == [(b.steps, b.exit) for b in other]
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (fixed, {"max_steps": 3}, "fixed depth of 8 steps"),
        (fixed, {"steps": 9}, "takes 8 steps"),
        (fixed, {"trace": True}, "needs the bundle"),
        (adaptive, {"rule": "confidence", "threshold": 1}, "built in"),
        (adaptive, {"adaptive": False}, "exits inside the graph"),
        (adaptive, {"attention": True}, "without attention maps"),
    ]
    for which, settings, words in bad:
        with pytest.raises(UsageError, match=words):
            which.predict(ARRAYS[0], **settings)
    assert np.abs(fixed.attention(ARRAYS[0]).heads - model.attention(ARRAYS[0], step=8).heads).max() < 1e-5
    with pytest.raises(UsageError, match="after step 8 only"):
        fixed.attention(ARRAYS[0], step=2)
    got = fixed.predict([ARRAYS[0], b"", ARRAYS[1]], errors="return")
    assert [isinstance(r, Failure) for r in got] == [False, True, False]


def test_load_refuses(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one part of a bundle"):
        load(tiny_bundle / "step.onnx")
    with pytest.raises(UserError, match="no model 'nowhere'"):
        load("nowhere")
    with pytest.raises(UserError, match=r"has no config\.json"):
        load(tmp_path)


def test_lazy_names() -> None:
    import subprocess
    import sys

    heavy = ("torch", "onnxruntime", "numpy", "PIL")
    code = f"import sys, odevit_serve.cli; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "load" in odevit_serve.__all__
    with pytest.raises(AttributeError):
        _ = odevit_serve.nothing


def test_metadata_that_is_no_text_is_one_sentence(tiny_bundle: Path, tmp_path: Path) -> None:
    made = tmp_path / "file.onnx"
    export(str(tiny_bundle), Settings(steps=2, output=str(made)))
    whole = made.read_bytes()
    at = whole.index(b'"horizon"')
    made.write_bytes(whole[:at] + b'"\x80orizon"' + whole[at + 9 :])
    with pytest.raises(UserError, match="is damaged: its metadata is not text"):
        odevit_serve.load(made)
