"""Spans of every answered image for OpenTelemetry, where the process has it set up (`opentelemetry-instrument`).

A span `odevit.image` from acceptance to answer, with the children `read`, `queue`, `stem` and `steps`; its parent is
the span that the caller's `traceparent` header names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.slots import Outcome
from .requests import Request

NAME = "odevit_serve"
Observer = Callable[[Request, Outcome], None]


def is_set_up() -> bool:
    """Whether somebody has loaded the SDK; without it spans go nowhere, and nothing is imported for them."""
    return "opentelemetry.sdk.trace" in sys.modules


def attach(headers: Mapping[str, str]) -> Any:
    """Make the caller's span the current one; gives what `detach` takes."""
    from opentelemetry import context, propagate

    return context.attach(propagate.extract(dict(headers)))


def detach(token: Any) -> None:
    from opentelemetry import context

    context.detach(token)


def current() -> Any:
    from opentelemetry import context

    return context.get_current()


def observer(provider: Any = None) -> Observer | None:
    """What an engine calls for each answer; None when there is nobody to tell."""
    if not is_set_up():
        return None
    from opentelemetry import trace

    tracer = trace.get_tracer(NAME, tracer_provider=provider)

    def observe(request: Request, outcome: Outcome) -> None:
        since = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return since + int(1e9 * moment)

        end = time.monotonic()
        facts: dict[str, Any] = {"odevit.steps": outcome.steps, "odevit.exit": outcome.reason.short}
        whole = tracer.start_span("odevit.image", request.context, attributes=facts, start_time=at(request.accepted))
        inside = trace.set_span_in_context(whole)
        began, read = request.read_began or request.accepted, request.read_seconds
        parts = {
            "read": (began, began + read),
            "queue": (began + read, request.admitted),
            "stem": (request.admitted, request.admitted + request.stem_seconds),
            "steps": (request.admitted + request.stem_seconds, end),
        }
        for name, (first, last) in parts.items():
            part = tracer.start_span(f"odevit.{name}", inside, start_time=at(first))
            part.end(at(max(first, last)))
        whole.end(at(end))

    return observe
