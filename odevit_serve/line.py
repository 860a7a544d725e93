"""The waiting line: interactive before bulk, first come first served within each, and nobody starves."""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Generic, Protocol, TypeVar


class Priority(enum.StrEnum):
    INTERACTIVE = "interactive"
    BULK = "bulk"


class Waiting(Protocol):
    deadline: float

    @property
    def priority(self) -> str: ...


T = TypeVar("T", bound=Waiting)
SHARE = 4  # while bulk waits, one in so many that leave the line is bulk


class Line(Generic[T]):
    """Not safe for threads: the engine holds its lock around it.

    A bulk request with `b` others before it leaves after at most `SHARE * (b + 1)` departures, an interactive one with
    `i` before it after at most `i + 1 + ceil((i + 1) / (SHARE - 1))`, whatever arrives later.
    """

    def __init__(self) -> None:
        self._interactive: deque[T] = deque()
        self._bulk: deque[T] = deque()
        self._passed = 0  # interactive ones that left while bulk waited, since bulk last had its turn
        self._timed = 0

    def __len__(self) -> int:
        return len(self._interactive) + len(self._bulk)

    def push(self, item: T) -> None:
        self._own(item).append(item)
        self._timed += item.deadline < math.inf

    def pop(self) -> T:
        if self._bulk and (not self._interactive or self._passed >= SHARE - 1):
            item, self._passed = self._bulk.popleft(), 0
        else:
            item = self._interactive.popleft()
            self._passed = self._passed + 1 if self._bulk else 0
        self._timed -= item.deadline < math.inf
        return item

    def remove(self, item: T) -> bool:
        """Take someone out of the middle; False when not here."""
        try:
            self._own(item).remove(item)
        except ValueError:
            return False
        self._timed -= item.deadline < math.inf
        return True

    def expire(self, now: float) -> list[T]:
        """Take out all whose deadline has passed."""
        if not self._timed:
            return []
        late = [item for own in (self._interactive, self._bulk) for item in own if item.deadline <= now]
        for item in late:
            self.remove(item)
        return late

    def _own(self, item: T) -> deque[T]:
        return self._bulk if item.priority == Priority.BULK else self._interactive
