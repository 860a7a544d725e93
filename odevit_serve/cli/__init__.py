"""The command line. Each command lives in its own module here and imports what it needs when it runs."""

from __future__ import annotations

import importlib.util
import sys

import typer

from ..errors import MissingExtra, UsageError, UserError

app = typer.Typer(
    name="odevit-serve",
    help="Vision Transformers as ODEs: train, export and serve them so that every image gets just the depth it needs.",
    epilog="Add --debug to any command to see a traceback when it fails.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Options that several commands share
DATA = typer.Option(..., "--data", help="Image folder, zip file, CIFAR folder or .npz, or hf:NAME.")
SPLIT = typer.Option(
    None,
    "--split",
    help="train, val, test, or validation: what training set aside; default: test, else val, else all.",
)
TRUST = typer.Option(False, "--trust", help="Load graphs without checking them and without a memory bound.")
TEACHER_WEIGHTS = typer.Option(None, "--teacher-weights", help="Safetensors file in timm's names.")

EXTRAS = {  # extra -> the modules that show whether it is installed
    "train": ("torch", "torchvision", "timm", "transformers", "accelerate", "safetensors", "matplotlib"),
    "export": ("torch", "onnx", "onnxscript", "safetensors"),
    "demo": ("gradio",),
    "hub": ("huggingface_hub",),
    "ray": ("ray",),
    "parquet": ("pyarrow",),
    "grpc": ("grpc",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx",),
    "triton": ("tritonclient",),
}


def require(extra: str) -> None:
    """End the command with the pip line to run, if a package of `extra` is missing."""
    if any(importlib.util.find_spec(module) is None for module in EXTRAS[extra]):
        raise MissingExtra(extra)


def say(text: str) -> None:
    """A line for the person at the terminal; stdout is kept for results."""
    typer.echo(text, err=True)


def numbers(text: str | None) -> list[float]:
    """Comma-separated numbers of an option."""
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UsageError(f"expected numbers separated by commas, not {text!r}") from None


def _version(show: bool) -> None:
    if show:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    debug = "--debug" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--debug"]
    try:
        app()
    except UserError as error:
        if debug:
            raise
        say(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if debug:
            raise
        say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        say(f"unexpected {type(error).__name__}: {error} (run again with --debug to see where)")
        sys.exit(1)


from . import analyze, benchmark, calibrate, demo, embed, export, info, predict, push, serve, train, val  # noqa: E402  (commands register themselves on `app`)

__all__ = [
    "analyze", "app", "benchmark", "calibrate", "demo", "embed", "export", "info", "main", "numbers", "predict", "push",
    "require", "say", "serve", "train", "val",
]  # fmt: skip
