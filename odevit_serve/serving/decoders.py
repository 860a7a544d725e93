"""The few threads on which pictures are decoded. Each model has a lane; lanes take turns, picture by picture."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger("odevit_serve.serving.decoders")
T = TypeVar("T")
Task = Callable[[], object]


class Decoders:
    """Threads that the first pictures start. One model's pictures do not hold up another's: with `n` lanes in use,
    the next picture of a lane is begun after at most `n - 1` of others."""

    def __init__(self, threads: int = 2):
        self.threads = threads
        self._ready: deque[Lane] = deque()  # lanes with something to do, each once
        self._wake = threading.Condition()
        self._started = self._idle = 0
        self._closed = False

    def lane(self) -> Lane:
        return Lane(self)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _put(self, lane: Lane, task: Task, cancel: Task | None) -> None:
        with self._wake:
            if self._closed or lane.closed:
                raise RuntimeError("the decoders are closed")
            if not lane.tasks:
                self._ready.append(lane)
            lane.tasks.append((task, cancel))
            if self._idle:
                self._wake.notify()
            elif self._started < self.threads:
                self._started += 1
                threading.Thread(target=self._run, name="odevit-decode", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._ready and not self._closed:
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                if self._closed:
                    return
                lane = self._ready.popleft()
                task, _ = lane.tasks.popleft()
                if lane.tasks:
                    self._ready.append(lane)
            try:
                task()
            except Exception:  # tasks tell their own failures; the thread outlives one that does not
                log.exception("decoding failed")
            del task, lane  # and what they hold, while waiting for the next

    def _empty(self, lane: Lane) -> None:
        with self._wake:
            lane.closed = True
            left, lane.tasks = lane.tasks, deque()
            if lane in self._ready:
                self._ready.remove(lane)
        for _, cancel in left:
            if cancel is not None:
                cancel()


class Lane:
    """The pictures of one model."""

    def __init__(self, decoders: Decoders):
        self.decoders = decoders
        self.tasks: deque[tuple[Task, Task | None]] = deque()
        self.closed = False

    def call(self, task: Task) -> None:
        """Call it on a thread, soon."""
        self.decoders._put(self, task, None)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """The same for a function whose result is wanted."""
        future: Future[T] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self.decoders._put(self, task, future.cancel)
        return future

    def close(self) -> None:
        """Forget what was not begun; futures of it are cancelled."""
        self.decoders._empty(self)
