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
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from . import images
from .errors import UsageError, UserError
from .exits import Depth
from .line import Line
from .model import Attention, BundleModel, Failure, FileModel
from .request import (
    Answer,
    DeadlineExceeded,
    Diverged,
    Limits,
    NotAPicture,
    Overloaded,
    Request,
    Settings,
    StepFailed,
    Unavailable,
)
from .slots import Job, Outcome, Slots
from .stats import Stats
from .whole import WholeSlots

__all__ = [
    "Answer",
    "DeadlineExceeded",
    "Diverged",
    "Engine",
    "Limits",
    "NotAPicture",
    "Overloaded",
    "Settings",
    "StepFailed",
    "Unavailable",
]
log = logging.getLogger("odevit_serve.engine")
OVERLOADS = ("refuse", "depth")


class Engine:
    """One model, its queue and its thread."""

    def __init__(
        self,
        model: BundleModel | FileModel,
        *,
        slots: int = 32,
        queue: int = 256,
        overload: str = "refuse",
        limits: Limits | None = None,
        decoders: int = 2,
        core: Slots | WholeSlots | None = None,
    ):
        if queue < 1:
            raise UsageError(f"queue must have at least 1 place, not {queue}")
        if overload not in OVERLOADS:
            raise UsageError(f"unknown overload {overload!r}: choose one of {', '.join(OVERLOADS)}")
        self.model, self.queue, self.overload, self.limits = model, queue, overload, limits or Limits()
        if core is None:
            core = model.slots(slots) if isinstance(model, BundleModel) else WholeSlots(model, slots)
        self.core = core
        self.stats = Stats(core.capacity)
        self._line: Line[Request] = Line()
        self._held: set[Request] = set()  # accepted and not yet ended
        self._places = 0  # of the queue that are taken: being decoded or in line
        self._gone: list[Request] = []  # cancelled while in a slot
        self._wake = threading.Condition()
        self._state = "new"  # then: warming, ready, draining, closed
        self._pool = ThreadPoolExecutor(decoders, "odevit-decode")
        self._thread = threading.Thread(target=self._run, name="odevit-engine", daemon=True)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self, wait: bool = True) -> Engine:
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

    def __enter__(self) -> Engine:
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
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)  # a step that hangs must not hold up the end: the thread is a daemon
        return clean

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, image: Any, settings: Settings | None = None, /, **asked: Any) -> Future[Answer]:
        """Answer a picture in any form that `load().predict` takes. Raises at once when it cannot be accepted."""
        return self.submit_many([image], settings, **asked)[0]

    def submit_many(
        self, pictures: Sequence[Any], settings: Settings | None = None, /, names: Sequence[str] = (), **asked: Any
    ) -> list[Future[Answer]]:
        """The same for several: all are accepted or none."""
        names = names or [images.describe(image) for image in pictures]
        requests = self._accept(list(zip(pictures, names)), (settings or Settings()).changed(asked))
        for request in requests:
            try:
                self._pool.submit(self._decode, request)
            except RuntimeError:  # closed since it was accepted
                self._fail(request, Unavailable("the server is shutting down"), "shutdown")
        return [request.future for request in requests]

    def submit_pixels(
        self, pixels: np.ndarray, settings: Settings | None = None, /, **asked: Any
    ) -> list[Future[Answer]]:
        """The same for pixel values [B,3,H,W] that are prepared already."""
        wanted = tuple(self.model.config.preprocessing.input_size)
        if pixels.ndim != 4 or pixels.shape[1:] != wanted:
            raise UsageError(f"pixel values of shape {list(pixels.shape)}, not {['B', *wanted]}")
        if not np.isfinite(pixels).all():
            raise UsageError("pixel values must be finite numbers")
        pairs = [(None, f"image {i}") for i in range(len(pixels))]
        requests = self._accept(pairs, (settings or Settings()).changed(asked))
        for request, values in zip(requests, pixels):
            request.pixels = values
        self._enqueue(requests)
        return [request.future for request in requests]

    async def predict(self, image: Any, settings: Settings | None = None, /, **asked: Any) -> Answer:
        """`submit` for asyncio; cancelling the task cancels the request."""
        return await asyncio.wrap_future(self.submit(image, settings, **asked))

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

    def _accept(self, pictures: list[tuple[Any, str]], settings: Settings) -> list[Request]:
        depth = self._depth(settings)
        now = self.core.clock()
        deadline = math.inf if settings.deadline_ms is None else now + settings.deadline_ms / 1000
        requests = [Request(image, name, settings, depth, deadline, now) for image, name in pictures]
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
        return requests

    def _depth(self, settings: Settings) -> Depth:
        """The checked depth of a request, within the limits."""
        own = self.model.config.integration.steps
        self.limits.check(settings, own)
        if settings.kappa is not None and settings.threshold is not None:
            raise UsageError("give kappa or threshold, not both: they are one number")
        if isinstance(self.model, FileModel):
            return self.core.depth(settings)  # type: ignore[union-attr]
        budget = settings.max_steps
        if budget is None and self.limits.max_steps is not None and self.limits.max_steps < (settings.steps or own):
            budget = self.limits.max_steps
        return self.model.depth(
            steps=settings.steps,
            max_steps=budget,
            rule=settings.rule,
            threshold=settings.threshold if settings.kappa is None else settings.kappa,
            adaptive=settings.adaptive,
        )

    def _drain_seconds(self) -> float:
        """How long the queue would take to empty, from the latest steps."""
        return max(0.1, self._places * self.stats.mean_depth * self.stats.step_seconds / self.core.capacity)

    def _decode(self, request: Request) -> None:
        """On a thread of the pool: the picture becomes pixels and goes into line."""
        if request.future.cancelled():
            return
        began = time.monotonic()
        try:
            request.pixels = self.model.prepare(request.image, request.source)
        except UserError as error:
            self._fail(request, NotAPicture(str(error)), "not a picture")
            return
        except Exception as error:  # the reader tells its failures as UserError; anything else is still one request's
            log.exception("reading a picture failed")
            self._fail(request, StepFailed(f"{request.source}: reading failed ({type(error).__name__})"), "error")
            return
        request.image = None
        request.read_seconds = time.monotonic() - began
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
            self._held.remove(request)
            self.stats.cancelled += 1
            if request.admitted:
                self._gone.append(request)
            else:
                self._places -= 1
                self._line.remove(request)
            request.image = request.pixels = None
            self._wake.notify_all()

    def _end(self, request: Request) -> bool:
        """Take a request out of those held; whoever gets True owns its future. So each is ended once."""
        if request not in self._held or not self._claim(request):
            return False
        self._held.remove(request)
        if not request.admitted:
            self._places -= 1
            self._line.remove(request)
        self._wake.notify_all()
        return True

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

    def _finish(self, request: Request, outcome: Outcome) -> Answer | Failure:
        finish = self.model.finish if isinstance(self.model, BundleModel) else self.core.finish  # type: ignore[union-attr]
        result = finish(outcome, request.source, request.read_seconds)
        if isinstance(result, Failure):
            return result
        maps: tuple[Attention, ...] = ()
        if request.settings.states and isinstance(self.model, BundleModel):
            grid = self.model.config.architecture.grid
            heads = self.model.graphs.maps(np.stack(outcome.states))
            maps = tuple(Attention(step, values.reshape(-1, grid, grid)) for step, values in enumerate(heads))
        elif result.attention is not None:
            maps = (result.attention,)
        states = outcome.states if request.settings.states else ()
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
        while self._state in ("ready", "draining"):
            try:
                self._turn()
            except Exception as error:  # a fault of the engine itself: the images in it are lost, the engine is not
                log.exception("the engine stumbled")
                self._fail_active(f"the engine failed ({type(error).__name__}: {error})")
        self._fail_active("the server shut down before the answer was ready")

    def _warm_up(self) -> None:
        """Run each of a few batch sizes, so that no request pays for the first allocation."""
        shape = tuple(self.model.config.preprocessing.input_size)
        depth = self._depth(Settings())
        rows = self.core.capacity
        while rows:
            if self._state != "warming":
                return
            self.core.admit(np.zeros((rows, *shape), np.float32), [Job(None, depth)] * rows)
            self.core.step()
            self.core.clear()
            rows //= 2

    def _turn(self) -> None:
        ready, late = self._take()
        for request in late:
            self._fail(request, DeadlineExceeded(_late(request)), "deadline")
        if ready:
            self._admit(ready)
        if self.core.active:
            self._step()

    def _take(self) -> tuple[list[Request], list[Request]]:
        """Wait for work; the requests to admit and those whose deadline has passed in line."""
        with self._wake:
            while not (self.core.active or self._line or self._gone) and self._state in ("ready", "draining"):
                if self._state == "draining" and not self._held:
                    self._state = "closed"
                    self._wake.notify_all()
                    return [], []
                self._wake.wait()
            gone, self._gone = self._gone, []
            for request in gone:
                self.core.cancel(request)
            now = self.core.clock()
            late = self._line.expire(now)
            ready = [self._line.pop() for _ in range(min(self.core.free, len(self._line)))]
            fill = self._places / self.queue
            for request in (*ready, *late):
                request.admitted = now
                self._places -= 1
            if self.overload == "depth":
                for request in ready:
                    request.lower(fill)
            return ready, late

    def _admit(self, requests: list[Request]) -> None:
        jobs = [Job(r, r.depth, r.deadline, r.settings.trace, r.settings.keep) for r in requests]
        try:
            self.core.admit(np.stack([r.pixels for r in requests if r.pixels is not None]), jobs)
        except Exception as error:
            log.exception("the stem failed")
            for request in requests:
                self._fail(request, StepFailed(f"the stem failed ({_brief(error)})"), "step failed")
            return
        for request in requests:
            request.pixels = None

    def _step(self) -> None:
        rows, began = self.core.active, time.monotonic()
        try:
            outcomes = self.core.step()
        except Exception as error:
            log.exception("a step failed")
            self._fail_active(f"a step failed ({_brief(error)})")
            return
        self.stats.step(rows, time.monotonic() - began)
        for outcome in outcomes:
            request: Request = outcome.job.key
            if outcome.states:  # maps take a graph of their own: not while others wait for their next step
                self._pool.submit(self._answer, request, outcome)
            else:
                self._answer(request, outcome)

    def _fail_active(self, message: str) -> None:
        for job in self.core.clear():
            if isinstance(job.key, Request):
                self._fail(job.key, StepFailed(message), "step failed")


def _late(request: Request) -> str:
    return f"the deadline of {request.settings.deadline_ms:g} ms passed before the first step"


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
