"""The audit of a server: it disturbs nobody, loses nothing, notices a camera that changes, does what it was told."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from camera import shots
from PIL import Image
from servers import SlowSlots, nothing_left, running, until

import odevit_serve
from odevit_serve import bundle
from odevit_serve.data.datasets import Images
from odevit_serve.errors import UsageError
from odevit_serve.export import job
from odevit_serve.guarantee import audit_file
from odevit_serve.guarantee.calibrate import calibrate
from odevit_serve.guarantee.from_audit import calibrate_from_audit
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving import audit
from odevit_serve.serving.audit import AuditOptions
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.http.middleware import Options

CLEAN, NOISE = 300, 200.0
SOON = 400  # audited images within which the change below must be noticed


@pytest.fixture(scope="module")
def proven(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated on what the camera sees: at most 3% differ."""
    folder, taken = tmp_path_factory.mktemp("proven"), shots(600, 0)
    images = Images([str(i) for i in range(600)], None, (), lambda i: Image.fromarray(taken[i]), in_memory=True)
    calibrate(tiny_bundle, images, 0.03, 0.05, "travel", threads=1, output=folder)
    return folder


@pytest.fixture
def make(proven: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(slots: int = 8, pause: float = 0.0, source: Path | None = None, **asked: Any) -> Engine:
        model = odevit_serve.load(source or proven, threads=1)
        core = SlowSlots(model.graphs, slots, pause=pause) if isinstance(model, BundleModel) else None
        engines.append(Engine(model, slots=slots, core=core, audit=AuditOptions(**{"rate": 1.0, "seed": 0} | asked)))
        return engines[-1].start()

    yield build
    for engine in engines:
        engine.close(5)


def ask(engine: Engine, pictures: list[np.ndarray], **asked: Any) -> list[Any]:
    found = []
    for start in range(0, len(pictures), 40):  # fewer than the line has places
        futures = engine.submit_many(pictures[start : start + 40], **asked)
        found += [future.result(30).prediction for future in futures]
        until(lambda: not watched(engine).pending)
    return found


def watched(engine: Engine) -> audit.Audit:
    assert engine.audit is not None
    return engine.audit


def accounted(engine: Engine) -> None:
    """Every image drawn was audited or is counted as dropped."""
    nothing_left(engine)
    own = watched(engine)
    assert own.drawn == own.audited + sum(own.dropped.values())


def test_a_camera_that_changes(make: Callable[..., Engine]) -> None:
    """Over HTTP: quiet while pictures are as in calibration; noise on the sensor raises an alarm; one can clear it."""
    engine = make()
    with running(engine) as address, httpx.Client(base_url=address, timeout=30) as client:

        def look(noise: float, seed: int, count: int = 50) -> list[dict[str, Any]]:
            files = [("file", (f"{i}.png", _png(shot))) for i, shot in enumerate(shots(count, seed, noise=noise))]
            found: list[dict[str, Any]] = client.post("/v1/predict", files=files).json()["predictions"]
            until(lambda: not watched(engine).pending)
            return found

        def state() -> dict[str, Any]:
            return client.get("/v1/model").json()["audit"]  # type: ignore[no-any-return]

        for seed in range(CLEAN // 50):
            assert all(answer["guaranteed"] and "trace" not in answer for answer in look(0.0, seed))
        quiet = state()
        assert quiet["state"] == "holds"
        assert quiet["tested"]["images"] == quiet["audited"] == CLEAN
        assert quiet["disagreement"]["low"] < 0.03
        assert "not rejected so far at level" in quiet["sentence"]
        assert 'odevit_audit_rejected{model="random"} 0.0' in client.get("/metrics").text
        for seed in range(SOON // 50):
            look(NOISE, seed)
            if state()["state"] == "rejected":
                break
        alarmed = state()
        assert alarmed["state"] == "rejected"
        assert alarmed["evidence"] > 0
        assert alarmed["violations"] == 1
        assert "rejected at level 0.05 after" in alarmed["sentence"]
        assert not any(answer["guaranteed"] for answer in look(NOISE, 99))
        text = client.get("/metrics").text
        assert 'odevit_audit_rejected{model="random"} 1.0' in text
        assert f'odevit_audit_images_total{{model="random"}} {float(alarmed["audited"] + 50)}' in text
        assert 'odevit_audit_coverage{model="random"} 1.0' in text
        cleared = client.post("/v1/audit/clear").json()
        assert (cleared["state"], cleared["tested"]["images"]) == ("holds", 0)
        assert all(answer["guaranteed"] for answer in look(0.0, 100))
    accounted(engine)


def test_a_camera_whose_focus_changes(make: Callable[..., Engine], tmp_path: Path) -> None:
    """A trained model: quiet while pictures are blurred as in calibration, an alarm within 400 audited ones after."""
    taken = shots(600, 0, blur=4.0, side=32)
    images = Images([str(i) for i in range(600)], None, (), lambda i: Image.fromarray(taken[i]), in_memory=True)
    calibrate(bundle.find("cifar10"), images, 0.03, 0.05, "auto", threads=1, output=tmp_path / "camera")
    engine = make(source=tmp_path / "camera")
    assert all(answer.guaranteed for answer in ask(engine, shots(CLEAN, 1, blur=4.0, side=32)))
    assert watched(engine).describe()["state"] == "holds"
    for seed in range(2, 2 + SOON // 50):
        ask(engine, shots(50, seed, blur=1.0, side=32))
        if watched(engine).describe()["state"] == "rejected":
            break
    found = watched(engine).describe()
    assert found["state"] == "rejected"
    assert found["audited"] <= CLEAN + SOON
    accounted(engine)


def _png(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def test_an_audit_changes_no_answer_and_finds_what_full_depth_says(make: Callable[..., Engine], proven: Path) -> None:
    engine, model, pictures = make(slots=5), odevit_serve.load(proven, threads=1), shots(120, 7, noise=60.0)
    early, full = model.predict(pictures), model.predict(pictures, adaptive=False)
    answers = ask(engine, pictures)
    assert [(a.label, a.steps, a.exit, a.trace) for a in answers] == [(e.label, e.steps, e.exit, ()) for e in early]
    own = watched(engine)
    assert (own.audited, own.drawn) == (120, 120)
    assert own.differences == sum(a.index != b.index for a, b in zip(early, full)) > 0
    assert len(ask(engine, pictures[:1], trace=True)[0].trace) == early[0].steps
    accounted(engine)


def test_only_answers_with_the_guarantee_are_drawn(make: Callable[..., Engine]) -> None:
    engine, pictures = make(), shots(10, 3)
    for other in ({"deadline_ms": 10_000}, {"max_steps": 3}, {"threshold": 0.5}, {"adaptive": False}):
        assert not any(answer.guaranteed for answer in ask(engine, pictures, **other)) or other == {"adaptive": False}
    assert watched(engine).drawn == 0
    some = make(rate=0.3)
    ask(some, shots(100, 3))
    assert 15 <= watched(some).drawn <= 45


def test_continued_images_give_way_and_the_line_is_bounded(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "PLACES", 6)
    engine, pictures = make(slots=2), shots(60, 4)
    core, own = engine.core, watched(engine)
    assert isinstance(core, SlowSlots)
    ask(engine, pictures[:1])
    until(lambda: own.audited == 1)
    core.gate.clear()
    futures = engine.submit_many(pictures)
    core.gate.set()
    for future in futures:
        future.result(30)
        assert own.pending <= 6
    until(lambda: not own.pending)
    assert own.dropped["line full"] > 0
    assert 0 < own.coverage < 1
    accounted(engine)
    core.gate.clear()  # one is being continued in each slot that may be; then two come who need both
    engine.submit(pictures[0])
    core.gate.set()
    until(lambda: bool(own._running) or not own.waiting)
    ask(engine, pictures[:4])
    accounted(engine)


def test_make_room_frees_the_slots_of_continued_images_only(make: Callable[..., Engine]) -> None:
    engine = make(slots=8)
    own, core = watched(engine), engine.core
    assert isinstance(core, SlowSlots)
    core.pause = 0.05
    answered = engine.submit_many(shots(2, 5))
    for future in answered:
        future.result(30)
    until(lambda: len(own._running) > 0)
    futures = engine.submit_many(shots(8, 6))
    assert all(future.result(30).prediction.guaranteed for future in futures)
    core.pause = 0.0
    until(lambda: not own.pending)
    accounted(engine)
    assert own.audited == 10


def test_full_depth_until_cleared(make: Callable[..., Engine]) -> None:
    engine = make(on_violation="full")
    for seed in range(SOON // 100):
        ask(engine, shots(100, seed, noise=NOISE))
    own = watched(engine)
    assert own.state == "rejected"
    before = own.drawn
    answers = ask(engine, shots(20, 50))
    assert all(a.steps == a.full_steps and not a.guaranteed for a in answers)
    assert own.drawn == before
    own.clear()
    assert any(a.steps < a.full_steps and a.guaranteed for a in ask(engine, shots(20, 50)))
    accounted(engine)


def test_tighten_finds_a_threshold_for_the_traffic_as_it_is(make: Callable[..., Engine], tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    engine = make(on_violation="tighten", file=str(file))
    own = watched(engine)
    seen: list[str] = []
    for seed in range(12):
        before = own.recovering
        answers = ask(engine, shots(100, seed, noise=NOISE))
        if before:
            assert answers[0].steps == 8
            assert not answers[0].guaranteed
        if own.state != (seen[-1] if seen else ""):
            seen.append(own.state)
        if own.state == "tightened":
            break
    assert seen[-1] == "tightened"
    assert own.violations == 1
    assert own.own.threshold <= own.depth.threshold < np.inf
    assert "is proven by" in own.sentence
    pictures = shots(900, 77, noise=NOISE)  # so many that what holds can also be proven, in whatever order they come
    answers, full = ask(engine, pictures), odevit_serve.load(engine.model.path, threads=1)
    whole = full.predict(pictures, adaptive=False)
    assert all(answer.guaranteed for answer in answers) or own.violations > 1
    assert np.mean([a.index != b.index for a, b in zip(answers, whole)]) <= 0.03
    assert any(answer.steps < answer.full_steps for answer in answers)
    accounted(engine)
    engine.close()
    report = calibrate_from_audit(engine.model.path, file, 0.03, 0.05, threads=1, output=tmp_path / "new")
    again = odevit_serve.load(tmp_path / "new", threads=1)
    assert again.guarantee is not None
    assert "audited" in again.guarantee.chosen
    assert again.guarantee.images == report.policy.calibration.images > 200  # type: ignore[union-attr]
    later = shots(200, 78, noise=NOISE)
    changed = [a.index != b.index for a, b in zip(again.predict(later), again.predict(later, adaptive=False))]
    assert np.mean(changed) <= 0.05
    assert again.predict(later[0]).guaranteed


def test_an_adaptive_file_is_run_again(make: Callable[..., Engine], proven: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    job.export(str(proven), job.Settings(format="onnx-adaptive", output=str(path)))
    pictures, model = shots(60, 8, noise=60.0), odevit_serve.load(proven, threads=1)
    early, full = model.predict(pictures), model.predict(pictures, adaptive=False)
    engine = make(source=path, file=str(tmp_path / "audit.jsonl"))
    assert [a.index for a in ask(engine, pictures)] == [a.index for a in early]
    assert watched(engine).audited == 60
    assert watched(engine).differences == sum(a.index != b.index for a, b in zip(early, full))
    accounted(engine)
    with pytest.raises(UsageError, match="tighten needs the scores of every step"):
        make(source=path, on_violation="tighten")


def test_what_cannot_be_audited_is_refused(make: Callable[..., Engine], tiny_bundle: Path, tiny_files: dict) -> None:
    for source in (tiny_bundle, tiny_files["onnx"]):
        with pytest.raises(UsageError, match="has no guarantee of early exits"):
            make(source=source)
    for wrong in ({"rate": 0.0}, {"rate": 1.5}, {"on_violation": "panic"}):
        with pytest.raises(UsageError):
            AuditOptions(**{"rate": 0.5} | wrong)  # type: ignore[arg-type]


def test_clearing_needs_the_key(make: Callable[..., Engine]) -> None:
    with running(make(), Options(api_key="secret")) as address, httpx.Client(base_url=address) as client:
        assert client.post("/v1/audit/clear").status_code == 401
        assert client.post("/v1/audit/clear", headers={"X-API-Key": "secret"}).status_code == 200


def test_the_file_is_bounded_and_keeps_to_one_model(tmp_path: Path) -> None:
    path, head = tmp_path / "audit.jsonl", {"odevit_audit": 1, "model": "a", "rule": "travel"}
    writer = audit_file.AuditWriter(path, head, records=10)
    for index in range(25):
        writer.write(audit_file.Audited(1, index, 3, True, (0.5, float("nan")), (index, 3), (0.0, 0.1)))
    writer.close()
    assert sum(1 for _ in path.open()) == 6
    assert sum(1 for _ in audit_file.rotated(path).open()) == 11
    found = audit_file.read(path, {**head, "model": "renamed"})
    assert found.answers[:, 0].tolist() == list(range(10, 25))
    assert found.scores[0].tolist() == [0.5, -np.inf]
    assert audit_file.read(path, head, limit=4).answers[:, 0].tolist() == [21, 22, 23, 24]
    assert not {"pixels", "logits"} & set(json.loads(path.read_text().splitlines()[1]))
    with pytest.raises(UsageError.__mro__[1], match="its 15 images were answered by another model"):
        audit_file.read(path, {**head, "rule": "drift"})
    path.write_text("hello\n")
    with pytest.raises(UsageError.__mro__[1], match="is not an audit recording"):
        audit_file.read(path, head)
