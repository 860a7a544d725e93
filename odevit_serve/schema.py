"""From JSON data to dataclasses, checked: an error names the field and the value."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from typing import Any

from .errors import UsageError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
MOST = 300  # characters of a value in a message


def shown(value: Any) -> str:
    """A value as a message quotes it: a file from elsewhere may hold anything of any length."""
    text = _short.repr(value)  # bounds each part of a value, and not what many parts come to
    return text if len(text) <= MOST else f"{text[:MOST]}..."


def build(kind: Any, value: Any, where: str = "") -> Any:
    """Make `kind` (a dataclass, tuple, union or plain type) of JSON data; errors name the field."""
    name = where or "the top level"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise UsageError(f"{name} must be an object, not {shown(value)}")
        hints = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise UsageError(f"{name} has an unknown field {shown(unknown[0])}")
        missing = [
            f.name
            for f in dataclasses.fields(kind)
            if f.name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise UsageError(f"{where + '.' if where else ''}{missing[0]} is missing")
        prefix = f"{where}." if where else ""
        parts = {key: build(hints[key], item, prefix + key) for key, item in value.items()}
        return kind(**parts)  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return build(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{name} must be a list, not {shown(value)}")
        if arguments[-1] is Ellipsis:
            return tuple(build(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
        if len(arguments) != len(value):
            raise UsageError(f"{name} must have {len(arguments)} values, not {len(value)}")
        return tuple(build(a, item, f"{name}[{i}]") for i, (a, item) in enumerate(zip(arguments, value)))
    if origin is dict:
        if not isinstance(value, dict):
            raise UsageError(f"{name} must be an object, not {shown(value)}")
        return {key: build(arguments[1], item, f"{name}.{key[:80]}") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1000 else math.inf
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise UsageError(f"{name} must be of type {kind.__name__}, not {shown(value)}")
    if kind is float and not math.isfinite(value):
        raise UsageError(f"{name} must be finite, not {shown(value)}")
    return value
