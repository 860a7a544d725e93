"""ONNX files: reading them, and what they say about themselves in their metadata."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from .. import __version__, bundle
from ..bundle import METADATA_KEY
from ..config import Config
from ..errors import UserError
from .graph_builder import PRODUCER


def read(path: Path) -> onnx.ModelProto:
    """An ONNX file, without the data of others that it may point to."""
    try:
        if not path.stat().st_size:
            raise UserError(f"{path} is empty")
        return onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}: {bundle.remake(path.parent)}") from None
    except (DecodeError, OSError) as error:
        raise UserError(f"{path} is not a readable ONNX file: it is damaged or truncated ({error})") from None


def properties(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def digest(model: onnx.ModelProto) -> str:
    """Of the graph alone, without metadata."""
    return hashlib.sha256(model.graph.SerializeToString(deterministic=True)).hexdigest()


def found_digest(model: onnx.ModelProto) -> str:
    """The digest that a file carries, or that of its graph."""
    return properties(model).get("graph") or digest(model)


def write_metadata(model: onnx.ModelProto, config: Config, **plain: object) -> None:
    """The bundle's config under our key, beside it the plain keys that other tools read; other keys stay."""
    size = config.architecture.image_size
    labels = config.labels or tuple(str(i) for i in range(config.architecture.classes))
    keys: dict[str, object] = {
        **properties(model),
        METADATA_KEY: config.to_json(),
        "description": f"ODE-ViT {config.name}",
        "author": PRODUCER,
        "version": __version__,
        "license": config.license,
        "task": "classify",
        "stride": config.architecture.patch_size,
        "imgsz": json.dumps([size, size]),
        "channels": config.architecture.channels,
        "names": dict(enumerate(labels)),
        "graph": digest(model),
        **plain,
    }
    del model.metadata_props[:]
    for key, value in keys.items():
        model.metadata_props.add(key=key, value=str(value))
