"""Files that are complete or absent: written beside their place, on the disk, then renamed."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

PART = ".part"  # how the name of a file ends that is being written
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's part of it, or what a file may have


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """A scratch path beside `target` that replaces it when the block ends well, and vanishes when it does not.

    The content is on the disk before it replaces anything: a crash or a full disk leaves the old file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=PART, dir=target.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        scratch.chmod(0o666 & ~_umask())  # after writing: a writer may have put a private file of its own there
        replace(scratch, target)
    except OSError as error:
        if error.errno in FULL:
            raise UserError(f"{target} could not be written, an existing one is unchanged: {error.strerror}") from error
        raise
    finally:
        scratch.unlink(missing_ok=True)


def replace(made: Path, target: Path) -> None:
    """Give a file, or a folder with its files, another name, once all of it is on the disk."""
    for path in [*made.rglob("*"), made] if made.is_dir() else [made]:
        _sync(path)
    os.replace(made, target)
    _sync(target.parent)


def clear(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder, and in those within it. Nobody may be writing."""
    for path in folder.rglob(f".*{PART}"):
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Have the system write what it holds of a file, or of the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
