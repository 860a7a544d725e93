"""The audit of a running engine: some early answers are followed to full depth, and what that shows is acted on.

An image is drawn when it enters a slot, before anybody knows how deep it goes, together with a place in a bounded line;
where there is none, it is counted as dropped. One that exits early is answered at once, parked, and continued in a slot
that nobody waits for; one that takes all steps agrees with itself and gives its place back. So which images are audited
depends on chance and on the load, and never on how they ended. The mathematics is in `guarantee.audit`.

The threads that compute call `govern`, `resume`, `make_room` and `take`, each with its own slots; `forget`, `clear` and
`describe` may be called by others.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from ..errors import UsageError
from ..guarantee.audit import Betting, ThresholdSearch, candidates
from ..guarantee.audit_file import Audited, AuditWriter, head
from ..runtime.compute import Compute
from ..runtime.exits import Depth, ExitReason
from ..runtime.jobs import Job, Outcome

log = logging.getLogger("odevit_serve.serving.audit")
ACTIONS = ("warn", "tighten", "full")
PLACES = 64  # images that are drawn and not yet followed to the end
REMEMBERED = 2000  # recordings whose scores give the thresholds of a search
HOLDS, REJECTED, TIGHTENED = "holds", "rejected", "tightened"


@dataclass(frozen=True)
class AuditOptions:
    """`serve --audit RATE --on-violation ACTION --audit-file FILE`."""

    rate: float
    on_violation: str = "warn"
    file: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UsageError(f"audit must be a fraction above 0 and at most 1, not {self.rate:g}")
        if self.on_violation not in ACTIONS:
            raise UsageError(f"unknown on-violation {self.on_violation!r}: choose one of {', '.join(ACTIONS)}")


@dataclass(frozen=True)
class _Draw:
    """A drawn image: its job as it was asked for, what it was answered by, and how many violations came before."""

    job: Job
    depth: Depth
    violations: int


@dataclass(eq=False)
class _Ticket:
    """An early answer that waits for a slot to be continued in, or is in one."""

    draw: _Draw
    parked: Any
    steps: int
    answer: int
    finite: bool


class Audit:
    """Of one engine. `own` is the depth of a request that asks for nothing: what the guarantee was proven for."""

    def __init__(self, options: AuditOptions, config: Config, core: Compute, own: Depth):
        proof = config.exit.calibration
        if proof is None or not own.guaranteed or own.rule.name == "fixed":
            raise UsageError(f"{config.name} has no guarantee of early exits here that could be audited: calibrate it")
        if proof.target != "agreement":
            raise UsageError(f"the proof of {config.name} is about {proof.target}: an audit tests agreement only")
        if options.on_violation == "tighten" and not core.anytime:
            raise UsageError("tighten needs the scores of every step: serve the bundle, or choose warn or full")
        self.options, self.core, self.proof = options, core, proof
        self.own = self.depth = own
        self.state = HOLDS
        self.drawn = self.audited = self.differences = self.violations = 0
        self.dropped: Counter[str] = Counter()  # by reason
        self.unwritten = 0
        self.test = Betting(proof.epsilon, proof.delta)
        self.search: ThresholdSearch | None = None
        self._full = replace(own, threshold=math.inf, lyapunov=math.inf, guaranteed=False)
        self._drawn: dict[Any, _Draw] = {}  # in slots for the first time
        self._line: deque[_Ticket] = deque()
        self._running: dict[_Ticket, Compute] = {}  # and in whose slots
        self._scores: deque[np.ndarray] = deque(maxlen=REMEMBERED)
        self._random = random.Random(options.seed)
        self._lock = threading.RLock()
        self._stopped = False
        self._writer = None
        if options.file is not None:
            self._writer = AuditWriter(Path(options.file), head(config, proof.setting))

    # -- called by the engine -----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Images that could be continued now."""
        return 0 if self._stopped else len(self._line)

    @property
    def pending(self) -> int:
        """Images that are drawn and not yet followed to the end."""
        return len(self._drawn) + len(self._line) + len(self._running)

    @property
    def recovering(self) -> bool:
        """Full depth until a threshold is proven: every image is a recording, and none needs to be continued."""
        return self.state == REJECTED and self.search is not None

    def govern(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs with the depth that is in force, and marked where they are drawn."""
        return [self._governed(job) if job.depth == self.own else job for job in jobs]

    def _governed(self, job: Job) -> Job:
        job = replace(job, depth=self.depth)
        idle = self._stopped or (self.state == REJECTED and self.options.on_violation == "full")
        if idle or job.deadline < math.inf or not (self.recovering or self._random.random() < self.options.rate):
            return job
        with self._lock:
            self.drawn += 1
            if not self.recovering and self.pending >= PLACES:
                self.dropped["line full"] += 1
                return job
            self._drawn[job.key] = _Draw(job, self.depth, self.violations)
        return replace(job, trace=job.trace or self.core.anytime, park=True)

    def take(self, outcome: Outcome) -> Outcome | None:
        """An outcome as it is to be answered; None when it was answered before and this is its continuation."""
        key = outcome.job.key
        with self._lock:
            if isinstance(key, _Ticket):
                del self._running[key]
                self._record(key.draw, key.steps, key.answer, outcome, key.finite)
                return None
            draw = self._drawn.pop(key, None)
            if draw is None:
                return outcome
            answer, finite = int(outcome.logits.argmax()), bool(np.isfinite(outcome.logits).all())
            if outcome.reason is ExitReason.HORIZON:
                self._record(draw, outcome.steps, answer, outcome, finite)
            elif self._stopped:
                self.dropped["shutdown"] += 1
            else:
                self._line.append(_Ticket(draw, outcome.parked, outcome.steps, answer, finite))
        return replace(outcome, job=draw.job, trace=outcome.trace if draw.job.trace else (), parked=None)

    def running(self, core: Compute) -> int:
        """How many images are being continued in the slots of `core`."""
        return sum(own is core for own in list(self._running.values()))

    def resume(self, core: Compute) -> None:
        """Continue images in slots that are free after everybody who waits has been admitted.

        A quarter of the slots at most, and where a run cannot be interrupted, only while nobody is in it.
        """
        most = max(1, core.capacity // 4) if core.anytime else int(not core.active)
        with self._lock:
            while self.waiting and core.free and self.running(core) < most:
                ticket = self._line.popleft()
                self._running[ticket] = core
                core.resume(ticket.parked, Job(ticket, self._full, trace=core.anytime))

    def make_room(self, core: Compute, wanted: int) -> None:
        """Free up to `wanted` slots that continued images are in; those begin again from where they were parked."""
        with self._lock:
            here = [ticket for ticket, own in self._running.items() if own is core]
            for ticket in here[::-1][: max(0, wanted)]:
                core.cancel(ticket)
                del self._running[ticket]
                self._line.appendleft(ticket)

    def forget(self, key: Any, reason: str = "cancelled") -> None:
        """An image has left its slot without an outcome."""
        with self._lock:
            known: dict[Any, Any] = self._running if isinstance(key, _Ticket) else self._drawn
            if known.pop(key, None) is not None:
                self.dropped[reason] += 1

    def stop(self) -> None:
        """The engine is shutting down: what is not continued yet will not be."""
        with self._lock:
            self._stopped = True
            self.dropped["shutdown"] += len(self._line)
            self._line.clear()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    # -- what the recordings say --------------------------------------------------------------------------------------

    def _record(self, draw: _Draw, steps: int, answer: int, whole: Outcome, finite: bool) -> None:
        record = Audited(
            steps,
            answer,
            int(whole.logits.argmax()),
            finite and bool(np.isfinite(whole.logits).all()),
            tuple(step.score for step in whole.trace),
            tuple(int(step.logits.argmax()) for step in whole.trace),
            tuple(step.lyapunov_times for step in whole.trace),
        )
        self.audited += 1
        self.differences += record.differs
        self._write(record)
        self._judge(draw, record)

    def _write(self, record: Audited) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(record)
        except OSError as error:
            if not self.unwritten:
                log.warning(f"audited images cannot be written to {self.options.file}: {error.strerror}")
            self.unwritten += 1

    def _judge(self, draw: _Draw, record: Audited) -> None:
        if record.scores:
            self._scores.append(np.array(record.scores))
        if self.search is not None and draw.violations == self.violations and record.scores:
            self.search.add(np.array(record.scores), np.array(record.answers), record.finite)
            self._tighten(self.search)
        if draw.depth is not self.depth or self.recovering:
            return  # answered by a policy that is no longer in force, or by none
        self.test.add(record.differs)
        if self.test.rejected and self.state != REJECTED:
            self._violated()

    def _violated(self) -> None:
        before, self.state, self.violations = self.depth, REJECTED, self.violations + 1
        action = self.options.on_violation
        self.depth = replace(before, guaranteed=False) if action == "warn" else self._full
        if action == "tighten":
            grid = candidates(list(self._scores), before.threshold)
            self.search = ThresholdSearch(grid, self.proof.epsilon, self.proof.delta)
        fields = {"audited": self.test.images, "differences": self.test.differences, "action": action}
        log.warning(self.sentence, extra={"fields": fields})

    def _tighten(self, search: ThresholdSearch) -> None:
        """Move to the lowest threshold that is proven, and test it anew."""
        found = search.proven
        if found is None or (self.state == TIGHTENED and found == self.depth.threshold):
            return
        first = self.state != TIGHTENED
        self.state = TIGHTENED
        self.depth = replace(self._full, threshold=found, guaranteed=True)
        if first:
            self.test = Betting(self.proof.epsilon, self.proof.delta)
        log.warning(self.sentence, extra={"fields": {"threshold": found, "images": search.images}})

    def clear(self) -> None:
        """By an operator: the calibrated policy again, and a new test of it."""
        with self._lock:
            self.state, self.depth, self.search = HOLDS, self.own, None
            self.test = Betting(self.proof.epsilon, self.proof.delta)
        log.warning("the audit was cleared: the calibrated policy is in force and is tested anew")

    # -- in words and numbers -----------------------------------------------------------------------------------------

    @property
    def coverage(self) -> float:
        """Of the images drawn whose audit has ended, how many were followed to the end."""
        ended = self.audited + sum(self.dropped.values())
        return self.audited / ended if ended else 1.0

    @property
    def sentence(self) -> str:
        proof, test = self.proof, self.test
        claim = f"early answers differ from full depth on at most {proof.epsilon:.2%} of images"
        if self.state == HOLDS:
            return f"not rejected so far at level {proof.delta:g}: {claim}"
        if self.state == TIGHTENED:
            images = self.search.images if self.search else 0
            return (
                f"the calibrated threshold was rejected; {self.depth.threshold:.4g} in place of "
                f"{self.own.threshold:.4g} is proven by {images:,} audited images: {claim}"
            )
        now = {
            "warn": "answers continue as before, without the guarantee",
            "full": "every image gets full depth until this is cleared",
            "tighten": "every image gets full depth until the recordings prove a threshold",
        }[self.options.on_violation]
        return (
            f"rejected at level {proof.delta:g} after {test.images:,} audited images, {test.differences:,} of which "
            f"differ: {claim}; {now}"
        )

    def describe(self) -> dict[str, Any]:
        """For `/v1/model`."""
        with self._lock:
            low, high = self.test.interval()
            return {
                "state": self.state,
                "sentence": self.sentence,
                "rate": self.options.rate,
                "on_violation": self.options.on_violation,
                "epsilon": self.proof.epsilon,
                "delta": self.proof.delta,
                "threshold": self.depth.threshold if self.depth.threshold < math.inf else None,
                "tested": {"images": self.test.images, "differ": self.test.differences},
                "disagreement": {"low": low, "high": high},
                "evidence": self.test.evidence,
                "rejects_at": 1 / self.proof.delta,
                "violations": self.violations,
                "drawn": self.drawn,
                "audited": self.audited,
                "coverage": self.coverage,
                "dropped": dict(self.dropped),
            }
