"""Spans tell where the time of an image went, and cost nothing where nobody collects them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from servers import png, running, until

import odevit_serve
from odevit_serve.runtime.exits import RULES, Depth, ExitReason
from odevit_serve.runtime.jobs import Job, Outcome
from odevit_serve.runtime.options import RequestOptions
from odevit_serve.serving import tracing
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.requests import Request

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DEPTH = Depth(8, 1.5, 8, RULES["fixed"], 0.0)


@pytest.fixture
def memory() -> Iterator[tuple[Any, Any]]:
    """A provider, and what it has collected."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    kept = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    yield provider, kept
    provider.shutdown()


def test_spans(tiny_bundle: Path, memory: tuple[Any, Any]) -> None:
    provider, kept = memory
    engine = Engine(odevit_serve.load(tiny_bundle, threads=1), slots=2)
    engine.observe = tracing.observer(provider)
    with running(engine) as address:
        answer = httpx.post(f"{address}/v1/predict", content=png(), headers={"traceparent": PARENT}, timeout=20).json()
        until(lambda: len(kept.get_finished_spans()) == 5)
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert set(spans) == {"odevit.image", *(f"odevit.{name}" for name in ("read", "queue", "stem", "steps"))}
    whole = spans.pop("odevit.image")
    assert f"{whole.context.trace_id:032x}-{whole.parent.span_id:016x}" == PARENT[3:-3]
    assert whole.attributes["odevit.steps"] == answer["predictions"][0]["steps"]
    for span in spans.values():
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time - 1000 <= span.start_time <= span.end_time <= whole.end_time + 1000
    assert spans["odevit.read"].start_time <= spans["odevit.queue"].start_time <= spans["odevit.stem"].start_time


def observed(memory: tuple[Any, Any], request: Request, steps: int = 3) -> dict[str, Any]:
    """The spans of a request that ends now."""
    provider, kept = memory
    observe = tracing.observer(provider)
    assert observe is not None
    observe(request, Outcome(Job(request, DEPTH), steps, ExitReason.EARLY, np.zeros(2), 1.0, 0.0, 0.0, 0.1))
    return {span.name.removeprefix("odevit."): span for span in kept.get_finished_spans()}


def test_the_parts_follow_each_other_and_make_up_the_whole(memory: tuple[Any, Any]) -> None:
    """Accepted at 100 s, read from 101 to 103, in a slot at 107, of which the stem took 2 s."""
    request = Request(b"", "a.png", RequestOptions(), DEPTH, 1e9, 100.0, read_began=101.0, read_seconds=2.0)
    request.admitted, request.stem_seconds = 107.0, 2.0
    spans = observed(memory, request)
    whole = spans.pop("image")
    assert dict(whole.attributes) == {"odevit.steps": 3, "odevit.exit": "stopped early"}

    def seconds(moment: int) -> float:
        return (moment - whole.start_time) / 1e9

    found = {name: (seconds(span.start_time), seconds(span.end_time)) for name, span in spans.items()}
    end = seconds(whole.end_time)
    for name, (first, last) in {"read": (1, 3), "queue": (3, 7), "stem": (7, 9), "steps": (9, end)}.items():
        assert found[name] == pytest.approx((first, last), abs=1e-6)
    assert end > 9
    assert all(span.parent.span_id == whole.context.span_id for span in spans.values())


def test_pixels_that_were_not_read_have_no_time_of_reading(memory: tuple[Any, Any]) -> None:
    request = Request(None, "a", RequestOptions(), DEPTH, 1e9, 100.0, admitted=104.0)
    spans = observed(memory, request)
    assert spans["read"].start_time == spans["read"].end_time == spans["image"].start_time
    assert spans["queue"].end_time - spans["queue"].start_time == pytest.approx(4e9, abs=1e3)


def test_no_span_ends_before_it_begins(memory: tuple[Any, Any]) -> None:
    """Times of two threads: an image may be in its slot before the clock of its reader was looked at."""
    request = Request(b"", "a", RequestOptions(), DEPTH, 1e9, 100.0, read_began=100.5, read_seconds=9.0, admitted=104.0)
    for span in observed(memory, request).values():
        assert span.start_time <= span.end_time


def test_the_span_of_the_caller_is_current_until_it_is_let_go(memory: tuple[Any, Any]) -> None:
    from opentelemetry import trace

    def current() -> str:
        return f"{trace.get_current_span().get_span_context().trace_id:032x}"

    nobody = current()
    token = tracing.attach({"traceparent": PARENT})
    assert current() == PARENT[3:35]
    context = tracing.current()
    tracing.detach(token)
    assert current() == nobody
    inherited = trace.get_current_span(context).get_span_context()
    assert f"{inherited.span_id:016x}" == PARENT[36:52]


def test_without_the_sdk_there_is_nobody_to_tell_and_nothing_is_imported(tiny_bundle: Path) -> None:
    code = (
        "import sys\nfrom odevit_serve.serving import tracing\n"
        "assert not tracing.is_set_up() and tracing.observer() is None\n"
        "import odevit_serve\nfrom odevit_serve.serving.engine import Engine\n"
        f"engine = Engine(odevit_serve.load({str(tiny_bundle)!r}, threads=1))\n"
        "assert engine.observe is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
