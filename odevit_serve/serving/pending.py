"""Requests that were accepted and have not ended: their places in the queue, and an end for each, once."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from ..errors import UserError
from .audit import Audit
from .counters import Counters
from .queue import RequestQueue
from .requests import Overloaded, Request, Unavailable

RUNNING = ("ready", "draining")  # states


class Holder(Protocol):
    """A thread that holds admitted requests in slots."""

    def let_go(self, request: Request) -> None:
        """It has ended by cancellation or deadline: free its slot at the next step."""


class Pending:
    """What the threads of an engine share, behind one lock."""

    def __init__(self, places: int, capacity: int):
        self.places, self.capacity = places, capacity
        self.stats = Counters(capacity)
        self.audit: Audit | None = None
        self.state = "new"  # then: warming, ready, draining, closed; or failed
        self.held: set[Request] = set()  # accepted and not yet ended
        self.line: RequestQueue[Request] = RequestQueue()  # decoded, and without a slot
        self.taken = 0  # places that are taken: being decoded or in line
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)  # for those that compute
        self.change = threading.Condition(self.lock)  # for those that wait for a state, or for the end of all

    # -- in ------------------------------------------------------------------------------------------------------------

    def refusal(self, count: int = 1) -> UserError | None:
        """Why `count` more images would not be accepted now; None when they would."""
        if self.state != "ready":
            why = {"draining": "shutting down", "closed": "shutting down", "failed": "broken: see its log"}
            return Unavailable(f"the server is {why.get(self.state, 'warming up')}")
        if self.taken + count > self.places:
            return Overloaded(self.taken, self.places, self._drain_seconds())
        return None

    def count_refused(self, refusal: UserError, count: int) -> None:
        with self.lock:
            self.stats.refused["queue full" if isinstance(refusal, Overloaded) else "unavailable"] += count

    def accept(self, requests: list[Request]) -> None:
        """All, or none and the reason."""
        with self.lock:
            refusal = self.refusal(len(requests))
            if refusal is not None:
                self.count_refused(refusal, len(requests))
                raise refusal
            self.taken += len(requests)
            self.held.update(requests)
            self.stats.accepted += len(requests)
        for request in requests:  # weakly, as a request has its future; one that can be cancelled is held here
            own = weakref.ref(request)
            request.future.add_done_callback(lambda _, own=own: self._cancelled(own()))  # type: ignore[misc]

    def enqueue(self, requests: Iterable[Request]) -> None:
        with self.lock:
            count = 0
            for request in requests:
                if request in self.held:
                    self.line.push(request)
                    count += 1
            self.work.notify(count)

    def _drain_seconds(self) -> float:
        """How long the queue would take to empty, from the latest steps."""
        return max(0.1, self.taken * self.stats.mean_depth * self.stats.step_seconds / self.capacity)

    # -- to the slots --------------------------------------------------------------------------------------------------

    def take(self, count: int, holder: Holder, now: float, anytime: bool) -> tuple[list[Request], float]:
        """The next `count` that wait, now in the slots of `holder`, and how full the queue was."""
        with self.lock:
            ready = [self.line.pop() for _ in range(min(count, len(self.line)))]
            fill = self.taken / self.places
            for request in ready:
                request.admitted, request.interruptible, request.holder = now, anytime, holder
            self.taken -= len(ready)
            return ready, fill

    # -- out -----------------------------------------------------------------------------------------------------------

    def end(self, request: Request) -> bool:
        """Take a request out of those held; whoever gets True owns its future. So each is ended once."""
        if request not in self.held or not self._claim(request):
            return False
        self._release(request)
        return True

    def fail(self, request: Request, error: UserError, reason: str) -> None:
        with self.lock:
            if not self.end(request):
                return
            self.stats.failed[reason] += 1
        request.future.set_exception(error)

    def overdue(self, request: Request) -> bool:
        """Whether its deadline ends it here: in a slot, the next step gives the best answer so far."""
        with self.lock:
            return not request.interruptible

    def let_go(self, request: Request) -> None:
        """Free the slot of a request that has ended in one."""
        with self.lock:
            if request.holder is not None:
                request.holder.let_go(request)
                self.work.notify_all()

    def _cancelled(self, request: Request | None) -> None:
        """When a future is done: if it was cancelled, its place or slot is free."""
        if request is None or not request.future.cancelled():
            return
        with self.lock:
            if request not in self.held:
                return
            self._claim(request)  # wakes those who wait for the future
            self.stats.cancelled += 1
            self._release(request)
            self.let_go(request)

    def _release(self, request: Request) -> None:
        """Give back what a request holds; the row of one that is admitted is freed by whoever ends it."""
        self.held.remove(request)
        if not request.admitted:
            self.taken -= 1
            self.line.remove(request)
        request.image = request.pixels = None
        if self.audit is not None:
            self.audit.forget(request)
        if not self.held:
            self.change.notify_all()
            if self.state == "draining":
                self.work.notify_all()

    def _claim(self, request: Request) -> bool:
        """Settle between cancellation and end: True when it can no longer be cancelled. A future allows one call."""
        if not request.settled:
            request.settled = True
            return request.future.set_running_or_notify_cancel()
        return False

    # -- states --------------------------------------------------------------------------------------------------------

    def set_state(self, state: str, *, of: tuple[str, ...]) -> None:
        """Move on from one of the states `of`; from another, nothing changes."""
        with self.lock:
            if self.state in of:
                self.state = state
                self.work.notify_all()
                self.change.notify_all()

    def share(self, active: int, everywhere: int, workers: int) -> int:
        """How many of those that wait are for a thread with `active` of the images that are in slots `everywhere`."""
        return max(0, math.ceil((len(self.line) + everywhere) / workers) - active)
