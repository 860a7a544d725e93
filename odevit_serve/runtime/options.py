"""What a request may ask for: one type for Python, the command line, HTTP, the Open Inference Protocol and the page."""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import UsageError


class Priority(enum.StrEnum):
    INTERACTIVE = "interactive"
    BULK = "bulk"


MOST_STEPS = 10**6
DAY_MS = 86_400_000


def _ask(default: Any, text: str, **bounds: Any) -> Any:
    """A field that clients may set: its description, and its bounds in pydantic's words."""
    return field(default=default, metadata={"description": text, **bounds})


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks for; None means the model's own. Fields without a description are for Python only."""

    max_steps: int | None = _ask(None, "Stop after this many steps.", ge=1, le=MOST_STEPS)
    rule: str | None = _ask(None, "Exit rule.", max_length=64)
    threshold: float | None = _ask(None, "Threshold of the rule.", allow_inf_nan=False)
    adaptive: bool = _ask(True, "false: full depth.")
    deadline_ms: float | None = _ask(
        None,
        "Milliseconds from the arrival of the request after which the best answer so far is given.",
        gt=0,
        le=DAY_MS,
        allow_inf_nan=False,
    )
    priority: Literal["interactive", "bulk"] = _ask("interactive", "interactive goes before bulk.")
    steps: int | None = None  # cut the horizon into this many
    solver: str | None = None  # of `predict` alone: an engine has the one of its model
    splitting: str | None = None
    tolerance: float | None = None  # of a step's estimated error, in the unit of margins; 0: every step
    trace: bool = False  # keep the numbers of every step
    attention: bool = False  # the map where it exits
    states: bool = False  # the state and the map at every step, the start included

    def __post_init__(self) -> None:
        for name in ("steps", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
            if value is not None and value > MOST_STEPS:
                raise UsageError(f"{name} may be at most {MOST_STEPS:,}, not {value}")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise UsageError(f"tolerance must be a number of 0 or more, not {self.tolerance:g}")
        if self.deadline_ms is not None and not 0 < self.deadline_ms <= DAY_MS:
            raise UsageError(f"deadline_ms must be above 0 and at most a day, not {self.deadline_ms:g}")
        if self.priority not in tuple(Priority):
            raise UsageError(f"priority must be one of {', '.join(Priority)}, not {self.priority!r}")

    @classmethod
    def of(cls, options: RequestOptions | None, asked: dict[str, Any]) -> RequestOptions:
        """`options`, or the defaults, with what else was asked for in its place."""
        unknown = sorted(set(asked) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise UsageError(f"unknown option {unknown[0]!r}")
        return dataclasses.replace(options or cls(), **asked) if asked else options or cls()

    @property
    def depth(self) -> dict[str, Any]:
        """What decides how deep an image goes, as `exits.resolve` takes it."""
        return {
            "steps": self.steps,
            "max_steps": self.max_steps,
            "rule": self.rule,
            "threshold": self.threshold,
            "adaptive": self.adaptive,
        }

    @property
    def keep(self) -> str:
        """What `Job` is to keep of the states."""
        return "all" if self.states else "last" if self.attention else ""
