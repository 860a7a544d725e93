"""The queue: interactive before bulk, first come first served within each, and nobody starves."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from ..runtime.options import Priority


class Waiting(Protocol):
    @property
    def priority(self) -> str: ...


T = TypeVar("T", bound=Waiting)
SHARE = 4  # while bulk waits, one in so many that leave the queue is bulk


class RequestQueue(Generic[T]):
    """Not safe for threads: the engine holds its lock around it.

    A bulk request with `b` others before it leaves after at most `SHARE * (b + 1)` departures, an interactive one with
    `i` before it after at most `i + 1 + ceil((i + 1) / (SHARE - 1))`, whatever arrives later.
    """

    def __init__(self) -> None:
        self._interactive: deque[T] = deque()
        self._bulk: deque[T] = deque()
        self._passed = 0  # interactive ones that left while bulk waited, since bulk last had its turn

    def __len__(self) -> int:
        return len(self._interactive) + len(self._bulk)

    def push(self, item: T) -> None:
        self._own(item).append(item)

    def pop(self) -> T:
        if self._bulk and (not self._interactive or self._passed >= SHARE - 1):
            item, self._passed = self._bulk.popleft(), 0
        else:
            item = self._interactive.popleft()
            self._passed = self._passed + 1 if self._bulk else 0
        return item

    def remove(self, item: T) -> bool:
        """Take someone out of the middle; False when not here."""
        try:
            self._own(item).remove(item)
        except ValueError:
            return False
        return True

    def _own(self, item: T) -> deque[T]:
        return self._bulk if item.priority == Priority.BULK else self._interactive
