"""Single tensors of a bundle's weights, read without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..bundle import WEIGHTS
from ..runtime.dynamics import Floats

KINDS = {"F16": np.float16, "F32": np.float32}


def read_tensors(folder: Path, names: Sequence[str]) -> list[Floats] | None:
    """The tensors of these names; None where one of them, or the file, is not there."""
    path = folder / WEIGHTS
    if not path.is_file():
        return None
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        found: list[Floats] = []
        for name in names:
            entry = header.get(name)
            kind = None if entry is None else KINDS.get(entry["dtype"])
            if kind is None:
                return None
            first, last = entry["data_offsets"]
            file.seek(start + first)
            found.append(np.frombuffer(file.read(last - first), kind).reshape(entry["shape"]).astype(np.float32))
    return found


def head(folder: Path) -> tuple[Floats, Floats] | None:
    """Weight [C,D] and bias [C] of the linear head."""
    found = read_tensors(folder, ("head.weight", "head.bias"))
    return None if found is None else (found[0], found[1])
