"""One name of a server: one engine follows another, and nobody who asks can tell when."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import SlowSlots, png, until

import odevit_serve
from odevit_serve import bundle
from odevit_serve.errors import UserError
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.requests import Unavailable
from odevit_serve.serving.served import NoModel, Served, signature

PICTURE = png(1)


def load(source: str) -> Engine:
    return Engine(odevit_serve.load(source, threads=1), slots=2)


@pytest.fixture
def folder(tiny_bundle: Path, tiny_bundles: Callable[..., Path], tmp_path: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "first")
    shutil.copytree(tiny_bundles(seed=1), tmp_path / "second")
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    source = str(folder / "first")
    own = Served("it", source, load, load(source).start())
    yield own
    own.close(5)


def probability(served: Served) -> float:
    return served.submit(lambda engine: engine.submit(PICTURE)).result(20).prediction.probability


def of(folder: Path) -> float:
    return odevit_serve.load(folder, threads=1).predict(PICTURE).probability


def test_another_model_takes_over_and_counts_are_kept(served: Served, folder: Path) -> None:
    assert probability(served) == pytest.approx(of(folder / "first"), rel=1e-4)
    old = served.engine
    served.replace(str(folder / "second"))
    assert probability(served) == pytest.approx(of(folder / "second"), rel=1e-4)
    assert (served.replaced, served.source, served.reason) == (1, str(folder / "second"), "")
    assert old is not None
    until(lambda: old.state == "closed")
    assert served.stats().answered == 2
    served.replace()
    assert probability(served) == pytest.approx(of(folder / "second"), rel=1e-4)
    assert served.stats().answered == 3


def test_what_cannot_be_loaded_leaves_what_is_there(served: Served, folder: Path) -> None:
    old = served.engine
    (folder / "second" / bundle.STEP).unlink()
    with pytest.raises(UserError, match=r"second has no step\.onnx") as told:
        served.replace(str(folder / "second"))
    assert served.reason == str(told.value)
    assert (served.engine, served.source, served.replaced) == (old, str(folder / "first"), 0)
    assert probability(served)
    served.replace()
    assert served.reason == ""


def test_a_fault_of_the_loader_is_told_and_leaves_what_is_there(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def falls(source: str) -> Engine:
        raise MemoryError("no room")

    monkeypatch.setattr(served, "_load", falls)
    with pytest.raises(UserError, match="MemoryError: no room"):
        served.replace()
    assert probability(served)


def test_files_that_change_while_they_are_read_are_not_served(
    served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them may be of the new model: whoever copies them there asks again when he has done."""
    made: list[Engine] = []

    def slow(source: str) -> Engine:
        made.append(load(source))
        (folder / "first" / "more.txt").write_text("still copying")
        return made[-1]

    old = served.engine
    monkeypatch.setattr(served, "_load", slow)
    with pytest.raises(UserError, match="changed while it was loaded"):
        served.replace()
    assert served.engine is old
    until(lambda: made[0].state == "closed")


def test_a_replaced_model_is_gone_without_the_garbage_collector(folder: Path) -> None:
    """It comes by when many objects were made: until then, every replacement would leave a model in memory."""
    source = str(folder / "first")
    served = Served("it", source, load, load(source).start())
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert probability(served)
            engine = served.current()
            held = [weakref.ref(engine), weakref.ref(engine.model), weakref.ref(engine.core)]
            del engine
            served.replace()
            until(lambda held=held: [ref() for ref in held] == [None] * 3)  # type: ignore[misc]
    finally:
        gc.enable()
        served.close(5)


def test_a_request_that_meets_a_replacement_goes_to_the_next_engine(served: Served) -> None:
    asked: list[Engine] = []

    def call(engine: Engine) -> str:
        asked.append(engine)
        if len(asked) == 1:
            served.replace()  # between finding the engine and asking it
            raise Unavailable("the server is shutting down")
        return "answer"

    assert served.submit(call) == "answer"
    assert asked[1] is served.engine
    assert asked[0] is not asked[1]


def test_an_engine_that_refuses_and_stays_is_believed(served: Served) -> None:
    asked: list[Engine] = []

    def call(engine: Engine) -> None:
        asked.append(engine)
        raise Unavailable("the server is shutting down")

    with pytest.raises(Unavailable):
        served.submit(call)
    assert len(asked) == 1


