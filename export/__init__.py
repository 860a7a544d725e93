"""Export: one ODE, many graphs. `formats.py` is the place where a new format goes; torch is imported only to run."""

from __future__ import annotations

import os
from pathlib import Path


def parts(folder: str | os.PathLike[str]) -> list[Path]:
    """Write the stem, step and attention graphs of the bundle in `folder` into it. The command checks them as well."""
    from .pieces import write_parts

    return write_parts(Path(folder))


__all__ = ["parts"]
