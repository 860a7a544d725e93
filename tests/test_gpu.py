"""For people who have an NVIDIA GPU: `pytest -m gpu`. Without one, every test here is skipped.

Sessions of onnxruntime come up on the device that was asked for and agree with the CPU; engines that
`odevit-serve export --format tensorrt` makes load, run and agree with the file of the same settings.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odevit_serve import load
from odevit_serve.export.formats import tensorrt
from odevit_serve.export.job import Settings, export
from odevit_serve.runtime import sessions
from odevit_serve.runtime.model import load_bundle

MISSING = tensorrt.no_cuda()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"needs an NVIDIA GPU: {MISSING}")]
PROVIDERS = {"cuda": sessions.CUDA, "tensorrt": sessions.TENSORRT}
LOOSE = 1e-2  # a GPU may multiply in TF32, with 10 bits of mantissa


@pytest.fixture(scope="module")
def pixels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).normal(size=(11, 3, 16, 16)).astype(np.float32)


@pytest.mark.parametrize("device", sorted(PROVIDERS))
def test_sessions_come_up_on_the_device_asked_for(tiny_bundle: Path, device: str) -> None:
    graphs = load_bundle(tiny_bundle, device=device).graphs
    for session in (graphs.stem, graphs.step, graphs.attention):
        assert session.get_providers()[0] == PROVIDERS[device]


@pytest.mark.parametrize("device", sorted(PROVIDERS))
@pytest.mark.parametrize("kind", ["onnx", "onnx-adaptive"])
def test_a_file_agrees_with_the_cpu(
    tiny_files: dict[str, Path], pixels: np.ndarray[Any, Any], device: str, kind: str
) -> None:
    """At several batch sizes; at full depth, where rounding cannot end an image at another step."""
    feed: dict[str, Any] = {"threshold": np.array(np.inf, np.float32)} if kind == "onnx-adaptive" else {}
    own, other = (sessions.open_session(tiny_files[kind], name) for name in (device, "cpu"))
    assert own.get_providers()[0] == PROVIDERS[device]
    for batch in (1, 3, 11):
        given = {"pixel_values": pixels[:batch], **feed}
        np.testing.assert_allclose(own.run(["logits"], given)[0], other.run(["logits"], given)[0], atol=LOOSE)


@pytest.mark.parametrize("device", sorted(PROVIDERS))
def test_a_bundle_agrees_with_the_cpu(tiny_bundle: Path, device: str) -> None:
    pictures = [np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8) for seed in range(12)]
    own, other = (load(tiny_bundle, device=name).predict(pictures, adaptive=False) for name in (device, "cpu"))
    for mine, right in zip(own, other, strict=True):
        assert mine.steps == right.steps
        np.testing.assert_allclose(mine.probabilities, right.probabilities, atol=LOOSE)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_exported_engine_loads_and_agrees(
    tiny_bundle: Path, tiny_files: dict[str, Path], pixels: np.ndarray[Any, Any], tmp_path: Path, precision: str
) -> None:
    torch = pytest.importorskip("torch", reason="an engine's memory is held by torch")
    if not any(map(importlib.util.find_spec, tensorrt.MODULES)):
        pytest.skip("needs tensorrt-rtx or tensorrt")
    major, minor = torch.cuda.get_device_capability()
    made = tmp_path / "m.engine"
    settings = Settings(
        format="tensorrt", precision=precision, gpu=f"SM{major}{minor}", batch="1,8,16", max_drop=100, output=str(made)
    )
    export(str(tiny_bundle), settings)
    engine, right = tensorrt.TensorRTEngine(made), sessions.open_session(tiny_files["onnx"])
    for batch in (1, 3, 11):
        expected = right.run(["logits"], {"pixel_values": pixels[:batch]})[0]
        found = engine.run(pixel_values=pixels[:batch])["logits"]
        np.testing.assert_allclose(found, expected, atol=LOOSE if precision == "fp32" else 5e-2)
