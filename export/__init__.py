"""Export: one ODE, many graphs."""

from __future__ import annotations

from .parts import parts

__all__ = ["parts"]
