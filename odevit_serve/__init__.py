"""Vision Transformers as ODEs, served so that every image gets just the depth it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exits import ExitReason, Readings, rule
    from .model import Attention, Failure, Model, Prediction, load

__version__ = "0.1.0"
__all__ = ["Attention", "ExitReason", "Failure", "Model", "Prediction", "Readings", "load", "rule"]


def __getattr__(name: str) -> Any:
    """Names are imported when first used: `import odevit_serve` and the command line stay quick."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = ".exits" if name in ("ExitReason", "Readings", "rule") else ".model"
    return getattr(import_module(module, __name__), name)
