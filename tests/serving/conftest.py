"""A small model with a slow engine, its pictures, and what it says of each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import SlowSlots

import odevit_serve
from odevit_serve.runtime.model import BundleModel
from odevit_serve.serving.engine import Engine


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> BundleModel:
    loaded = odevit_serve.load(tiny_bundle, threads=1)
    assert isinstance(loaded, BundleModel)
    return loaded


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def alone(model: BundleModel, pictures: np.ndarray) -> list[tuple[str, int]]:
    """Each picture's answer and depth when nobody else is there."""
    return [(p.label, p.steps) for p in (model.predict(picture) for picture in pictures)]


@pytest.fixture
def make(model: BundleModel) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(slots: int = 4, pause: float = 0.002, start: bool = True, **options: Any) -> Engine:
        engine = Engine(model, core=SlowSlots(model.graphs, slots, pause=pause), **options)
        engines.append(engine)
        return engine.start() if start else engine

    yield build
    for engine in engines:
        engine.core.gate.set()  # type: ignore[union-attr]
        engine.close(5)
