"""The formats there are. Each is one file here that describes itself, names its target and makes it.

To add one, write its file with a `FORMAT` and add it to `FORMATS`. The command, `--list` and the documentation's table
are made from those entries; nothing else knows a format by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import UsageError, nearest
from . import onnx_adaptive, onnx_unrolled, openvino, parts, tensorrt, triton
from .format import COMMON, Format

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT for module in (onnx_unrolled, onnx_adaptive, parts, openvino, tensorrt, triton)
}


def find(name: str) -> Format:
    if name not in FORMATS:
        raise UsageError(nearest("format", name, FORMATS))
    return FORMATS[name]


def check_options(entry: Format, given: Iterable[str]) -> None:
    """Refuse an option that the format would silently ignore."""
    for option in given:
        if option not in (*entry.options, *COMMON):
            takers = ", ".join(e.name for e in FORMATS.values() if option in e.options)
            raise UsageError(f"--{option} does not apply to the format {entry.name}: it is for {takers}")


def rows() -> list[dict[str, str]]:
    return [
        {
            "format": entry.name,
            "for": entry.purpose,
            "depth": entry.depth,
            "writes": entry.makes.format(name="NAME", steps="N", source="SOURCE"),
            "options": " ".join(f"--{option}" for option in entry.options),
            "needs": f"odevit-serve[{','.join(entry.extras)}]" if entry.extras else "nothing more",
        }
        for entry in FORMATS.values()
    ]


def markdown() -> str:
    """The table of the documentation."""
    table = [{key: f"`{value}`" if key == "format" else value for key, value in row.items()} for row in rows()]
    for row in table:
        row["options"] = " ".join(f"`{option}`" for option in row["options"].split())
    lines = [" | ".join(table[0]), " | ".join("---" for _ in table[0]), *(" | ".join(row.values()) for row in table)]
    return "".join(f"| {line} |\n" for line in lines)
