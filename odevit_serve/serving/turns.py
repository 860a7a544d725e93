"""Engines of several models on one set of threads: one computes at a time, and each gets its share of the time.

`Shares` decides who is next and has no threads; `Turns` lets the engines' threads wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Member:
    """One engine among those that share the threads."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.used = 0.0  # seconds of computing, on a scale that only those who want to compute share
        self.last = 0.0  # seconds of the latest turn
        self._turns = turns
        self._granted = threading.Event()
        self._began = 0.0

    def take(self) -> None:
        """Wait for the turn; at once when it was kept."""
        if self._turns is not None:
            self._turns.take(self)

    def give(self, more: bool) -> None:
        """The end of a turn; with `more` work to do the turn is kept unless somebody else has computed less."""
        if self._turns is not None:
            self._turns.give(self, more)

    def leave(self) -> None:
        """Let go of a turn that was kept."""
        if self._turns is not None:
            self._turns.leave(self)


class Shares:
    """Whose turn it is: that of the member that has computed least, of those that want to.

    Of members that always want to compute, the times of two differ by no more than the longest turn. One that comes
    back has no credit for the time it was away; a debt of at most its own latest turn is remembered, so that it waits
    for a turn of each other and, of each, as long again as that debt.
    """

    def __init__(self) -> None:
        self.owner: Member | None = None
        self.waiting: list[Member] = []

    def ask(self, member: Member) -> None:
        """Join those that want to compute."""
        others = [*self.waiting, *([self.owner] if self.owner is not None else [])]
        if others:
            least = min(other.used for other in others)
            member.used = min(max(member.used, least), least + member.last)
        self.waiting.append(member)
        self._choose()

    def end(self, seconds: float, more: bool) -> None:
        """The owner's turn took so long; with `more` it wants another."""
        assert self.owner is not None
        member, self.owner = self.owner, None
        member.used += seconds
        member.last = seconds
        if more:
            self.waiting.insert(0, member)  # of two that have computed alike, it need not hand over
        self._choose()

    def drop(self) -> None:
        """The owner wants no other turn after all."""
        self.owner = None
        self._choose()

    def _choose(self) -> None:
        if self.owner is None and self.waiting:
            self.owner = min(self.waiting, key=lambda member: member.used)
            self.waiting.remove(self.owner)


class Turns:
    """The same for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._shares, self._clock, self._lock = Shares(), clock, threading.Lock()

    def join(self) -> Member:
        return Member(self)

    def take(self, member: Member) -> None:
        with self._lock:
            if self._shares.owner is not member:
                member._granted.clear()
                if member not in self._shares.waiting:
                    self._shares.ask(member)
            mine = self._shares.owner is member
        if not mine:
            member._granted.wait()
        member._began = self._clock()

    def give(self, member: Member, more: bool) -> None:
        with self._lock:
            if self._shares.owner is member:
                member._granted.clear()
                self._shares.end(self._clock() - member._began, more)
                self._wake(member)

    def leave(self, member: Member) -> None:
        with self._lock:
            if self._shares.owner is member:
                self._shares.drop()
                self._wake(member)
            elif member in self._shares.waiting:
                self._shares.waiting.remove(member)

    def _wake(self, member: Member) -> None:
        owner = self._shares.owner
        if owner is not None and owner is not member:
            owner._granted.set()
