"""Threads of several models on one set of cores: so many compute at once, and each model gets its share of the time.

`Shares` decides who is next and has no threads; `Turns` lets the engines' threads wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Account:
    """What one model has computed."""

    def __init__(self) -> None:
        self.used = 0.0  # seconds, on a scale that only those who want to compute share
        self.last = 0.0  # seconds of the latest turn


class Member:
    """One thread of a model among those that share the cores. `background` says whether nobody waits for its work."""

    def __init__(
        self,
        turns: Turns | None = None,
        account: Account | None = None,
        background: Callable[[], bool] = lambda: False,
    ) -> None:
        self.account = account or Account()
        self.background = background
        self._turns = turns
        self._granted = threading.Event()
        self._began = 0.0

    @property
    def used(self) -> float:
        return self.account.used

    def take(self) -> None:
        """Wait for the turn; at once when it was kept."""
        if self._turns is not None:
            self._turns.take(self)

    @property
    def alone(self) -> bool:
        """Whether nobody else computes or wants to."""
        return self._turns is None or self._turns.alone

    def give(self, more: bool) -> None:
        """The end of a turn; with `more` work to do the turn is kept unless somebody else has computed less."""
        if self._turns is not None:
            self._turns.give(self, more)

    def leave(self) -> None:
        """Let go of a turn that was kept."""
        if self._turns is not None:
            self._turns.leave(self)


class Shares:
    """Whose turn it is: of the members that want to compute, those whose models have computed least.

    `at_once` members compute at a time. Of models that always have a member waiting, the times differ by no more than
    `at_once` times the longest turn. One that comes back has no credit for the time it was away; a debt of at most its
    own latest turn is remembered. Background work is chosen when nobody else wants to compute.
    """

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once
        self.owners: list[Member] = []
        self.waiting: list[Member] = []

    def ask(self, member: Member) -> list[Member]:
        """Join those that want to compute; gives those whose turn begins."""
        others = {id(other.account): other.account for other in (*self.waiting, *self.owners)}
        account = member.account
        if others and id(account) not in others:
            least = min(other.used for other in others.values())
            account.used = min(max(account.used, least), least + account.last)
        self.waiting.append(member)
        return self._choose()

    def end(self, member: Member, seconds: float, more: bool) -> list[Member]:
        """An owner's turn took so long; with `more` it wants another."""
        self.owners.remove(member)
        member.account.used += seconds
        member.account.last = seconds
        if more:
            self.waiting.insert(0, member)  # of two that have computed alike, it need not hand over
        return self._choose()

    def drop(self, member: Member) -> list[Member]:
        """A member wants no turn after all."""
        (self.owners if member in self.owners else self.waiting).remove(member)
        return self._choose()

    def _choose(self) -> list[Member]:
        chosen = []
        while self.waiting and len(self.owners) < self.at_once:
            member = min(self.waiting, key=lambda member: (member.background(), member.used))
            self.waiting.remove(member)
            self.owners.append(member)
            chosen.append(member)
        return chosen


class Turns:
    """The same for threads."""

    def __init__(self, at_once: int = 1, clock: Callable[[], float] = time.monotonic):
        self._shares, self._clock, self._lock = Shares(at_once), clock, threading.Lock()

    @property
    def at_once(self) -> int:
        return self._shares.at_once

    @property
    def alone(self) -> bool:
        return len(self._shares.owners) + len(self._shares.waiting) <= 1

    def join(self, account: Account, background: Callable[[], bool] = lambda: False) -> Member:
        return Member(self, account, background)

    def take(self, member: Member) -> None:
        with self._lock:
            if member not in self._shares.owners and member not in self._shares.waiting:
                self._grant(self._shares.ask(member))
            mine = member in self._shares.owners
            if not mine:
                member._granted.clear()
        if not mine:
            member._granted.wait()
        member._began = self._clock()

    def give(self, member: Member, more: bool) -> None:
        with self._lock:
            if member in self._shares.owners:
                self._grant(self._shares.end(member, self._clock() - member._began, more))

    def leave(self, member: Member) -> None:
        with self._lock:
            if member in self._shares.owners or member in self._shares.waiting:
                self._grant(self._shares.drop(member))

    def _grant(self, chosen: list[Member]) -> None:
        for member in chosen:
            member._granted.set()
