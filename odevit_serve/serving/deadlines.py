"""Deadlines that hold wherever a request is: being decoded, in the queue, or inside a graph."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar


class Timed(Protocol):
    deadline: float

    @property
    def future(self) -> Future[Any]: ...


T = TypeVar("T", bound=Timed)
SPARE = 64  # entries of requests that have ended before they are cleared away


class Deadlines(Generic[T]):
    """Calls `due` for each request whose deadline has come, from a thread that the first one starts."""

    def __init__(self, clock: Callable[[], float], due: Callable[[T], None]):
        self._clock, self._due = clock, due
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()  # so that requests are never compared
        self._limit = SPARE
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, request: T) -> None:
        with self._wake:
            if self._closed:
                return
            if len(self._heap) >= self._limit:
                self._heap = [entry for entry in self._heap if not entry[2].future.done()]
                heapq.heapify(self._heap)
                self._limit = 2 * len(self._heap) + SPARE
            heapq.heappush(self._heap, (request.deadline, next(self._numbers), request))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="odevit-deadlines", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed, self._heap = True, []
            self._due = lambda request: None  # lets go of the engine
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not (self._heap and self._heap[0][0] <= self._clock()):
                    self._wake.wait(self._heap[0][0] - self._clock() if self._heap else None)
                if self._closed:
                    return
                request = heapq.heappop(self._heap)[2]
            if not request.future.done():
                self._due(request)  # without the lock: it takes that of the engine
