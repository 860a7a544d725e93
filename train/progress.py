"""What a run is doing, in words: a bar at a terminal, a line a minute elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
Show = Callable[[int, str], None]
LINE_SECONDS = 60.0


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes where it is that long."""
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02} h" if whole >= 3600 else f"{whole // 60}:{whole % 60:02} min"


@contextmanager
def bar(say: Say, words: str, total: int, done: int = 0, active: bool = True) -> Iterator[Show]:
    """`show(done, text)` moves the bar of `words` and puts `text` behind it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    if active and console.is_terminal and not os.environ.get("CI"):
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*columns, console=console, transient=True) as shown:
            task = shown.add_task(words, total=total, completed=done, text="")
            yield lambda at, text: shown.update(task, completed=at, text=text)
        return
    last = time.monotonic()

    def line(at: int, text: str) -> None:
        nonlocal last
        if active and time.monotonic() - last > LINE_SECONDS:
            last = time.monotonic()
            say(f"{words}: {at / max(1, total):.0%}, {text}")

    yield line


@contextmanager
def counted(say: Say, words: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of so many things, with the time left by their pace: `advance(count)`."""
    begun, done = time.monotonic(), 0
    with bar(say, words, total) as show:

        def advance(count: int = 1) -> None:
            nonlocal done
            done += count
            left = (time.monotonic() - begun) / done * (total - done)
            show(done, f"{done:,} of {total:,}, {clock(left)} left")

        yield advance
