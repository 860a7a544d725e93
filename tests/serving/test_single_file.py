"""A single exported file behind the engine: depth, deadlines, overload and limits mean what they mean for a bundle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import until

import odevit_serve
from odevit_serve.errors import UsageError
from odevit_serve.runtime.exits import ExitReason
from odevit_serve.runtime.file_batch import FileBatch
from odevit_serve.runtime.model import FileModel
from odevit_serve.serving.engine import DeadlineExceeded, Engine, Limits

PICTURES = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)


class SlowBatch(FileBatch):
    """A real file whose runs take a while, and can be held up."""

    pause = 0.0

    def __init__(self, model: FileModel, capacity: int):
        super().__init__(model.path.name, model.config, model.session, capacity)
        self.gate = threading.Event()
        self.gate.set()
        self.runs: list[tuple[int, dict[str, float]]] = []

    def _run(self, pixels: np.ndarray, feeds: dict[str, float], jobs: Any) -> dict[str, np.ndarray]:
        self.gate.wait(20)
        time.sleep(self.pause)
        self.runs.append((len(pixels), feeds))
        return super()._run(pixels, feeds, jobs)


@pytest.fixture
def make(tiny_files: dict[str, Path]) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(kind: str, slots: int = 4, **options: Any) -> Engine:
        model = odevit_serve.load(tiny_files[kind], threads=1)
        engine = Engine(model, core=SlowBatch(model, slots), **options)  # type: ignore[arg-type]
        engines.append(engine)
        return engine.start()

    yield build
    for engine in engines:
        engine.core.gate.set()  # type: ignore[attr-defined]
        engine.close(5)


def test_threshold_and_max_steps_are_passed_to_an_adaptive_file(make: Callable[..., Engine], tiny_bundle: Path) -> None:
    engine, bundle = make("onnx-adaptive"), odevit_serve.load(tiny_bundle, threads=1)
    asked: list[dict[str, Any]] = [{}, {"max_steps": 3}, {"threshold": 0.3}, {"threshold": 0.05, "max_steps": 5}]
    futures = [(one, i, engine.submit(PICTURES[i], **one)) for i in range(12) for one in asked]
    seen = set()
    for one, i, future in futures:
        own, other = future.result(20).prediction, bundle.predict(PICTURES[i], **one)
        assert (own.label, own.steps, own.exit) == (other.label, other.steps, other.exit)
        assert own.guaranteed == other.guaranteed
        seen.add(own.steps)
    assert len(seen) >= 3
    assert any(rows > 1 for rows, _ in engine.core.runs)  # type: ignore[attr-defined]  (those who ask alike share a run)


def test_an_images_answer_does_not_depend_on_who_asks_for_something_else(make: Callable[..., Engine]) -> None:
    engine = make("onnx-adaptive", slots=8)
    engine.core.gate.clear()  # type: ignore[attr-defined]
    futures = [engine.submit(PICTURES[i], max_steps=1 + i % 3) for i in range(8)]
    engine.core.gate.set()  # type: ignore[attr-defined]
    assert all(future.result(20).prediction.steps <= 1 + i % 3 for i, future in enumerate(futures))


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        ("onnx", {"max_steps": 3}, "fixed depth of 8 steps, so max_steps cannot be 3"),
        ("onnx", {"threshold": 1.0}, "so threshold cannot be set"),
        ("onnx", {"trace": True}, "needs the bundle"),
        ("onnx-adaptive", {"adaptive": False}, "exits inside the graph"),
        ("onnx-adaptive", {"rule": "confidence", "threshold": 0.5}, "built in, not 'confidence'"),
        ("onnx-adaptive", {"attention": True}, "without attention maps"),
        ("onnx-adaptive", {"steps": 16}, "takes 8 steps"),
    ],
)
def test_what_the_graph_cannot_do_is_refused(
    make: Callable[..., Engine], kind: str, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make(kind).submit(PICTURES[0], **asked)


def test_maps_of_a_file_that_has_them(make: Callable[..., Engine]) -> None:
    (attention,) = make("onnx").submit(PICTURES[0], attention=True).result(20).attention
    assert attention.heads.shape == (3, 4, 4)


@pytest.mark.parametrize("kind", ["onnx", "onnx-adaptive"])
def test_a_deadline_holds_inside_the_graph(make: Callable[..., Engine], kind: str) -> None:
    engine = make(kind)
    engine.core.gate.clear()  # type: ignore[attr-defined]
    future = engine.submit(PICTURES[0], deadline_ms=1500)
    until(lambda: engine.active)
    with pytest.raises(DeadlineExceeded, match="1500 ms passed before the answer"):
        future.result(15)  # the graph is still held up: it waits 20 s
    engine.core.gate.set()  # type: ignore[attr-defined]
    assert engine.submit(PICTURES[1], deadline_ms=20_000).result(20).prediction.label
    assert engine.stats.failed == {"deadline": 1}


def test_overload_lowers_the_depth_of_an_adaptive_file(make: Callable[..., Engine]) -> None:
    engine = make("onnx-adaptive", slots=2, queue=20, overload="depth")
    engine.core.gate.clear()  # type: ignore[attr-defined]
    futures = [engine.submit(PICTURES[i], threshold=1e6) for i in range(20)]
    engine.core.gate.set()  # type: ignore[attr-defined]
    lowered = [a for a in (future.result(20) for future in futures) if a.lowered_to is not None]
    assert lowered
    for answer in lowered:
        assert answer.prediction.steps == answer.lowered_to < 8
        assert answer.prediction.exit is ExitReason.BUDGET
        assert not answer.prediction.guaranteed


def test_a_fixed_depth_cannot_be_lowered_and_says_so(make: Callable[..., Engine]) -> None:
    with pytest.raises(UsageError, match="fixed depth of 8 steps"):
        make("onnx", overload="depth")


def test_the_operators_limit_on_steps(make: Callable[..., Engine]) -> None:
    engine = make("onnx-adaptive", limits=Limits(max_steps=3))
    answers = [engine.submit(picture, threshold=1e6).result(20).prediction for picture in PICTURES[:4]]
    assert [a.steps for a in answers] == [3, 3, 3, 3]
    with pytest.raises(UsageError, match="at most 3"):
        engine.submit(PICTURES[0], max_steps=4)
    with pytest.raises(UsageError, match="max_steps cannot be 3"):
        make("onnx", limits=Limits(max_steps=3))
    assert make("onnx", limits=Limits(max_steps=8)).submit(PICTURES[0]).result(20).prediction.steps == 8
