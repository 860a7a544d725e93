"""Export: one ODE, many graphs. `formats.py` is the place where a new format goes; torch is imported only to run."""

from __future__ import annotations

import os
from pathlib import Path


def parts(folder: str | os.PathLike[str], precision: str = "fp32") -> list[Path]:
    """Write the stem, step and attention graphs of the bundle in `folder` into it, unchecked; the command checks them."""
    from .pieces import write_parts

    return write_parts(Path(folder), precision)


__all__ = ["parts"]
