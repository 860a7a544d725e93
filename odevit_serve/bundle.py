"""The model on disk: which files a bundle has, and where bundles are found.

A bundle is a folder that can be pushed to the Hugging Face Hub as it is. What its `config.json` says is in config.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import Any

from .config import Config
from .errors import UserError
from .files import atomic

DEFAULT = "photos"
MODELS = Path(__file__).parent / "models"
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
PROCESSOR = "preprocessor_config.json"  # `preprocessing` once more, where transformers looks for it
STEM, STEP, ATTENTION = "stem.onnx", "step.onnx", "attention.onnx"
STEP_OUTPUTS = ("next_state", "logits", "margin", "gain", "exponent", "speed", "cls_speed")  # of the step graph
# Of a step whose size is chosen for each image: what it reads beside the state and the grid's step size, and gives.
ESTIMATE_INPUTS, ESTIMATE_OUTPUTS = ("before", "left", "tolerance"), ("taken", "change")
METADATA_KEY = "odevit_serve"  # the metadata_props key under which a single .onnx carries its config


def bundled() -> list[str]:
    """Names of the models that ship inside the package."""
    return sorted(p.parent.name for p in MODELS.glob(f"*/{CONFIG}"))


def find(source: str | os.PathLike[str] | None = None) -> Path:
    """The folder or .onnx file that `source` names: a bundled model, a local path, or a Hub repository."""
    text = DEFAULT if source is None else os.fspath(source)
    if text.startswith("hf:"):
        return _on_hub(text)
    if text in bundled():
        return MODELS / text
    path = Path(text)
    if path.name in ("", ".."):  # a bundle is called by the name of its folder
        path = path.resolve()
    if path.exists():
        if path.is_dir() and not (path / CONFIG).is_file():
            raise UserError(f"{path} is not a bundle: it has no {CONFIG}")
        if path.is_file() and path.suffix != ".onnx":
            raise UserError(f"{path} is neither a bundle folder nor an .onnx file")
        return path
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and path.suffix != ".onnx":
        return _on_hub(text)
    raise UserError(
        f"no model {text!r}: bundled are {', '.join(bundled())}; else give a folder, an .onnx file or hf:NAME"
    )


def _on_hub(name: str) -> Path:
    from .hub import find as download

    return download(name)


def read_config(folder: Path) -> Config:
    """The checked configuration of a bundle folder."""
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{folder} is not a bundle: it has no {CONFIG}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    return Config.from_json(text, str(path))


def write_config(folder: Path, config: Config) -> None:
    """Write `config.json`, and from it what transformers reads in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / CONFIG) as path:
        path.write_text(config.to_json(), encoding="utf-8")
    processor: dict[str, Any] = {"image_processor_type": "ODEViTImageProcessor"}
    if "AutoImageProcessor" in config.auto_map:
        processor["auto_map"] = {"AutoImageProcessor": config.auto_map["AutoImageProcessor"]}
    with atomic(folder / PROCESSOR) as path:
        path.write_text(
            json.dumps(processor | dataclasses.asdict(config.preprocessing), indent=2) + "\n", encoding="utf-8"
        )


def remake(folder: Path) -> str:
    """The command that makes the graphs of a bundle anew, for a sentence that says what is wrong with them."""
    return f"run odevit-serve export {shlex.quote(str(folder))} --format parts --overwrite"


def digest(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
