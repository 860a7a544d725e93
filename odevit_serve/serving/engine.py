"""The engine: a bounded queue in front of the slots, and the threads that admit, step and retire.

    with Engine(odevit_serve.load()) as engine:
        answer = engine.submit("photo.jpg", deadline_ms=50).result()
        answer.prediction.label, answer.prediction.steps

`submit` may be called from any thread and gives a `Future`; `predict` is the same for asyncio. Cancelling either gives
the place in the queue, or the slot at the next step, to someone else. A request that was accepted is always answered
or failed with a reason, whatever happens to the engine: `pending` sees to that. What computes is in `workers`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from ..data import images
from ..errors import UsageError, UserError
from ..runtime.compute import Compute
from ..runtime.exits import Depth
from ..runtime.model import Model
from ..runtime.options import RequestOptions
from ..runtime.results import Attention, Failure
from ..runtime.slots import Outcome
from . import tracing
from .audit import Audit, AuditOptions
from .counters import Counters
from .deadlines import Deadlines
from .decoders import Decoders
from .pending import Pending
from .requests import (
    Answer,
    DeadlineExceeded,
    Diverged,
    Limits,
    NotAPicture,
    Overloaded,
    Request,
    StepFailed,
    Unavailable,
)
from .turns import Turns
from .workers import Workers

__all__ = [
    "Answer",
    "DeadlineExceeded",
    "Diverged",
    "Engine",
    "Limits",
    "NotAPicture",
    "Overloaded",
    "StepFailed",
    "Unavailable",
]
log = logging.getLogger("odevit_serve.serving.engine")
OVERLOADS = ("refuse", "depth")
KNOWN_DEPTHS = 256
M = TypeVar("M", bound=Model)
T = TypeVar("T")


class Engine(Generic[M]):
    """One model, its queue and its threads."""

    def __init__(
        self,
        model: M,
        *,
        slots: int = 32,
        queue: int = 256,
        overload: str = "refuse",
        limits: Limits | None = None,
        decoders: int | Decoders = 2,
        core: Compute | Sequence[Compute] | None = None,
        turns: Turns | None = None,
        audit: AuditOptions | None = None,
    ):
        if queue < 1:
            raise UsageError(f"queue must have at least 1 place, not {queue}")
        if overload not in OVERLOADS:
            raise UsageError(f"unknown overload {overload!r}: choose one of {', '.join(OVERLOADS)}")
        self.model, self.queue, self.overload, self.limits = model, queue, overload, limits or Limits()
        parts = model.computes(slots) if core is None else core
        cores = parts if isinstance(parts, Sequence) else [parts]
        self.core: Compute = cores[0]  # all of them are alike
        self.capacity = sum(part.capacity for part in cores)
        self._own_steps = model.config.integration.steps
        if overload == "depth" and self.core.least_steps >= self._own_steps:
            raise UsageError(
                f"overload 'depth' is not possible: {model.path.name} has a fixed depth of {self._own_steps} steps"
            )
        self._depths: dict[RequestOptions, Depth] = {}  # what was asked for before: checking it takes a while
        own = self._depth(RequestOptions())  # limits that the model cannot keep are told now
        self._pending = Pending(queue, self.capacity)
        self._pending.audit = None if audit is None else Audit(audit, model.config, self.core, own)
        self._deadlines: Deadlines[Request] = Deadlines(self.core.clock, self._due)
        self._own_decoders = Decoders(decoders) if isinstance(decoders, int) else None
        self._pool = (self._own_decoders or decoders).lane()  # type: ignore[union-attr]
        self.observe = tracing.observer()
        self._maps = ThreadPoolExecutor(1, "odevit-maps")  # of its own: an answer does not wait for decoders
        shape = tuple(model.config.preprocessing.input_size)
        shared = Turns(len(cores)) if turns is None else turns
        self._workers = Workers(cores, self._pending, shared, own, shape, self._ended, overload == "depth")

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self, wait: bool = True) -> Engine[M]:
        """Warm up and start; without `wait`, in the background, and `ready` says when it is done."""
        pending = self._pending
        with pending.lock:
            if pending.state != "new":
                raise UsageError("the engine was started before")
            pending.state = "warming"
        self._workers.start()
        if wait:
            with pending.lock:
                pending.change.wait_for(lambda: pending.state != "warming")
            if pending.state != "ready":
                raise UserError("the engine could not warm up: see the log for the reason")
        return self

    def __enter__(self) -> Engine[M]:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self._workers.alive

    @property
    def alive(self) -> bool:
        """Whether the threads are running, or have ended as asked."""
        return self.state != "failed" and (self._workers.alive or self.state in ("new", "draining", "closed"))

    @property
    def state(self) -> str:
        return self._pending.state

    @property
    def stats(self) -> Counters:
        return self._pending.stats

    @property
    def audit(self) -> Audit | None:
        return self._pending.audit

    @property
    def active(self) -> int:
        """Images in slots."""
        return self._workers.active

    @property
    def waiting(self) -> int:
        """Places of the queue that are taken."""
        return self._pending.taken

    @property
    def pending(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._pending.held)

    def stop_accepting(self) -> None:
        """Refuse new requests; those that were accepted continue."""
        self._pending.set_state("draining", of=("new", "warming", "ready"))
        if self.audit is not None:
            self.audit.stop()

    def close(self, grace: float = 30.0) -> bool:
        """Finish accepted requests within `grace` seconds and fail the rest; True if none had to be failed."""
        self.stop_accepting()
        pending = self._pending
        with pending.lock:
            clean = pending.change.wait_for(lambda: not pending.held, grace)
            pending.set_state("closed", of=(pending.state,))
            left = list(pending.held)
        for request in left:
            pending.fail(request, Unavailable("the server shut down before the answer was ready"), "shutdown")
        self._deadlines.close()
        self._pool.close()
        if self._own_decoders is not None:
            self._own_decoders.close()
        self._maps.shutdown(wait=False, cancel_futures=True)
        self._workers.join(5.0)  # a step that hangs must not hold up the end: the threads are daemons
        return clean

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, image: Any, options: RequestOptions | None = None, /, **asked: Any) -> Future[Answer]:
        """Answer a picture in any form that `load().predict` takes. Raises at once if it cannot be accepted.

        Options are those of `RequestOptions`, by name or as one object.
        """
        return self.submit_many([image], options, **asked)[0]

    def submit_many(
        self,
        pictures: Sequence[Any],
        options: RequestOptions | None = None,
        /,
        names: Sequence[str] = (),
        arrived: float | None = None,
        **asked: Any,
    ) -> list[Future[Answer]]:
        """`submit` for several pictures: all are accepted or none. Deadlines count from `arrived`; None: from now."""
        names = names or [images.describe(image) for image in pictures]
        requests = self._accept(list(zip(pictures, names)), RequestOptions.of(options, asked), arrived)
        for request in requests:
            try:
                self._pool.call(functools.partial(self._decode, request))
            except RuntimeError:  # closed since it was accepted
                self._pending.fail(request, Unavailable("the server is shutting down"), "shutdown")
        return [request.future for request in requests]

    def submit_pixels(
        self, pixels: np.ndarray, options: RequestOptions | None = None, /, arrived: float | None = None, **asked: Any
    ) -> list[Future[Answer]]:
        """`submit` for pixel values [B,3,H,W] that are already resized and normalised."""
        wanted = tuple(self.model.config.preprocessing.input_size)
        if pixels.ndim != 4 or pixels.shape[1:] != wanted:
            raise UsageError(f"pixel values of shape {list(pixels.shape)}, not {['B', *wanted]}")
        if not np.isfinite(pixels).all():
            raise UsageError("pixel values must be finite numbers")
        pairs = [(None, f"image {i}") for i in range(len(pixels))]
        requests = self._accept(pairs, RequestOptions.of(options, asked), arrived)
        for request, values in zip(requests, pixels):
            request.pixels = values
        self._pending.enqueue(requests)
        return [request.future for request in requests]

    async def predict(self, image: Any, options: RequestOptions | None = None, /, **asked: Any) -> Answer:
        """`submit` for asyncio; cancelling the task cancels the request."""
        return await asyncio.wrap_future(self.submit(image, options, **asked))

    def decode(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function that decodes a picture where all pictures are decoded: on one of the few threads for it."""
        try:
            return self._pool.submit(function, *arguments)
        except RuntimeError:
            raise Unavailable("the server is shutting down") from None

    def check_accepting(self) -> None:
        """Raise what `submit` would raise now, if anything."""
        refusal = self._pending.refusal()
        if refusal is not None:
            self._pending.count_refused(refusal, 1)
            raise refusal

    def _accept(self, pictures: list[tuple[Any, str]], options: RequestOptions, arrived: float | None) -> list[Request]:
        depth = self._depth(options)
        now = self.core.clock()
        since = now if arrived is None else arrived
        deadline = math.inf if options.deadline_ms is None else since + options.deadline_ms / 1000
        requests = [Request(image, name, options, depth, deadline, now) for image, name in pictures]
        if self.observe is not None:
            for request in requests:
                request.context = tracing.current()
        self._pending.accept(requests)
        for request in requests:
            if deadline <= now:
                self._due(request)
            elif deadline < math.inf:
                self._deadlines.add(request)
        return requests

    def _depth(self, options: RequestOptions) -> Depth:
        """The checked depth of a request, within the limits."""
        self.limits.check(options, self._own_steps)
        limit = self.limits.max_steps
        if options.max_steps is None and limit is not None and limit < (options.steps or self._own_steps):
            options = dataclasses.replace(options, max_steps=limit)
        known = self._depths.get(options)
        if known is None:
            if len(self._depths) >= KNOWN_DEPTHS:
                self._depths.clear()
            known = self._depths[options] = self.core.depth(options)
        return known

    def _due(self, request: Request) -> None:
        """On the thread of the deadlines. In a slot, the next step gives the best answer so far; elsewhere is none."""
        if not self._pending.overdue(request):
            return
        where = "answer" if request.admitted else "first step"
        text = f"the deadline of {request.options.deadline_ms:g} ms passed before the {where}"
        self._pending.fail(request, DeadlineExceeded(text), "deadline")
        self._pending.let_go(request)

    def _decode(self, request: Request) -> None:
        """On a thread of the pool: the picture becomes pixels and goes into line."""
        if request.future.done():  # cancelled, or its deadline has passed
            return
        began = time.monotonic()
        try:
            request.pixels = self.model.prepare(request.image, request.source, self.limits.max_pixels)
        except UserError as error:
            self._pending.fail(request, NotAPicture(str(error)), "not a picture")
            return
        except Exception as error:  # the reader tells its failures as UserError; anything else is still one request's
            log.exception("reading a picture failed")
            failed = StepFailed(f"{request.source}: reading failed ({type(error).__name__})")
            self._pending.fail(request, failed, "error")
            return
        request.image = None
        request.read_began, request.read_seconds = began, time.monotonic() - began
        self._pending.enqueue([request])

    def _ended(self, request: Request, outcome: Outcome) -> None:
        """On a thread that computes, or called by it."""
        if outcome.states:  # maps take a graph of their own: not while others wait for their next step
            self._maps.submit(self._answer, request, outcome)
        else:
            self._answer(request, outcome)

    def _answer(self, request: Request, outcome: Outcome) -> None:
        try:
            result = self._finish(request, outcome)
        except Exception as error:
            log.exception("making an answer failed")
            self._pending.fail(request, StepFailed(f"{request.source}: {type(error).__name__} in the answer"), "error")
            return
        if isinstance(result, Failure):
            self._pending.fail(request, Diverged(result.message), "diverged")
            return
        with self._pending.lock:
            if not self._pending.end(request):
                return
            self.stats.answer(outcome, result.queue_seconds, result.lowered_to is not None)
        request.future.set_result(result)
        if self.observe is not None:
            self.observe(request, outcome)

    def _finish(self, request: Request, outcome: Outcome) -> Answer | Failure:
        result = self.core.finish(outcome, request.source, request.read_seconds)
        if isinstance(result, Failure):
            return result
        maps: tuple[Attention, ...] = ()
        if request.options.states:
            maps = self.core.maps(outcome)
        elif result.attention is not None:
            maps = (result.attention,)
        states = outcome.states if request.options.states else ()
        return Answer(result, request.admitted - request.accepted, request.lowered_to, maps, states)
