"""Several models in one process: loaded, replaced, unloaded and put to sleep while requests go on.

    models = Repository(loader("cpu", threads=2, trust=False)).open(["cifar10", "mine=runs/mine"])
    models.find("mine").submit(lambda engine: engine.submit(picture))

A replacement is loaded and warmed up beside the engine it replaces, and takes its place in one assignment, between two
steps of the old one, which finishes what it has accepted. What cannot be loaded changes nothing.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import bundle
from ..errors import UsageError, UserError
from ..runtime.model import AT_ONCE, load
from .decoders import Decoders
from .engine import Engine
from .served import Load, NoModel, Served, Signature, signature
from .turns import Turns

__all__ = ["NoModel", "Repository", "Served", "loader"]
log = logging.getLogger("odevit_serve.serving.models")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Repository:
    """The models of a server, by name; the first answers where none is named."""

    def __init__(self, load: Load, folder: Path | None = None):
        self._load, self.folder = load, folder
        self._served: dict[str, Served] = {}
        self._changing = threading.Lock()
        self._ended = threading.Event()

    @classmethod
    def of(cls, engine: Engine) -> Repository:
        """A repository of one engine that stays."""
        own = cls(_refuse)
        own._add(Served(engine.model.config.name, str(engine.model.path), _refuse, engine))
        return own

    def open(self, sources: Iterable[str]) -> Repository:
        """Load `SOURCE` or `NAME=SOURCE`; what is wrong with one is told before any is served."""
        for given in sources:
            name, source = parse(given)
            engine = self._load(source)
            self._add(Served(name or engine.model.config.name, source, self._load, engine))
        return self

    def _add(self, served: Served) -> None:
        if served.name in self._served:
            raise UsageError(f"two models are called {served.name!r}: name one of them, as in other={served.source}")
        self._served[served.name] = served

    @property
    def first(self) -> Served:
        return next(iter(self._served.values()))

    @property
    def names(self) -> list[str]:
        return list(self._served)

    def __iter__(self) -> Iterator[Served]:
        return iter(list(self._served.values()))

    def find(self, name: str | None = None) -> Served:
        served = self.first if name is None else self._served.get(name)
        if served is None:
            known = ", ".join(repr(own) for own in self.names)
            raise NoModel(f"no model {str(name)[:80]!r}: this server has {known}")
        return served

    def index(self) -> list[Mapping[str, str]]:
        """Every model that is here or could be loaded."""
        rows = [{"name": s.name, "version": "1", "state": s.state, "reason": s.reason} for s in self]
        known = {row["name"] for row in rows}
        others = [name for name in self._in_folder() if name not in known]
        return [*rows, *({"name": n, "version": "1", "state": "UNAVAILABLE", "reason": "not loaded"} for n in others)]

    def load(self, name: str) -> None:
        """Load a model of the folder, or load one that is here anew."""
        with self._changing:
            served = self._served.get(name)
            if served is None:
                if name not in self._in_folder():
                    raise NoModel(f"no model {name[:80]!r} in the repository")
                assert self.folder is not None
                served = Served(name, str(self.folder / name), self._load)
                served.replace()
                self._served[name] = served
                return
        served.replace()

    def unload(self, name: str) -> None:
        self.find(name).unload()

    def _in_folder(self) -> list[str]:
        if self.folder is None or not self.folder.is_dir():
            return []
        found = (path.parent for path in self.folder.glob(f"*/{bundle.CONFIG}"))
        return sorted(path.name for path in found if NAME.fullmatch(path.name))

    # -- the life of a server: the same calls as for a single engine ---------------------------------------------------

    def start(self) -> None:
        for served in self:
            if served.engine is not None and served.engine.state == "new":
                served.engine.start(wait=False)

    @property
    def ready(self) -> bool:
        return not self._ended.is_set() and all(served.ready for served in self if served.wanted)

    @property
    def alive(self) -> bool:
        return all(served.alive for served in self)

    @property
    def state(self) -> str:
        if self._ended.is_set():
            return "draining"
        return next((s.engine.state for s in self if s.engine is not None and not s.engine.ready), "ready")

    @property
    def pending(self) -> int:
        return sum(served.pending for served in self)

    def stop_accepting(self) -> None:
        self._ended.set()
        for served in self:
            served.stop_accepting()

    def close(self, grace: float = 30.0) -> bool:
        self.stop_accepting()
        until, clean = time.monotonic() + grace, True
        for served in self:
            clean &= served.close(max(0.0, until - time.monotonic()))
        return clean

    def look_after(self, watch: bool, idle: float | None, every: float = 1.0) -> None:
        """Replace models whose files have changed, and put unused ones to sleep, on a thread until the end."""
        if watch or idle is not None:
            keeper = threading.Thread(target=self._keep, args=(watch, idle, every), name="odevit-models", daemon=True)
            keeper.start()

    def _keep(self, watch: bool, idle: float | None, every: float) -> None:
        seen = {served.name: served.signature for served in self}
        while not self._ended.wait(every):
            for served in self:
                try:
                    if idle is not None:
                        served.sleep_if_unused(idle)
                    if watch and served.engine is not None:
                        self._watch(served, seen)
                except UserError:
                    pass  # told by `replace`; the old one stays
                except Exception:
                    log.exception("looking after a model failed")

    def _watch(self, served: Served, seen: dict[str, Signature]) -> None:
        """A change is taken up when the files have then been the same for two looks; a failure is not tried again."""
        now, before = signature(served.source), seen.get(served.name)
        seen[served.name] = now
        if now and now == before and now != served.signature:
            served.signature = now
            served.replace()


def loader(device: str, threads: int | None, trust: bool, **settings: Any) -> Load:
    """Makes engines that share one set of threads, of `Engine`'s settings."""
    decoders, turns = Decoders(), Turns(min(threads or os.cpu_count() or 1, AT_ONCE))

    def engine(source: str) -> Engine:
        model = load(source, device, threads, trust)
        model.open_all()
        return Engine(model, decoders=decoders, turns=turns, **settings)

    return engine


def parse(given: str) -> tuple[str | None, str]:
    """`NAME=SOURCE`, or a source alone."""
    name, equals, source = given.partition("=")
    if not equals or not NAME.fullmatch(name):
        return None, given
    if not source:
        raise UsageError(f"{given!r} names no model: NAME=BUNDLE")
    return name, source


def _refuse(source: str) -> Engine:
    raise UserError("this model cannot be loaded again: it was given as an engine")
