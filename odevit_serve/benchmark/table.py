"""The benchmark's result as a table: in the terminal and as Markdown."""

from __future__ import annotations

import math
from typing import Any

HEAD = (
    "system", "in", "batch", "images/s", "min to max", "p50 ms", "p95 ms", "peak MB", "load s", "file MB", "MMAC",
    "steps", "of peak", "accuracy", "agrees",
)  # fmt: skip


def _digits(value: float) -> str:
    """Three digits are more than such figures can carry."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def cells(row: dict[str, Any]) -> list[str]:
    def number(key: str, scale: float = 1.0) -> str:
        return "" if row.get(key) is None else _digits(scale * row[key])

    low, high = row["images_per_second_spread"]
    return [
        row["system"], row["where"], str(row["batch"]), number("images_per_second"),
        f"{_digits(low)} to {_digits(high)}",
        number("p50_ms"), number("p95_ms"), "" if row.get("peak_megabytes") is None else f"{row['peak_megabytes']:.0f}",
        number("load_seconds"), number("file_bytes", 1e-6), number("macs", 1e-6),
        "" if row.get("mean_steps") is None else f"{row['mean_steps']:.2f}", f"{row['of_peak']:.2f}",
        *("" if row.get(key) is None else f"{row[key]:.1%}" for key in ("accuracy", "agreement")),
    ]  # fmt: skip


def facts(result: dict[str, Any]) -> list[str]:
    """What the table stands on, in sentences."""
    where, settings, peak = result["machine"], result["settings"], result["peak_macs_per_second"]
    memory = f", {where['memory_gib']} GiB" if where["memory_gib"] else ""
    lines = [
        f"{result['model']}: medians of {settings['rounds']} interleaved rounds of {settings['pictures']} pictures "
        f"({settings['pictures_are']}), {settings['threads']} threads on {where['cores']} cores of {where['processor']}"
        f"{memory}, load average {where['load_average']} at the end.",
        f"Matrix product of numpy with as many threads, in the same rounds: {_digits(peak['median'] / 1e9)} GMAC/s "
        f"({_digits(peak['spread'][0] / 1e9)} to {_digits(peak['spread'][1] / 1e9)}); `of peak` is the part of it that "
        "a row's multiply-adds reach. An 8-bit product can go beyond it.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".",
    ]
    if "accuracy_of" in result:
        lines.append(
            f"Accuracy: {result['accuracy_of']}; a ViT with random weights has none. `agrees`: with full depth, on the "
            "same images."
        )
    return lines


def growth_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for curve in result.get("growth", []):
        pairs = ", ".join(f"{s}: {_digits(v)}" for s, v in zip(curve["sizes"], curve["images_per_second"]))
        lines.append(f"images/s by {curve['over']} ({pairs}); time grows as {curve['over']}^{curve['exponent']:.2f}")
    return lines


def as_markdown(result: dict[str, Any]) -> str:
    lines = [f"`{result.get('command', 'odevit-serve benchmark')}`", ""]
    for fact in facts(result):
        lines += [fact, ""]
    lines += [f"| {' | '.join(HEAD)} |", f"| {' | '.join(['---'] * len(HEAD))} |"]
    lines += [f"| {' | '.join(cells(row))} |" for row in result["rows"]]
    lines += ["", *(f"- {line}" for line in growth_lines(result))]
    if result["left_out"]:
        lines += ["", "Left out:", "", *(f"- {sentence}" for sentence in result["left_out"])]
    return "\n".join(lines) + "\n"


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file has no edge to wrap at
    for fact in facts(result):
        console.print(fact, highlight=False)
    table = Table(*HEAD, box=None, pad_edge=False)
    before = None
    for row in result["rows"]:
        if before not in (None, row["system"]):
            table.add_section()
        table.add_row(*cells(row))
        before = row["system"]
    console.print(table)
    for line in growth_lines(result):
        console.print(line, highlight=False)
    for sentence in result["left_out"]:
        console.print(f"left out: {sentence}", highlight=False)
