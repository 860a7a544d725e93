"""The result of `benchmark serve` as tables: in the terminal and as Markdown, as docs/serving_speed.md has it."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

from .serve import SYSTEMS

HEAD = ("clients", "system", "images/s", "p50 ms", "p95 ms", "p99 ms", "CPU ms", "depth", "errors")


def cells(row: dict[str, Any]) -> list[str]:
    depth = "" if row["mean_depth"] is None else f"{row['mean_depth']:.1f}"
    times = [f"{row['p50_ms']:.1f}", f"{row['p95_ms']:.0f}", f"{row['p99_ms']:.0f}", f"{row['cpu_ms']:.2f}"]
    speed = f"{row['images_per_second']:.0f}"
    return [str(row["clients"]), row["system"], speed, *times, depth, str(row["errors"])]


def facts(result: dict[str, Any]) -> str:
    depths, where = result["depths"], result["machine"]
    return (
        f"{result['model']} ({result['kind']}; pictures {result['pictures']}, mean depth {depths['mean']:.1f} of "
        f"{depths['full']}), {result['threads']} threads on {where['cores']} cores, load average "
        f"{where['load_average']:.1f} before, medians of {result['rounds']} interleaved rounds of "
        f"{result['seconds']:g} s. Versions: "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        + "."
    )


def notes(result: dict[str, Any]) -> list[str]:
    """What the rows come to, by number of clients."""
    lines = []
    by = {(row["system"], row["clients"]): row for row in result["rows"]}
    for clients, own in result["of_in_process"].items():
        parts = [f"`{name}` {share:.2f}" for name, share in own.items()]
        lines.append(f"{_clients(clients)}, share of the images/s in process: {', '.join(parts)}")
        served, direct = (by.get((name, int(clients))) for name in ("continuous", "in-process"))
        if served and direct:
            over, cpu = (served[key] - direct[key] for key in ("p50_ms", "cpu_ms"))
            more = f", {over:+.1f} ms at the median" if clients == "1" else ""
            lines.append(f"{_clients(clients)}, a request minus an image in process: {cpu:+.2f} ms of CPU{more}")
    for clients, others in result["ratios"].items():
        parts = [f"{v['images_per_second']:.2f}x `{name}` (p99 {v['p99']:.2f}x)" for name, v in others.items()]
        lines.append(f"{_clients(clients)}, images/s of this engine: {', '.join(parts)}")
    for clients, cost in result["audit"].items():
        coverage = "none" if cost["coverage"] is None else f"{cost['coverage']:.1%}"
        lines.append(
            f"{_clients(clients)}, the audit: {cost['throughput_lost']:.1%} of images/s (allowed "
            f"{cost['allowed']:.1%}), {cost['cpu_added']:+.1%} CPU an image, coverage {coverage} of "
            f"{cost['audited']:,} and those dropped"
        )
    return lines


def _clients(count: str) -> str:
    return f"{count} client" if count == "1" else f"{count} clients"


def as_markdown(result: dict[str, Any]) -> str:
    def line(values: Sequence[str]) -> str:
        return f"| {' | '.join(values)} |"

    rows = [line([*own[:1], f"`{own[1]}`", *own[2:]]) for own in map(cells, result["rows"])]
    table = [line(HEAD), line(["---"] * len(HEAD)), *rows]
    wrap = functools.partial(textwrap.fill, width=120, break_on_hyphens=False, break_long_words=False)
    listed = [wrap(f"- {note}", subsequent_indent="  ") for note in notes(result)]
    return "\n".join([f"`{result['command']}`", "", wrap(facts(result)), "", *table, "", *listed]) + "\n"


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(facts(result), highlight=False)
    table = Table(*HEAD, box=None, pad_edge=False)
    for row in result["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    for name in dict.fromkeys(row["system"] for row in result["rows"]):
        console.print(f"{name}: {SYSTEMS[name]}", highlight=False)
    for note in notes(result):
        console.print(note.replace("`", ""), highlight=False)