def test_states_in_the_words_of_the_repository(served: Served, folder: Path) -> None:
    assert (served.state, served.ready, served.alive, served.asleep) == ("READY", True, True, False)
    loading = Served("new", str(folder / "second"), load, load(str(folder / "second")))
    assert (loading.state, loading.ready) == ("LOADING", False)
    served.unload()
    assert (served.state, served.ready, served.asleep, served.reason) == ("UNAVAILABLE", False, False, "unloaded")
    with pytest.raises(NoModel, match="'it' is not loaded"):
        served.current()
    assert served.view.model.config.name == "random"  # what is known of it while it is away
    served.replace()
    assert (served.state, served.wanted) == ("READY", True)
    never = Served("never", "nowhere", load)
    assert (never.state, never.alive, never.view) == ("UNAVAILABLE", True, None)


def test_an_unused_one_sleeps_and_is_woken_by_the_next_request(served: Served, folder: Path) -> None:
    assert probability(served)
    assert not served.sleep_if_unused(3600)
    assert served.sleep_if_unused(0.0)
    assert not served.sleep_if_unused(0.0)  # it does already
    assert (served.state, served.asleep, served.engine, served.pending) == ("READY", True, None, 0)
    assert probability(served) == pytest.approx(of(folder / "first"), rel=1e-4)
    assert not served.asleep
    assert served.stats().answered == 2


def test_one_that_is_asked_for_does_not_sleep(served: Served) -> None:
    assert served.engine is not None
    assert not served.sleep_if_unused(60)
    served.used = time.monotonic() - 100
    served.current()
    assert not served.sleep_if_unused(60)
    served.used = time.monotonic() - 100
    assert served.sleep_if_unused(60)


def test_one_that_cannot_be_woken_says_why_and_is_tried_again(served: Served, folder: Path) -> None:
    served.sleep_if_unused(0.0)
    (folder / "first" / bundle.CONFIG).rename(folder / "away")
    with pytest.raises(Unavailable, match=r"'it' could not be loaded again: .*config\.json"):
        served.current()
    (folder / "away").rename(folder / "first" / bundle.CONFIG)
    assert served.current().ready


def test_several_who_wake_it_at_once_load_it_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.sleep_if_unused(0.0)
    real, second, loads = served.replace, threading.Event(), [0]

    def slowly(source: str | None = None) -> None:
        """Leaves others time to come to where they would load it as well."""
        loads[0] += 1
        if loads[0] > 1:
            second.set()
        second.wait(0.3)
        real(source)

    monkeypatch.setattr(served, "replace", slowly)
    found: list[Engine] = []
    threads = [threading.Thread(target=lambda: found.append(served.current())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert loads == [1]
    assert {id(engine) for engine in found} == {id(served.engine)}


def test_a_server_that_shuts_down_wakes_nobody(served: Served) -> None:
    served.sleep_if_unused(0.0)
    served.stop_accepting()
    with pytest.raises(Unavailable, match="shutting down"):
        served.current()
    assert served.engine is None


def test_closing_finishes_all_engines_and_says_whether_that_was_in_time(folder: Path) -> None:
    source = str(folder / "first")
    served = Served("it", source, load, load(source).start())
    futures = served.submit(lambda engine: engine.submit_many([PICTURE] * 5))
    assert served.close(20) is True
    assert all(future.result(0) for future in futures)
    assert served.pending == 0
    with pytest.raises(Unavailable):
        served.submit(lambda engine: engine.submit(PICTURE))


def test_closing_without_time_says_that_something_was_left(model: BundleModel) -> None:
    core = SlowSlots(model.graphs, 1)
    engine = Engine(model, core=core).start()
    served = Served("it", str(model.path), load, engine)
    core.gate.clear()
    future = served.submit(lambda engine: engine.submit(PICTURE))
    until(lambda: engine.active)
    threading.Timer(0.2, core.gate.set).start()
    assert served.close(0.0) is False
    with pytest.raises(Unavailable):
        future.result(10)


def test_a_changed_file_changes_the_signature(folder: Path, tiny_files: dict[str, Path]) -> None:
    first, source = folder / "first", str(folder / "first")
    before = signature(source)
    assert before == signature(source) != signature(str(folder / "second"))
    (first / bundle.STEM).write_bytes((first / bundle.STEM).read_bytes() + b"x")
    longer = signature(source)
    (first / "more").write_text("x")
    assert len({before, longer, signature(source)}) == 3
    assert len(signature(str(tiny_files["onnx"]))) == 1
    assert signature("cifar10") == signature(str(bundle.MODELS / "cifar10"))
    assert signature("someone/mine") == signature(str(folder / "nowhere")) == ()  # nothing to look at
