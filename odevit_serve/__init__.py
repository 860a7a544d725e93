"""Vision Transformers as ODEs, served so that every image gets just the depth it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime.exits import ExitReason, Readings, rule
    from .runtime.model import Model, load
    from .runtime.options import RequestOptions
    from .runtime.results import Attention, Failure, Prediction

__version__ = "0.2.0"
_HOME = {
    "Attention": "results",
    "ExitReason": "exits",
    "Failure": "results",
    "Model": "model",
    "Prediction": "results",
    "Readings": "exits",
    "RequestOptions": "options",
    "load": "model",
    "rule": "exits",
}
__all__ = [
    "Attention", "ExitReason", "Failure", "Model", "Prediction", "Readings", "RequestOptions", "load", "rule",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are imported when first used: `import odevit_serve` and the command line stay quick."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".runtime.{_HOME[name]}", __name__), name)
