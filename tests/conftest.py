"""Small models that the tests share: real graphs of a random ODE-ViT, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"  # real weights and images, where a developer has them


@pytest.fixture(scope="session")
def real_data() -> Path:
    if not DATA.is_dir():
        pytest.skip("needs the real teacher and data sets, which are not part of the repository")
    return DATA
