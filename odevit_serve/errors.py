"""The two kinds of failure a user can cause, each told in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Work that cannot be done with what was given; the command ends with exit code 1."""

    exit_code = 1


class UsageError(UserError):
    """A call that cannot be right (a setting, a name, a number); exit code 2."""

    exit_code = 2


class MissingExtra(UserError):
    """A command whose optional packages are not installed."""

    def __init__(self, extra: str, why: str = ""):
        reason = f" ({why})" if why else ""
        super().__init__(
            f"this needs packages that are not installed{reason}: pip install 'odevit-serve[{extra}]', "
            f"or from a checkout pip install '.[{extra}]'"
        )
        self.extra = extra


def nearest(what: str, given: str, known: Iterable[str]) -> str:
    """One sentence about a name that is not known, with the nearest that is."""
    names = list(known)
    close = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.4)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {given!r}: {guess}Known are {', '.join(names)}"
