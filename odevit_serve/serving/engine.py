"""The engine: a bounded queue in front of the slots, and one thread that admits, steps and retires.

    with Engine(odevit_serve.load()) as engine:
        answer = engine.submit("photo.jpg", deadline_ms=50).result()
        answer.prediction.label, answer.prediction.steps

`submit` may be called from any thread and gives a `Future`; `predict` is the same for asyncio. Cancelling either gives
the place in the queue, or the slot at the next step, to someone else. A request that was accepted is always answered
or failed with a reason, whatever happens to the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
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
from ..runtime.slots import Job, Outcome
from . import tracing
from .audit import Audit, AuditOptions
from .counters import Stats
from .deadlines import Deadlines
from .decoders import Decoders
from .queue import Line
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
from .turns import Member, Turns

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
RUNNING = ("ready", "draining")  # states
M = TypeVar("M", bound=Model)
T = TypeVar("T")


class Engine(Generic[M]):
    """One model, its queue and its thread."""

    def __init__(
        self,
        model: M,
        *,
        slots: int = 32,
        queue: int = 256,
        overload: str = "refuse",
        limits: Limits | None = None,
        decoders: int | Decoders = 2,
        core: Compute | None = None,
        turns: Turns | None = None,
        audit: AuditOptions | None = None,
    ):
        if queue < 1:
            raise UsageError(f"queue must have at least 1 place, not {queue}")
        if overload not in OVERLOADS:
            raise UsageError(f"unknown overload {overload!r}: choose one of {', '.join(OVERLOADS)}")
        self.model, self.queue, self.overload, self.limits = model, queue, overload, limits or Limits()
        self.core: Compute = model.compute(slots) if core is None else core
        self._own_steps = model.config.integration.steps
        if overload == "depth" and self.core.least_steps >= self._own_steps:
            raise UsageError(
                f"overload 'depth' cannot be: {model.path.name} has a fixed depth of {self._own_steps} steps"
            )
        self._depths: dict[RequestOptions, Depth] = {}  # what was asked for before: checking it takes a while
        own = self._depth(RequestOptions())  # limits that the model cannot keep are told now
        self.audit = None if audit is None else Audit(audit, model.config, self.core, own)
        self.stats = Stats(self.core.capacity)
        self._line: Line[Request] = Line()
        self._held: set[Request] = set()  # accepted and not yet ended
        self._places = 0  # of the queue that are taken: being decoded or in line
        self._gone: list[Request] = []  # ended while in a slot, by cancellation or deadline
        self._wake = threading.Condition()
        self._state = "new"  # then: warming, ready, draining, closed
        self._deadlines: Deadlines[Request] = Deadlines(self.core.clock, self._due)
        self._own_decoders = Decoders(decoders) if isinstance(decoders, int) else None
        self._pool = (self._own_decoders or decoders).lane()  # type: ignore[union-attr]
        self.observe = tracing.observer()
        self._turns = Member() if turns is None else turns.join()
        self._maps = ThreadPoolExecutor(1, "odevit-maps")  # of its own: an answer does not wait for decoders
        self._thread = threading.Thread(target=self._run, name="odevit-engine", daemon=True)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self, wait: bool = True) -> Engine[M]:
        """Warm up and begin; without `wait`, in the background: `ready` says when."""
        with self._wake:
            if self._state != "new":
                raise UsageError("the engine was started before")
            self._state = "warming"
        self._thread.start()
        if wait:
            with self._wake:
                self._wake.wait_for(lambda: self._state != "warming")
            if self._state != "ready":
                raise UserError("the engine could not warm up: see the log for the reason")
        return self

    def __enter__(self) -> Engine[M]:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        return self._state == "ready" and self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread is there, or has ended because it was told to."""
        return self._state != "failed" and (self._thread.is_alive() or self._state in ("new", "draining", "closed"))

    @property
    def state(self) -> str:
        return self._state

    @property
    def active(self) -> int:
        """Images in slots."""
        return self.core.active

    @property
    def waiting(self) -> int:
        """Places of the queue that are taken."""
        return self._places

    @property
    def pending(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._held)

    def stop_accepting(self) -> None:
        """Refuse what comes from now on; what was accepted goes on."""
        with self._wake:
            if self._state in ("new", "warming", "ready"):
                self._state = "draining"
            if self.audit is not None:
                self.audit.stop()
            self._wake.notify_all()

    def close(self, grace: float = 30.0) -> bool:
        """Finish what was accepted within `grace` seconds and fail the rest; True when nothing had to be failed."""
        self.stop_accepting()
        with self._wake:
            clean = self._wake.wait_for(lambda: not self._held, grace)
            self._state = "closed"
            left = list(self._held)
            self._wake.notify_all()
        for request in left:
            self._fail(request, Unavailable("the server shut down before the answer was ready"), "shutdown")
        self._deadlines.close()
        self._pool.close()
        if self._own_decoders is not None:
            self._own_decoders.close()
        self._maps.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)  # a step that hangs must not hold up the end: the thread is a daemon
        return clean

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, image: Any, options: RequestOptions | None = None, /, **asked: Any) -> Future[Answer]:
        """Answer a picture in any form that `load().predict` takes. Raises at once when it cannot be accepted.

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
        """The same for several: all are accepted or none. Deadlines count from `arrived`; None: from now."""
        names = names or [images.describe(image) for image in pictures]
        requests = self._accept(list(zip(pictures, names)), RequestOptions.of(options, asked), arrived)
        for request in requests:
            try:
                self._pool.call(functools.partial(self._decode, request))
            except RuntimeError:  # closed since it was accepted
                self._fail(request, Unavailable("the server is shutting down"), "shutdown")
        return [request.future for request in requests]

    def submit_pixels(
        self, pixels: np.ndarray, options: RequestOptions | None = None, /, arrived: float | None = None, **asked: Any
    ) -> list[Future[Answer]]:
        """The same for pixel values [B,3,H,W] that are prepared already."""
        wanted = tuple(self.model.config.preprocessing.input_size)
        if pixels.ndim != 4 or pixels.shape[1:] != wanted:
            raise UsageError(f"pixel values of shape {list(pixels.shape)}, not {['B', *wanted]}")
        if not np.isfinite(pixels).all():
            raise UsageError("pixel values must be finite numbers")
        pairs = [(None, f"image {i}") for i in range(len(pixels))]
        requests = self._accept(pairs, RequestOptions.of(options, asked), arrived)
        for request, values in zip(requests, pixels):
            request.pixels = values
        self._enqueue(requests)
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

    def refusal(self, count: int = 1) -> UserError | None:
        """Why `count` more images would not be accepted now; None when they would."""
        if self._state != "ready":
            why = {"draining": "shutting down", "closed": "shutting down", "failed": "broken: see its log"}
            return Unavailable(f"the server is {why.get(self._state, 'warming up')}")
        if self._places + count > self.queue:
            return Overloaded(self._places, self.queue, self._drain_seconds())
        return None

    def check_accepting(self) -> None:
        """Raise what `submit` would raise now."""
        refusal = self.refusal()
        if refusal is not None:
            self._count_refused(refusal, 1)
            raise refusal

    def _count_refused(self, refusal: UserError, count: int) -> None:
        with self._wake:
            self.stats.refused["queue full" if isinstance(refusal, Overloaded) else "unavailable"] += count

    def _accept(self, pictures: list[tuple[Any, str]], options: RequestOptions, arrived: float | None) -> list[Request]:
        depth = self._depth(options)
        now = self.core.clock()
        since = now if arrived is None else arrived
        deadline = math.inf if options.deadline_ms is None else since + options.deadline_ms / 1000
        requests = [Request(image, name, options, depth, deadline, now) for image, name in pictures]
        if self.observe is not None:
            for request in requests:
                request.context = tracing.current()
        with self._wake:
            refusal = self.refusal(len(requests))
            if refusal is not None:
                self._count_refused(refusal, len(requests))
                raise refusal
            self._places += len(requests)
            self._held.update(requests)
            self.stats.accepted += len(requests)
        for request in requests:
            request.future.add_done_callback(lambda _, r=request: self._forget(r))  # type: ignore[misc]
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
        with self._wake:
            if request.interruptible:
                return
            where = "answer" if request.admitted else "first step"
        text = f"the deadline of {request.options.deadline_ms:g} ms passed before the {where}"
        self._fail(request, DeadlineExceeded(text), "deadline")
        with self._wake:
            if request.admitted:
                self._gone.append(request)
                self._wake.notify_all()

    def _drain_seconds(self) -> float:
        """How long the queue would take to empty, from the latest steps."""
        return max(0.1, self._places * self.stats.mean_depth * self.stats.step_seconds / self.core.capacity)

    def _decode(self, request: Request) -> None:
        """On a thread of the pool: the picture becomes pixels and goes into line."""
        if request.future.done():  # cancelled, or its deadline has passed
            return
        began = time.monotonic()
        try:
            request.pixels = self.model.prepare(request.image, request.source, self.limits.max_pixels)
        except UserError as error:
            self._fail(request, NotAPicture(str(error)), "not a picture")
            return
        except Exception as error:  # the reader tells its failures as UserError; anything else is still one request's
            log.exception("reading a picture failed")
            self._fail(request, StepFailed(f"{request.source}: reading failed ({type(error).__name__})"), "error")
            return
        request.image = None
        request.read_began, request.read_seconds = began, time.monotonic() - began
        self._enqueue([request])

    def _enqueue(self, requests: Iterable[Request]) -> None:
        with self._wake:
            for request in requests:
                if request in self._held:
                    self._line.push(request)
            self._wake.notify_all()

    def _forget(self, request: Request) -> None:
        """When a future is done: if it was cancelled, its place or slot is free."""
        if not request.future.cancelled():
            return
        with self._wake:
            if request not in self._held:
                return
            self._claim(request)  # wakes those who wait for the future
            self.stats.cancelled += 1
            self._release(request)
            if request.admitted:
                self._gone.append(request)

    def _end(self, request: Request) -> bool:
        """Take a request out of those held; whoever gets True owns its future. So each is ended once."""
        if request not in self._held or not self._claim(request):
            return False
        self._release(request)
        return True

    def _release(self, request: Request) -> None:
        """Give back what a request holds; the row of one that is admitted is freed by whoever ends it."""
        self._held.remove(request)
        if not request.admitted:
            self._places -= 1
            self._line.remove(request)
        request.image = request.pixels = None
        if self.audit is not None:
            self.audit.forget(request)
        self._wake.notify_all()

    def _claim(self, request: Request) -> bool:
        """Settle between cancellation and end: True when it can no longer be cancelled. A future allows one call."""
        if not request.settled:
            request.settled = True
            return request.future.set_running_or_notify_cancel()
        return False

    def _fail(self, request: Request, error: UserError, reason: str) -> None:
        with self._wake:
            if not self._end(request):
                return
            self.stats.failed[reason] += 1
        request.future.set_exception(error)

    def _answer(self, request: Request, outcome: Outcome) -> None:
        try:
            result = self._finish(request, outcome)
        except Exception as error:
            log.exception("making an answer failed")
            self._fail(request, StepFailed(f"{request.source}: {type(error).__name__} in the answer"), "error")
            return
        if isinstance(result, Failure):
            self._fail(request, Diverged(result.message), "diverged")
            return
        with self._wake:
            if not self._end(request):
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

    # -- the scheduling thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm_up()
        except Exception:
            log.exception("warm-up failed")
            self._state = "failed"
        with self._wake:
            if self._state == "warming":
                self._state = "ready"
            self._wake.notify_all()
        while self._state in RUNNING:
            try:
                self._turn()
            except Exception as error:  # a fault of the engine itself: the images in it are lost, the engine is not
                log.exception("the engine stumbled")
                self._fail_active(f"the engine failed ({type(error).__name__}: {error})")
        self._turns.leave()
        self._fail_active("the server shut down before the answer was ready")
        if self.audit is not None:
            self.audit.close()

    def _warm_up(self) -> None:
        """Run each of a few batch sizes, so that no request pays for the first allocation."""
        shape = tuple(self.model.config.preprocessing.input_size)
        depth = self._depth(RequestOptions())
        rows = self.core.capacity
        while rows:
            if self._state != "warming":
                return
            self._turns.take()
            self.core.admit(np.zeros((rows, *shape), np.float32), [Job(None, depth)] * rows)
            self.core.step()
            self.core.clear()
            self._turns.give(more=False)
            rows //= 2

    def _turn(self) -> None:
        if not self._wait():
            return
        self._turns.take()
        try:
            ready = self._take()
            if ready:
                self._admit(ready)
            if self.audit is not None:
                self.audit.resume()
            if self.core.active:
                self._step()
        finally:
            self._turns.give(more=bool(self.core.active or self._line))

    @property
    def _unaudited(self) -> int:
        """Images that are answered and wait for their audit."""
        return 0 if self.audit is None else self.audit.waiting

    def _wait(self) -> bool:
        """Wait for work; False when the engine is to end."""
        with self._wake:
            while not (self.core.active or self._line or self._gone or self._unaudited) and self._state in RUNNING:
                if self._state == "draining" and not self._held:
                    self._state = "closed"
                    self._wake.notify_all()
                    return False
                self._turns.leave()
                self._wake.wait()
            return self._state in RUNNING

    def _take(self) -> list[Request]:
        """The requests to admit."""
        with self._wake:
            gone, self._gone = self._gone, []
            for request in gone:
                self.core.cancel(request)
            if self.audit is not None:
                for request in gone:
                    self.audit.forget(request)
                self.audit.make_room(len(self._line) - self.core.free)
            now = self.core.clock()
            ready = [self._line.pop() for _ in range(min(self.core.free, len(self._line)))]
            fill = self._places / self.queue
            for request in ready:
                request.admitted, request.interruptible = now, self.core.anytime
                self._places -= 1
                if self.overload == "depth":
                    request.lower(fill, self.core.least_steps)
            return ready

    def _admit(self, requests: list[Request]) -> None:
        with self._wake:  # one that was cancelled since it left the queue has no pixels any more
            pairs = [(request, request.pixels) for request in requests if request in self._held]
        if not pairs:
            return
        jobs = [Job(r, r.depth, r.deadline, r.options.trace, r.options.keep) for r, _ in pairs]
        if self.audit is not None:
            jobs = self.audit.govern(jobs)
        began = self.core.clock()
        try:
            self.core.admit(np.stack([pixels for _, pixels in pairs if pixels is not None]), jobs)
        except Exception as error:
            log.exception("admitting images failed")
            for request, _ in pairs:
                self._fail(request, StepFailed(f"the stem failed ({_brief(error)})"), "step failed")
            return
        took = self.core.clock() - began
        for request, _ in pairs:
            request.pixels, request.stem_seconds = None, took

    def _step(self) -> None:
        rows, began = self.core.active, time.monotonic()
        try:
            outcomes = self.core.step()
        except Exception as error:
            log.exception("a step failed")
            self._fail_active(f"a step failed ({_brief(error)})")
            return
        self.stats.step(rows, time.monotonic() - began)
        for outcome in outcomes if self.audit is None else map(self.audit.take, outcomes):
            if outcome is None:
                continue
            request: Request = outcome.job.key
            if outcome.states:  # maps take a graph of their own: not while others wait for their next step
                self._maps.submit(self._answer, request, outcome)
            else:
                self._answer(request, outcome)

    def _fail_active(self, message: str) -> None:
        for job in self.core.clear():
            if isinstance(job.key, Request):
                self._fail(job.key, StepFailed(message), "step failed")
            elif self.audit is not None:
                self.audit.forget(job.key, "failed")


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
