"""The recordings of audited images on disk: scores and answers after every step, no pixels and no logits.

JSON lines: a head that says what the scores were made by, then one line an image. The file is bounded: when it is full
it becomes FILE.1, in place of the one before, and a new one begins. A server that starts again goes on in the same file
with a head of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..config import Config, Setting
from ..errors import UserError
from ..runtime.dynamics import Floats
from .recording import Followed, filled

FORMAT = 1
RECORDS = 50_000  # images in one of the two files; some 20 MB at 8 steps


@dataclass(frozen=True)
class Audited:
    """One audited image. Without `scores` (a single file shows none) it only counts."""

    steps: int  # at which it was answered
    answer: int
    full: int  # the answer at full depth
    finite: bool = True
    scores: tuple[float, ...] = ()  # of the rule, after each step to full depth
    answers: tuple[int, ...] = ()
    lyapunov_times: tuple[float, ...] = ()

    @property
    def differs(self) -> bool:
        return self.answer != self.full or not self.finite


def head(config: Config, setting: Setting | None) -> dict[str, Any]:
    """What the scores of a file depend on."""
    return {
        "odevit_audit": FORMAT,
        "model": config.name,
        "rule": config.exit.rule,
        "travel": list(config.exit.travel),
        "setting": None if setting is None else dataclasses.asdict(setting),
    }


def rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


class AuditWriter:
    """Appends records, a line each."""

    def __init__(self, path: Path, head: dict[str, Any], records: int = RECORDS):
        self.path, self.head, self.records = path, json.dumps(head), records
        self._count = 0
        try:
            if path.exists():
                _end_whole(path)
                with path.open(encoding="utf-8") as old:
                    self._count = sum(1 for _ in old)
            self._file = self._open("a")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be written: {error}") from None

    def _open(self, mode: str) -> IO[str]:
        file = self.path.open(mode, encoding="utf-8")
        file.write(self.head + "\n")
        file.flush()
        return file

    def write(self, record: Audited) -> None:
        if self._count >= self.records:
            self._file.close()
            self.path.replace(rotated(self.path))
            self._file, self._count = self._open("w"), 0
        data = dataclasses.asdict(record)
        for name in ("scores", "lyapunov_times"):
            data[name] = [value if math.isfinite(value) else None for value in data[name]]
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()
        self._count += 1

    def close(self) -> None:
        self._file.close()


def _end_whole(path: Path) -> None:
    """Take off a last line that was cut off: a server that was killed while it wrote leaves one."""
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


@dataclass(frozen=True)
class AuditRecording(Followed):
    """Audited images as calibration reads them; arrays are [n,N]."""

    scores: Floats  # of the rule that the server had
    given: np.ndarray  # answers
    passed: Floats  # Lyapunov times
    whole: np.ndarray  # [n]: with numbers to the end
    ended: np.ndarray  # [n]: the number of steps

    @property
    def lengths(self) -> np.ndarray:
        return self.ended

    @property
    def answers(self) -> np.ndarray:
        return self.given

    @property
    def lyapunov_times(self) -> Floats:
        return self.passed

    @property
    def finite(self) -> np.ndarray:
        return self.whole

    def subset(self, rows: np.ndarray) -> AuditRecording:
        own = (self.scores, self.given, self.passed, self.whole, self.ended)
        return AuditRecording(*(array[rows] for array in own))


def read(path: Path, wanted: dict[str, Any], limit: int | None = None) -> AuditRecording:
    """The images of a file, and of the one before it, that belong to the model `wanted` describes; the newest last."""
    found: list[Audited] = []
    others = 0
    for part in (rotated(path), path):
        if part.exists() or part == path:
            own, other = _read(part, wanted)
            found += own
            others += other
    found = [record for record in found if record.scores]
    if not found:
        why = f"its {others:,} images were answered by another model, rule or setting" if others else "it has no scores"
        raise UserError(f"{path} has no recordings for this bundle: {why}")
    found = found[-limit:] if limit else found

    lengths = [len(record.scores) for record in found]

    def column(name: str) -> Floats:
        values = [[np.nan if v is None else v for v in getattr(record, name)] for record in found]
        return np.array([filled(row, max(lengths)) for row in values])

    scores = column("scores")
    return AuditRecording(
        np.where(np.isnan(scores), -np.inf, scores),
        column("answers").astype(int),
        np.nan_to_num(column("lyapunov_times"), nan=np.inf),
        np.array([record.finite for record in found]),
        np.array(lengths),
    )


def _read(path: Path, wanted: dict[str, Any]) -> tuple[list[Audited], int]:
    """The records that follow a head as it is wanted, and how many follow another."""
    own: list[Audited] = []
    others, ours = 0, False
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if not line.endswith("\n"):
                    break  # being written, or cut off
                data = json.loads(line)
                if "odevit_audit" in data:
                    ours = {**data, "model": ""} == {**wanted, "model": ""}
                elif ours:
                    own.append(Audited(**data))
                else:
                    others += 1
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not an audit recording: {error}") from None
    return own, others
