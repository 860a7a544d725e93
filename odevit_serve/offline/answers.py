"""Answers of many pictures in one file, JSONL or Parquet, written as they come and continued after an interruption.

Rows are first appended to a journal, one JSON object a line; a row that is there whole is never computed again. For
JSONL the journal is the file itself. A Parquet file is made of its journal at the end, and opened again into one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..errors import UsageError, UserError
from ..files import atomic
from ..runtime.results import Failure, Result

FORMS = (".jsonl", ".parquet")
ROWS = 4096  # of a Parquet file that are held at once
SYNC = 256  # rows after which the journal is on the disk


def row_of(result: Result, top: int) -> dict[str, Any]:
    """One answer as flat data, the same in both forms; what differs between two runs, such as times, is left out."""
    row: dict[str, Any] = dict.fromkeys(FIELDS)
    row["source"] = result.source
    if isinstance(result, Failure):
        return {**row, "error": result.message}
    best = result.top(top)
    return {
        **row,
        "label": result.label,
        "probability": result.probability,
        "labels": [label for label, _ in best],
        "probabilities": [value for _, value in best],
        "steps": result.steps,
        "full_steps": result.full_steps,
        "exit": result.exit.short,
        "rule": result.rule,
        "margin": result.margin,
        "exponent": result.exponent,
        "guaranteed": result.guaranteed,
        "unsure": result.unsure,
    }


FIELDS = {
    "source": "string", "label": "string", "probability": "double", "labels": "strings", "probabilities": "doubles",
    "steps": "int", "full_steps": "int", "exit": "string", "rule": "string", "margin": "double", "exponent": "double",
    "guaranteed": "bool", "unsure": "bool", "error": "string",
}  # fmt: skip


class AnswersFile:
    """Use as a context; `done` are the sources that have a row, `write` adds one, `finish` makes the file."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        if path.suffix not in FORMS:
            raise UsageError(f"{path} must end in {' or '.join(FORMS)}")
        self.path, self.settings = path, settings
        self.journal = path if path.suffix == ".jsonl" else path.with_name(path.name + ".journal.jsonl")
        self.done: set[str] = set()
        self.failed = 0
        self._out: TextIO | None = None
        self._unsynced = 0

    def __enter__(self) -> AnswersFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._check_settings()
            if self.path.suffix == ".parquet" and self.path.exists() and not self.journal.exists():
                with atomic(self.journal) as target, target.open("w", encoding="utf-8") as out:
                    out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in _from_parquet(self.path))
            self._recover()
            self._out = self.journal.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror or error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            self._sync()
            self._out.close()

    def write(self, row: dict[str, Any]) -> None:
        assert self._out is not None
        self.done.add(row["source"])
        self.failed += row["error"] is not None
        self._out.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._unsynced += 1
        if self._unsynced >= SYNC:
            self._sync()

    def finish(self) -> None:
        """All pictures have a row: the journal becomes the file."""
        assert self._out is not None
        self._sync()
        if self.journal != self.path:
            with atomic(self.path) as target:
                _to_parquet(self._rows(), target)
            self.journal.unlink()

    def _sync(self) -> None:
        assert self._out is not None
        self._out.flush()
        os.fsync(self._out.fileno())
        self._unsynced = 0

    def _check_settings(self) -> None:
        """Answers of two models, or of other options, do not go into one file."""
        beside = self.path.with_name(self.path.name + ".settings.json")
        text = json.dumps(self.settings, indent=2, sort_keys=True) + "\n"
        if (self.path.exists() or self.journal.exists()) and beside.exists():
            if beside.read_text(encoding="utf-8") != text:
                raise UsageError(f"{self.path} has answers by another model or other settings: choose another --output")
            return
        if self.path.exists():
            raise UsageError(f"{self.path} exists and was not made by this command: choose another --output")
        beside.write_text(text, encoding="utf-8")

    def _recover(self) -> None:
        """Read the sources of whole rows, and cut off a last one that is not."""
        if not self.journal.exists():
            return
        whole = 0
        with self.journal.open("rb") as lines:
            for line in lines:
                try:
                    source = json.loads(line)["source"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    source = None
                if source is None:
                    break
                self.done.add(source)
                whole += len(line)
        if whole < self.journal.stat().st_size:
            os.truncate(self.journal, whole)

    def _rows(self) -> Iterator[dict[str, Any]]:
        with self.journal.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def _schema() -> Any:
    import pyarrow

    kinds = {
        "string": pyarrow.string(), "double": pyarrow.float64(), "int": pyarrow.int32(), "bool": pyarrow.bool_(),
        "strings": pyarrow.list_(pyarrow.string()), "doubles": pyarrow.list_(pyarrow.float64()),
    }  # fmt: skip
    return pyarrow.schema([(name, kinds[kind]) for name, kind in FIELDS.items()])


def _to_parquet(rows: Iterator[dict[str, Any]], target: Path) -> None:
    import itertools

    import pyarrow
    from pyarrow import parquet

    schema = _schema()
    with parquet.ParquetWriter(target, schema) as writer:
        while batch := list(itertools.islice(rows, ROWS)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def _from_parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS):
            yield from batch.to_pylist()
