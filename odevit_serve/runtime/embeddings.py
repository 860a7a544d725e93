"""Pictures as vectors: the CLS state at the step where an image exits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import bundle
from ..errors import MissingExtra, UsageError
from ..files import atomic
from .dynamics import Floats
from .model import CAPACITY, BundleModel
from .results import Failure, Prediction, conclude
from .slots import Outcome, Slots


@dataclass(frozen=True)
class Embedding:
    """The vector of one image, and the answer that its state stands for."""

    vector: Floats  # [D]
    prediction: Prediction


class EmbeddingSlots(Slots):
    """Slots whose results are embeddings."""

    def finish(self, outcome: Outcome, source: str = "", read_seconds: float = 0.0) -> Any:
        result = conclude(self.labels, outcome, source, read_seconds, None, self.graphs.config.confidence)
        return result if isinstance(result, Failure) else Embedding(outcome.states[-1][0], result)


class Embedder(BundleModel):
    """A bundle whose results are embeddings; everything else is as in `BundleModel`."""

    def compute(self, capacity: int = CAPACITY) -> EmbeddingSlots:
        return EmbeddingSlots(self.graphs, capacity)

    def embed(self, sources: Iterable[Any], **settings: Any) -> Iterator[Embedding | Failure]:
        """The embeddings of images in order, as they come; settings as in `Model.stream`."""
        results: Any = self.stream(sources, attention=True, **settings)  # which keeps the state at the exit
        return results  # type: ignore[no-any-return]


def load(source: str | os.PathLike[str] | None = None, device: str = "cpu", threads: int | None = None) -> Embedder:
    """A bundle by bundled name (None: the default), folder or hf:NAME."""
    path = bundle.find(source)
    if not path.is_dir():
        raise UsageError(f"{path} is a single file and gives no state: give the bundle it was exported from")
    return Embedder(path, bundle.read_config(path), device, threads)


def columns(found: list[Embedding]) -> dict[str, np.ndarray]:
    """What is written of each image, one array a column."""
    answers = [one.prediction for one in found]
    return {
        "embeddings": np.stack([one.vector for one in found]).astype(np.float32),
        "sources": np.array([answer.source for answer in answers]),
        "labels": np.array([answer.label for answer in answers]),
        "probabilities": np.array([answer.probability for answer in answers], np.float32),
        "steps": np.array([answer.steps for answer in answers], np.int32),
    }


def check_target(path: Path) -> None:
    """Refuse early what could not be written later."""
    if path.suffix not in (".npz", ".parquet"):
        raise UsageError(f"{path} ends in neither .npz nor .parquet")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise MissingExtra("parquet") from None


def write(path: Path, found: list[Embedding]) -> None:
    """Write embeddings as numpy's .npz, or as a .parquet table with one row an image."""
    check_target(path)
    with atomic(path) as scratch:
        if path.suffix == ".npz":
            with scratch.open("wb") as file:
                np.savez(file, **columns(found))  # type: ignore[arg-type]
            return
        import pyarrow as pa
        import pyarrow.parquet

        data = columns(found)
        vectors = data.pop("embeddings")
        table: dict[str, Any] = {"source": data.pop("sources")}
        table["embedding"] = pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), vectors.shape[1])
        table |= {"label": data["labels"], "probability": data["probabilities"], "steps": data["steps"]}
        pa.parquet.write_table(pa.table(table), scratch)
