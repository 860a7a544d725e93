"""The graphs the engine runs equal the torch model, step by step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from odevit_serve import bundle
from odevit_serve.bundle import STEP_OUTPUTS
from odevit_serve.errors import UserError
from odevit_serve.export.graph import Folded
from odevit_serve.runtime.graph_files import properties, read
from odevit_serve.runtime.model import load
from odevit_serve.train.model import ODEViT

SETTINGS = [
    {},
    {"solver": "ab2", "splitting": "strang", "attention": "l2"},
    {"solver": "rk4", "splitting": "lie", "convolution": 0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "default")
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_parts_follow_the_torch_trajectory(
    tiny_bundle: Path, tiny_bundles: Callable[..., Path], settings: dict[str, object], batch: int
) -> None:
    folder = tiny_bundles(**settings) if settings else tiny_bundle
    model = ODEViT.from_pretrained(folder)
    run = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("stem", "step", "attention")}
    images = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))
    (state,) = run["stem"].run(None, {"pixel_values": images.numpy()})
    size = np.full(batch, model.config.integration.step_size, np.float32)
    with torch.no_grad():
        tokens = model.config.architecture.tokens
        np.testing.assert_allclose(state[:, :tokens], model.stem(images), atol=1e-5)
        for point in model.trajectory(model.stem(images)):
            values = run["step"].run(list(STEP_OUTPUTS), {"state": state, "step_size": size})
            before, (state, logits, margin, gain, exponent, speed, cls_speed) = state, values
            np.testing.assert_allclose(state[:, :tokens], point.state, atol=1e-5)
            np.testing.assert_allclose(logits, model.answer(point.state), atol=1e-4)
            np.testing.assert_allclose(margin, _margin(model, point.state[:, 0]), atol=1e-4)
            boundary = Folded(model).boundary(
                torch.from_numpy(before[:, :tokens]), point.state, torch.from_numpy(logits)
            )
            np.testing.assert_allclose(gain, boundary[1], atol=1e-4)
            np.testing.assert_allclose(exponent, boundary[2], atol=1e-4)
            np.testing.assert_allclose(speed, point.velocity.flatten(1).norm(dim=1), rtol=1e-4)
            np.testing.assert_allclose(cls_speed, point.velocity[:, 0].norm(dim=1), rtol=1e-4)
        (attention,) = run["attention"].run(None, {"state": np.ascontiguousarray(state[:, :tokens])})
        np.testing.assert_allclose(attention, model.cls_attention(point.state), atol=1e-5)


def test_the_map_carries_no_values(tiny_bundle: Path) -> None:
    shapes = [list(tensor.dims) for tensor in onnx.load(tiny_bundle / "attention.onnx").graph.initializer]
    assert [24, 48] in shapes
    assert [24, 72] not in shapes


def _margin(model: ODEViT, cls: torch.Tensor) -> torch.Tensor:
    """The distance to the nearest boundary, straight from its definition."""
    answers = []
    for z in model.head(cls):
        top = int(z.argmax())
        others = [j for j in range(len(z)) if j != top]
        gaps = [(z[top] - z[j]) / (model.head.weight[top] - model.head.weight[j]).norm() for j in others]
        answers.append(torch.stack(gaps).min())
    return torch.stack(answers)


def test_step_size_is_per_image(tiny_bundle: Path) -> None:
    step = onnxruntime.InferenceSession(tiny_bundle / "step.onnx")
    state = np.random.default_rng(0).normal(size=(2, 19, 24)).astype(np.float32)
    both = step.run(None, {"state": state, "step_size": np.array([0.0, 0.5], np.float32)})
    alone = step.run(None, {"state": state[1:], "step_size": np.array([0.5], np.float32)})
    np.testing.assert_allclose(both[0][0], state[0])
    for together, single in zip(both, alone):
        np.testing.assert_allclose(together[1:], single, rtol=1e-4, atol=1e-5)


def test_a_single_class_has_no_boundary(tiny_bundles: Callable[..., Path]) -> None:
    step = onnxruntime.InferenceSession(tiny_bundles(classes=1) / "step.onnx")
    margin = step.run(["margin"], {"state": np.ones((2, 19, 24), np.float32), "step_size": np.ones(2, np.float32)})[0]
    assert (margin > 1e20).all()


def test_graphs_of_other_weights_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    assert properties(read(folder / bundle.STEP))["weights"] == bundle.digest(folder / bundle.WEIGHTS)
    model = ODEViT.from_pretrained(folder)
    with torch.no_grad():
        model.head.bias.add_(1)
    model.save_pretrained(folder)
    with pytest.raises(
        UserError, match=r"was made from other weights than those in model\.safetensors: run odevit-serve"
    ):
        load(folder)
