"""Pictures of five classes, and real trajectories of a small model on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odevit_serve.data.datasets import Images
from odevit_serve.guarantee.recording import Recorder, Recording
from odevit_serve.runtime.model import BundleModel, load


@pytest.fixture(scope="module")
def pictures() -> Images:
    from PIL import Image

    rng = np.random.default_rng(3)
    coarse = rng.integers(0, 256, (1500, 4, 4, 3), dtype=np.uint8)
    array = coarse.repeat(5, 1).repeat(5, 2)
    array[:, ::2] = rng.integers(0, 256, (1500, 1, 1, 3), dtype=np.uint8)
    return Images(
        [str(i) for i in range(1500)], np.arange(1500) % 5, ("ant", "bee", "cat", "dog", "eel"),
        lambda i: Image.fromarray(array[i]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def real(tiny_bundle: Path, pictures: Images) -> Recording:
    """Real trajectories of a real (if small) model."""
    model = load(tiny_bundle)
    assert isinstance(model, BundleModel)
    return Recorder(model, pictures, pictures.labels).record(np.arange(1500))
