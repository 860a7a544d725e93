"""One name of a server: the engine that answers now, those that finish, and how one follows another."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from .. import bundle
from ..errors import UserError
from .counters import Counters
from .engine import Engine
from .requests import Unavailable

log = logging.getLogger("odevit_serve.serving.models")
GRACE = 30.0  # seconds for an engine that was replaced to finish what it has
T = TypeVar("T")
Load = Callable[[str], Engine]  # of a source; not started


class NoModel(UserError):
    """There is no such model here, or it was unloaded."""


@dataclass
class Asleep:
    """What can be told of a model whose engine is not in memory, in the engine's words."""

    model: Any
    capacity: int
    queue: int
    overload: str
    limits: Any
    ready: bool = False
    alive: bool = True
    state: str = "unloaded"
    waiting: int = 0
    active: int = 0
    pending: int = 0
    audit: None = None
    stats: Counters = field(default_factory=lambda: Counters(0))

    @classmethod
    def of(cls, engine: Engine) -> Asleep:
        model = SimpleNamespace(config=engine.model.config, labels=engine.model.labels, path=engine.model.path)
        return cls(model, engine.capacity, engine.queue, engine.overload, engine.limits)


class Served:
    """One name: where its model comes from, the engine that answers, and those that are finishing."""

    def __init__(self, name: str, source: str, load: Load, engine: Engine | None = None):
        self.name, self.source, self._load = name, source, load
        self.engine = engine  # that answers now; None: unloaded or asleep
        self.reason = ""  # why the latest replacement failed, or why there is no engine
        self.wanted = engine is not None  # False: unloaded by the operator
        self.used = time.monotonic()
        self.signature = signature(source) if engine is not None else ()
        self.replaced = 0
        self.closing = False
        self._asleep: Asleep | None = None
        self._finishing: list[Engine] = []
        self._past = Counters(0)  # of engines that have ended
        self._changing = threading.RLock()  # one change of this name at a time
        self._counting = threading.Lock()

    @property
    def view(self) -> Any:
        """The engine, or what is known of it while it is not in memory."""
        return self.engine or self._asleep

    @property
    def state(self) -> str:
        """In the words of the repository extension."""
        if self.engine is None:
            return "READY" if self.wanted and self._asleep is not None else "UNAVAILABLE"
        return {"ready": "READY", "new": "LOADING", "warming": "LOADING"}.get(self.engine.state, "UNAVAILABLE")

    @property
    def ready(self) -> bool:
        """Whether requests are taken: also those that will wake it."""
        return self.state == "READY"

    @property
    def alive(self) -> bool:
        return self.engine is None or self.engine.alive

    @property
    def pending(self) -> int:
        return sum(engine.pending for engine in self._engines())

    @property
    def asleep(self) -> bool:
        return self.engine is None and self.wanted

    def stats(self) -> Counters:
        """What all engines of this name have counted."""
        with self._counting:
            total = Counters(0)
            for stats in (self._past, *(engine.stats for engine in self._engines())):
                total.merge(stats)
            return total

    def _engines(self) -> list[Engine]:
        return [*self._finishing, *([self.engine] if self.engine is not None else [])]

    def current(self) -> Engine:
        """The engine that answers now; one that sleeps is loaded first, which takes its time."""
        self.used = time.monotonic()
        engine = self.engine
        if engine is None and self.closing:
            raise Unavailable("the server is shutting down")
        if engine is None and self.wanted:
            engine = self._wake()
        if engine is None:
            raise NoModel(f"the model {self.name!r} is not loaded")
        return engine

    def submit(self, call: Callable[[Engine], T]) -> T:
        """Hand a request to the engine that answers now, also while that is being replaced."""
        while True:
            engine = self.current()
            try:
                return call(engine)
            except Unavailable:
                if self.engine is engine:
                    raise

    def replace(self, source: str | None = None) -> None:
        """Load anew, warm up, take over; raises and changes nothing when that cannot be."""
        with self._changing:
            wanted = source or self.source
            seen = signature(wanted)
            try:
                engine = self._prepare(wanted, seen)
            except Exception as error:
                self.reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                log.error("could not load", extra={"fields": {"model": self.name, "reason": self.reason}})
                raise UserError(self.reason) from error
            with self._counting:
                old, self.engine = self.engine, engine
                if old is not None:
                    self._finishing.append(old)
            self.source, self.signature, self.reason, self.wanted = wanted, seen, "", True
            self.used = time.monotonic()
            self.replaced += 1
            log.info("loaded", extra={"fields": {"model": self.name, "source": Path(wanted).name}})
        if old is not None:
            self._finish(old, wait=False)

    def _prepare(self, source: str, seen: Signature) -> Engine:
        """An engine that has warmed up, of files that stayed as they were meanwhile."""
        engine = self._load(source)
        try:
            engine.start()
            if signature(source) != seen:
                raise UserError(f"{source} changed while it was loaded")
        except UserError:
            engine.close(0.0)
            raise
        return engine

    def unload(self, reason: str = "unloaded", wanted: bool = False) -> None:
        """Refuse what comes from now on, finish what was accepted, and give the memory back."""
        with self._changing:
            with self._counting:
                old, self.engine = self.engine, None
                if old is not None:
                    self._asleep = Asleep.of(old)
                    self._finishing.append(old)
            self.wanted, self.reason = wanted, reason
            if old is not None:
                self._finish(old, wait=True)
                del old
                give_back()
                log.info("unloaded", extra={"fields": {"model": self.name, "reason": reason}})

    def sleep_if_unused(self, idle: float) -> bool:
        """Give the memory back when nobody has asked for `idle` seconds."""
        engine = self.engine
        if engine is None or engine.state != "ready" or engine.pending or time.monotonic() - self.used < idle:
            return False
        del engine
        self.unload(f"removed from memory after {idle:g} s without a request", wanted=True)
        return True

    def stop_accepting(self) -> None:
        self.closing = True
        if self.engine is not None:
            self.engine.stop_accepting()

    def close(self, grace: float) -> bool:
        self.closing = True
        until, clean = time.monotonic() + grace, True
        for engine in self._engines():
            clean &= engine.close(max(0.0, until - time.monotonic()))
        return clean

    def _wake(self) -> Engine | None:
        try:
            with self._changing:  # held on: of several who wake it, one loads it
                if self.engine is not None or not self.wanted:
                    return self.engine
                self.replace()
        except UserError as error:
            raise Unavailable(f"the model {self.name!r} could not be loaded again: {error}") from None
        return self.engine

    def _finish(self, engine: Engine, wait: bool) -> None:
        """Let an engine finish, then keep its counts and nothing else of it."""
        engine.stop_accepting()
        box = [engine]
        del engine

        def end() -> None:
            own = box.pop()
            own.close(GRACE)
            with self._counting:
                self._finishing.remove(own)
                self._past.merge(own.stats)
            del own
            trim()

        thread = threading.Thread(target=end, name="odevit-finish", daemon=True)
        thread.start()
        if wait:
            thread.join()


Signature = tuple[tuple[str, int, int], ...]


def signature(source: str) -> Signature:
    """What shows that the files of a model have changed: names, sizes and times; empty: not to be seen."""
    try:
        if source not in bundle.bundled() and not Path(source).exists():  # on the Hub: revisions do not change
            return ()
        path = bundle.find(source)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return tuple((f.name, s.st_size, s.st_mtime_ns) for f in files if f.is_file() for s in [f.stat()])
    except (OSError, UserError):
        return ()


def give_back() -> None:
    """Free what only cycles hold, and hand it back to the system."""
    gc.collect()
    trim()


def trim() -> None:
    """Hand freed memory back to the system, where the C library keeps it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
