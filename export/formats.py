"""The formats there are: one entry each, from which the command, `--list` and the documentation's table are made.

To add one, add an entry here and to `MAKERS` in `job.py` a function that writes finished, checked files into a scratch
folder and says where they go. Nothing in this module needs torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UsageError

COMMON = ("output", "overwrite", "json")
DEPTH = ("steps", "horizon", "solver", "splitting")
PRECISION = ("precision", "calibration", "max-drop")


@dataclass(frozen=True)
class Format:
    name: str
    purpose: str
    depth: str
    makes: str  # what is written when --output is not given
    options: tuple[str, ...]
    extras: tuple[str, ...]

    @property
    def install(self) -> str:
        return f"pip install 'odevit-serve[{','.join(self.extras)}]'"


FORMATS = {
    entry.name: entry
    for entry in (
        Format(
            "onnx",
            "embedding anywhere",
            "fixed, unrolled; weights stored once",
            "{name}-{steps}steps.onnx",
            (*DEPTH, *PRECISION, "with-attention"),
            ("export",),
        ),
        Format(
            "onnx-adaptive",
            "embedding with early exit inside the graph",
            "per image; rows that have exited are not computed",
            "{name}-{steps}steps-adaptive.onnx",
            (*DEPTH, *PRECISION),
            ("export",),
        ),
        Format(
            "parts",
            "the engine of `predict` and `serve`",
            "per image, decided by the runtime",
            "stem.onnx, step.onnx, attention.onnx in the bundle",
            PRECISION,
            ("export",),
        ),
        Format(
            "tensorrt",
            "NVIDIA GPUs",
            "that of its source: unrolled, parts or adaptive",
            "{name}-{steps}steps-{source}.engine, or a folder of engines",
            (*DEPTH, *PRECISION, "with-attention", "batch", "gpu", "source"),
            ("export", "tensorrt-rtx"),
        ),
        Format(
            "triton",
            "Triton Inference Server",
            "fixed, unrolled",
            "triton/{name}/: config.pbtxt, labels.txt, 1/model.onnx",
            (*DEPTH, *PRECISION, "with-attention", "batch"),
            ("export", "triton"),
        ),
    )
}


def nearest(what: str, given: str, known: Iterable[str]) -> str:
    """One sentence about a name that is not known, with the nearest that is."""
    names = list(known)
    close = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.4)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {given!r}: {guess}Known are {', '.join(names)}"


def find(name: str) -> Format:
    if name not in FORMATS:
        raise UsageError(nearest("format", name, FORMATS))
    return FORMATS[name]


def check_options(entry: Format, given: Iterable[str]) -> None:
    """Refuse an option that the format would silently ignore."""
    for option in given:
        if option not in (*entry.options, *COMMON):
            takers = ", ".join(e.name for e in FORMATS.values() if option in e.options)
            raise UsageError(f"--{option} means nothing to the format {entry.name}: it is for {takers}")


def rows() -> list[dict[str, str]]:
    return [
        {
            "format": entry.name,
            "for": entry.purpose,
            "depth": entry.depth,
            "writes": entry.makes.format(name="NAME", steps="N", source="SOURCE"),
            "options": " ".join(f"--{option}" for option in entry.options),
            "needs": entry.install,
        }
        for entry in FORMATS.values()
    ]


def markdown() -> str:
    """The table of the documentation."""
    table = [
        {key: f"`{value}`" if key in ("format", "needs") else value for key, value in row.items()} for row in rows()
    ]
    for row in table:
        row["options"] = " ".join(f"`{option}`" for option in row["options"].split())
    lines = [" | ".join(table[0]), " | ".join("---" for _ in table[0]), *(" | ".join(row.values()) for row in table)]
    return "".join(f"| {line} |\n" for line in lines)
