"""From a scratch folder to the place that was asked for: files that are there are kept, and each moves in one step."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError, UserError
from ..files import replace

if TYPE_CHECKING:
    from .job import ExportJob


def fitting(output: Path, job: ExportJob) -> Path:
    """The output asked for, if its name says what it will be: other tools go by that."""
    wanted, name = job.entry.suffix(job), job.entry.name
    if wanted and output.suffix != wanted:
        raise UsageError(f"--output {output} must end in {wanted} for the format {name}")
    if not wanted and output.is_file():
        raise UsageError(f"--output {output} is a file, and the format {name} makes a folder")
    return output


def refuse_existing(job: ExportJob) -> None:
    if job.settings.overwrite:
        return
    for path in [job.target / name for name in job.entry.in_bundle] or [job.target]:
        if path.exists():
            raise UsageError(f"{path} exists: add --overwrite to replace it, or choose another with --output")


def move(made: Path, target: Path, scratch: Path) -> None:
    """Move a finished file or folder into place, in one step each, when it is on the disk."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():  # a folder cannot be replaced by a rename: the old one steps aside first
            os.rename(target, scratch / f"old-{target.name}")
        replace(made, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def scratch_folder(job: ExportJob) -> Path:
    """An empty folder beside the target: on the same disk, or a move would not be one step."""
    try:
        beside = job.target if job.entry.in_bundle and job.target.is_dir() else job.target.parent
        beside.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".odevit-serve-", dir=beside))
    except OSError as error:
        raise UserError(f"cannot write beside {job.target}: {error.strerror}") from None
