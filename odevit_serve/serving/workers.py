"""The threads that compute: each admits requests into slots of its own, steps, and hands back what has ended.

On a CPU an image costs about the same in a batch of any size, so several threads with a few slots each do more than one
whose graph is spread over all cores: nobody waits for the slowest part of each operation, and what Python does between
two steps of one falls into the steps of the others. A thread that is alone uses all cores for its step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..runtime.compute import Compute
from ..runtime.exits import Depth
from ..runtime.jobs import Job, Outcome
from .pending import RUNNING, Pending
from .requests import Request, StepFailed
from .turns import Account, Turns

log = logging.getLogger("odevit_serve.serving.engine")


class Workers:
    """All of one engine."""

    def __init__(
        self,
        cores: Sequence[Compute],
        pending: Pending,
        turns: Turns,
        own: Depth,
        shape: tuple[int, ...],
        answer: Callable[[Request, Outcome], None],
        lowers: bool,
    ):
        self.pending, self.own, self.shape, self.answer, self.lowers = pending, own, shape, answer, lowers
        account = Account()
        self.all = [_Worker(self, core, turns, account) for core in cores]
        self._warm = self._ended = 0

    def start(self) -> None:
        for worker in self.all:
            worker.thread.start()

    @property
    def active(self) -> int:
        return sum(worker.core.active for worker in self.all)

    @property
    def alive(self) -> bool:
        return all(worker.thread.is_alive() for worker in self.all)

    def join(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        for worker in self.all:
            if worker.thread.is_alive() and worker.thread is not threading.current_thread():
                worker.thread.join(max(0.0, until - time.monotonic()))
        if not any(worker.thread.is_alive() for worker in self.all):
            # What refers back to the engine is let go of: its graphs end with the last reference to it, and do not wait
            # for the garbage collector, which may not come for many replacements.
            vars(self).pop("answer", None)
            for worker in self.all:
                vars(worker).pop("team", None)
                vars(worker).pop("turns", None)

    def warmed_up(self) -> None:
        """One of them is ready; the last opens the engine."""
        with self.pending.lock:
            self._warm += 1
            if self._warm == len(self.all):
                self.pending.set_state("ready", of=("warming",))

    def ended(self) -> None:
        """One of them has; the last closes the audit."""
        with self.pending.lock:
            self._ended += 1
            last = self._ended == len(self.all)
        if last and self.pending.audit is not None:
            self.pending.audit.close()


class _Worker:
    """One thread with its slots."""

    def __init__(self, team: Workers, core: Compute, turns: Turns, account: Account):
        self.team, self.core, self.pending = team, core, team.pending
        self.turns = turns.join(account, self._in_background)
        self.gone: list[Request] = []  # ended while in a slot, by cancellation or deadline
        self.thread = threading.Thread(target=self._run, name="odevit-engine", daemon=True)

    def let_go(self, request: Request) -> None:
        self.gone.append(request)

    def _run(self) -> None:
        try:
            self._warm_up()
            self.team.warmed_up()
        except Exception:
            log.exception("warm-up failed")
            self.turns.leave()
            self.pending.set_state("failed", of=("warming",))
        with self.pending.lock:
            self.pending.work.wait_for(lambda: self.pending.state != "warming")
        while self.pending.state in RUNNING:
            try:
                self._turn()
            except Exception as error:  # a fault of the engine itself: the images in it are lost, the engine is not
                log.exception("an error in the engine")
                self._fail_active(f"the engine failed ({type(error).__name__}: {error})")
        self.turns.leave()
        self._fail_active("the server shut down before the answer was ready")
        self.team.ended()

    def _warm_up(self) -> None:
        """Run each of a few batch sizes, so that no request pays for the first allocation."""
        for alone in (True, False):
            rows = self.core.capacity
            while rows and (alone or len(self.team.all) > 1):
                if self.pending.state != "warming":
                    return
                self.turns.take()
                self.core.alone = alone
                self.core.admit(np.zeros((rows, *self.team.shape), np.float32), [Job(None, self.team.own)] * rows)
                self.core.step()
                self.core.clear()
                self.turns.give(more=False)
                rows //= 2

    def _turn(self) -> None:
        if not self._wait():
            return
        self.turns.take()
        try:
            self.core.alone = self.turns.alone
            ready = self._take()
            if ready:
                self._admit(ready)
            if self.pending.audit is not None:
                self.pending.audit.resume(self.core)
            if self.core.active:
                self._step()
        finally:
            self.turns.give(more=bool(self.core.active or self.pending.line))

    def _in_background(self) -> bool:
        """Whether all there is to do here is to follow answered images to full depth."""
        audit = self.pending.audit
        return audit is not None and not self.pending.line and audit.running(self.core) >= self.core.active

    def _wait(self) -> bool:
        """Wait for work; False when the engine is to end."""
        pending = self.pending
        with pending.lock:
            while not (self.core.active or pending.line or self.gone or self._unaudited) and pending.state in RUNNING:
                if pending.state == "draining" and not pending.held:
                    pending.set_state("closed", of=("draining",))
                    return False
                self.turns.leave()
                pending.work.wait()
            return pending.state in RUNNING

    @property
    def _unaudited(self) -> int:
        """Images that are answered and wait for their audit."""
        return 0 if self.pending.audit is None else self.pending.audit.waiting

    def _take(self) -> list[Request]:
        """The requests to admit."""
        core, audit = self.core, self.pending.audit
        with self.pending.lock:
            gone, self.gone = self.gone, []
            for request in gone:
                core.cancel(request)
            wanted = self.pending.share(core.active, self.team.active, len(self.team.all))
            if audit is not None:
                for request in gone:
                    audit.forget(request)
                audit.make_room(core, min(wanted, len(self.pending.line)) - core.free)
            ready, fill = self.pending.take(min(core.free, wanted), self, core.clock(), core.anytime)
        if self.team.lowers:
            for request in ready:
                request.lower(fill, core.least_steps)
        return ready

    def _admit(self, requests: list[Request]) -> None:
        with self.pending.lock:  # one that was cancelled since it left the queue has no pixels any more
            pairs = [(request, request.pixels) for request in requests if request in self.pending.held]
        if not pairs:
            return
        jobs = [Job(r, r.depth, r.deadline, r.options.trace, r.options.keep) for r, _ in pairs]
        if self.pending.audit is not None:
            jobs = self.pending.audit.govern(jobs)
        began = self.core.clock()
        try:
            self.core.admit(np.stack([pixels for _, pixels in pairs if pixels is not None]), jobs)
        except Exception as error:
            log.exception("admitting images failed")
            for request, _ in pairs:
                self.pending.fail(request, StepFailed(f"the stem failed ({_brief(error)})"), "step failed")
            return
        took = self.core.clock() - began
        for request, _ in pairs:
            request.pixels, request.stem_seconds = None, took

    def _step(self) -> None:
        rows, began, audit = self.core.active, time.monotonic(), self.pending.audit
        try:
            outcomes = self.core.step()
        except Exception as error:
            log.exception("a step failed")
            self._fail_active(f"a step failed ({_brief(error)})")
            return
        with self.pending.lock:
            self.pending.stats.step(rows, time.monotonic() - began)
        for outcome in outcomes if audit is None else map(audit.take, outcomes):
            if outcome is not None:
                self.team.answer(outcome.job.key, outcome)

    def _fail_active(self, message: str) -> None:
        for job in self.core.clear():
            if isinstance(job.key, Request):
                self.pending.fail(job.key, StepFailed(message), "step failed")
            elif self.pending.audit is not None:
                self.pending.audit.forget(job.key, "failed")


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
