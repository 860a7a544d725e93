"""What a format says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..job import ExportJob

COMMON = ("output", "overwrite", "json", "check")
DEPTH = ("steps", "horizon", "solver", "splitting")
PRECISION = ("precision", "calibration", "max-drop")


@dataclass(frozen=True)
class Format:
    name: str
    purpose: str
    depth: str
    makes: str  # what is written when --output is not given
    options: tuple[str, ...]
    target: Callable[[ExportJob], Path]  # where it goes when --output is not given
    make: Callable[[ExportJob, Path], dict[str, Path]]  # finished, checked files in a scratch folder, and where they go
    extras: tuple[str, ...] = ()
    suffix: Callable[[ExportJob], str] = lambda job: ""  # that --output must end in; empty: it is a folder
    in_bundle: tuple[str, ...] = ()  # files that it writes into the bundle itself
