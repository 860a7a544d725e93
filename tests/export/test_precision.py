"""Lower precision: what becomes 8-bit, what stays, and what it may cost."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import tiny_model
from PIL import Image

from odevit_serve import bundle
from odevit_serve.config import Integration
from odevit_serve.errors import UsageError, UserError
from odevit_serve.export import precision
from odevit_serve.export.formats.onnx_adaptive import adaptive_graph
from odevit_serve.runtime.graph_builder import every_graph
from odevit_serve.runtime.graphs import Parts, unrolled_graph
from odevit_serve.runtime.sessions import Graphs

IMAGES = np.random.default_rng(1).normal(size=(64, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def parts(tiny_bundle: Path) -> Parts:
    return Parts.of(tiny_bundle, bundle.read_config(tiny_bundle))


@pytest.fixture
def eight_bit(tiny_bundle: Path, parts: Parts) -> Parts:
    precision.quantise_fields(parts, precision.states(Graphs(tiny_bundle, parts.config), IMAGES))
    return parts


def logits(model: onnx.ModelProto) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(["logits"], {"pixel_values": IMAGES})[0]


def reference() -> np.ndarray:
    with torch.no_grad():
        return tiny_model()(torch.from_numpy(IMAGES)).numpy()


def test_half_precision_keeps_inputs_and_outputs_and_halves_the_weights(parts: Parts) -> None:
    precision.halve_fields(parts)
    graph = unrolled_graph(parts, parts.config.integration)
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*graph.graph.input, *graph.graph.output)}
    assert set(kinds.values()) == {onnx.TensorProto.FLOAT}
    half = [list(t.dims) for t in graph.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16]
    assert all(shape in half for shape in ([24, 72], [24, 24], [24, 48], [48, 24]))
    assert 0 < np.abs(logits(graph) - reference()).max() < 5e-2


@pytest.mark.parametrize("symmetric", [False, True])
def test_all_matrices_of_psi_become_8_bit(tiny_bundle: Path, parts: Parts, symmetric: bool) -> None:
    precision.quantise_fields(parts, precision.states(Graphs(tiny_bundle, parts.config), IMAGES), symmetric)
    graph = unrolled_graph(parts, parts.config.integration)
    assert precision.count(graph) == 8 * precision.products(parts.config.integration) == 32
    stored = [
        list(t.dims) for t in graph.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2
    ]
    assert sorted(stored) == [[24, 24], [24, 48], [24, 72], [48, 24]]  # each once
    zeros = {t.name: onnx.numpy_helper.to_array(t) for t in graph.graph.initializer}
    points = [zeros[node.input[2]] for node in graph.graph.node if node.op_type == "QuantizeLinear"]
    assert all(p.dtype == (np.int8 if symmetric else np.uint8) for p in points)
    assert not symmetric or all(not p.any() for p in points)
    assert (logits(graph).argmax(-1) == reference().argmax(-1)).mean() > 0.9


def test_weights_use_seven_bits(eight_bit: Parts) -> None:
    """Two products of 8 by 8 bits overflow the 16 bits that CPUs without VNNI add them in."""
    pieces = (eight_bit.attention, eight_bit.mlp)
    tensors = [t for piece in pieces for t in piece.weights.values() if t.data_type == onnx.TensorProto.INT8]
    weights = [onnx.numpy_helper.to_array(t) for t in tensors if len(t.dims) == 2]
    assert len(weights) == 4
    assert all(np.abs(w.astype(int)).max() <= 64 for w in weights)


def test_8_bit_weights_are_stored_once_and_work_inside_a_loop(eight_bit: Parts) -> None:
    graph = adaptive_graph(eight_bit, eight_bit.config)
    assert precision.count(graph) == precision.products(eight_bit.config.integration) == 4
    tensors = [t for g in every_graph(graph.graph) for t in g.initializer]
    assert sum(t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2 for t in tensors) == 4
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    assert np.isfinite(session.run(["logits"], {"pixel_values": IMAGES})[0]).all()


@pytest.mark.parametrize(("solver", "splitting", "wanted"), [("rk4", "parallel", 16), ("euler", "strang", 6)])
def test_the_count_follows_solver_and_splitting(eight_bit: Parts, solver: str, splitting: str, wanted: int) -> None:
    own = Integration(4.0, 2, solver, splitting)
    assert precision.products(own) == wanted
    assert precision.count(unrolled_graph(eight_bit, own)) == 2 * wanted


def test_comparison_refuses_a_loss_above_the_limit() -> None:
    labels = np.arange(10) % 2
    found = precision.Pictures(np.zeros((10, 1), np.float32), labels, "pictures")
    right = lambda pixels: np.eye(2)[labels[: len(pixels)]]  # noqa: E731
    wrong = lambda pixels: np.eye(2)[np.where(np.arange(len(pixels)) == 0, 1, labels[: len(pixels)])]  # noqa: E731
    check, figures = precision.compare(right, wrong, found, "int8", max_drop=10.0)
    assert (check.found, figures["before"], figures["after"], figures["agreement"]) == (10.0, 100.0, 90.0, 90.0)
    with pytest.raises(UserError, match=r"loss of accuracy in points 10 \(allowed 9.9\)"):
        precision.compare(right, wrong, found, "int8", max_drop=9.9)
    unlabelled = precision.Pictures(found.pixels, None, "pictures")
    with pytest.raises(UserError, match="disagreement with fp32 in points 10"):
        precision.compare(right, wrong, unlabelled, "fp16", max_drop=0.5)


def picture_folder(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 8) -> Path:
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(each):
            Image.fromarray(rng.integers(0, 255, (20, 16, 3), np.uint8)).save(folder / name / f"{index}.png")
    return folder


def test_pictures_come_from_a_folder_with_labels_by_name(tmp_path: Path) -> None:
    found = precision.pictures(tiny_model().config, tmp_path, str(picture_folder(tmp_path / "images")))
    assert found is not None
    assert found.pixels.shape == (16, 3, 16, 16)
    assert found.labels is not None
    assert sorted(set(found.labels.tolist())) == [2, 3]  # cat and dog among the model's labels


def test_pictures_of_other_classes_have_no_labels(tmp_path: Path) -> None:
    found = precision.pictures(tiny_model().config, tmp_path, str(picture_folder(tmp_path / "images", ("gnu", "hen"))))
    assert found is not None
    assert found.labels is None


def test_a_bundle_may_bring_its_own_pictures(tmp_path: Path) -> None:
    assert precision.pictures(tiny_model().config, tmp_path, None) is None
    with pytest.raises(UsageError, match="--calibration FOLDER"):
        precision.needed(None)
    folder = picture_folder(tmp_path / "images")
    with ZipFile(tmp_path / precision.BUNDLED, "w") as archive:
        for path in folder.rglob("*.png"):
            archive.write(path, path.relative_to(folder))
    found = precision.pictures(tiny_model().config, tmp_path, None)
    assert found is not None
    assert len(found.pixels) == 16
