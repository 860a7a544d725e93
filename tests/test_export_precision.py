"""Lower precision: what becomes 8-bit, what stays, and what it may cost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import tiny_model
from PIL import Image

from odevit_serve.bundle import Integration
from odevit_serve.errors import UsageError, UserError
from odevit_serve.export import precision
from odevit_serve.export.adaptive import adaptive
from odevit_serve.export.graph import Folded
from odevit_serve.export.onnx import every_graph
from odevit_serve.export.pieces import Pieces
from odevit_serve.export.unrolled import unrolled

pytestmark = pytest.mark.usefixtures("traced_once")
IMAGES = np.random.default_rng(1).normal(size=(64, 3, 16, 16)).astype(np.float32)


def eight_bit(symmetric: bool = False, **settings: object) -> Pieces:
    folded = Folded(tiny_model(**settings), quantisable=True)
    seen = precision.ranges(folded, IMAGES)
    return Pieces(folded, partial(precision.quantise, seen=seen, symmetric=symmetric))


def logits(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(["logits"], {"pixel_values": IMAGES})[0]


def test_half_precision_keeps_inputs_and_outputs_and_halves_the_weights() -> None:
    model = tiny_model()
    graph = unrolled(Pieces(Folded(model, half=True)))
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*graph.graph.input, *graph.graph.output)}
    assert set(kinds.values()) == {onnx.TensorProto.FLOAT}
    half = {t.name for t in graph.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16}
    assert {name.partition("folded.")[2] for name in half} >= {f"{name}.weight" for name in precision.MATRICES}
    with torch.no_grad():
        wanted = model(torch.from_numpy(IMAGES)).numpy()
    error = np.abs(logits(graph) - wanted).max()
    assert 0 < error < 5e-2
    assert next(model.psi.mlp.mix.parameters()).dtype == torch.float32  # the model it was made from is untouched


@pytest.mark.parametrize("symmetric", [False, True])
def test_all_matrices_of_psi_become_8_bit(symmetric: bool) -> None:
    pieces = eight_bit(symmetric)
    graph = unrolled(pieces)
    assert precision.count(graph) == 8 * precision.quantised(pieces.folded) == 32
    stored = {t.data_type for t in graph.graph.initializer if t.name.endswith(".int8")}
    assert stored == {onnx.TensorProto.INT8}
    rounded = {n.output[0]: n for n in graph.graph.node if n.op_type == "QuantizeLinear"}
    zeros = {t.name: onnx.numpy_helper.to_array(t) for t in graph.graph.initializer if t.name.endswith(".zero")}
    points = [zeros[node.input[2]] for node in rounded.values()]
    assert all(p.dtype == (np.int8 if symmetric else np.uint8) for p in points)
    assert not symmetric or all(not p.any() for p in points)
    with torch.no_grad():
        wanted = tiny_model()(torch.from_numpy(IMAGES)).numpy()
    assert (logits(graph).argmax(-1) == wanted.argmax(-1)).mean() > 0.9


def test_8_bit_weights_are_stored_once_and_work_inside_a_loop() -> None:
    pieces = eight_bit()
    graph = adaptive(pieces, tiny_model().config)
    assert precision.count(graph) == precision.quantised(pieces.folded) == 4
    stored = [t for g in every_graph(graph.graph) for t in g.initializer if t.name.endswith(".int8")]
    assert len(stored) == 4
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    assert np.isfinite(session.run(["logits"], {"pixel_values": IMAGES})[0]).all()


@pytest.mark.parametrize(("solver", "splitting", "wanted"), [("rk4", "parallel", 16), ("euler", "strang", 6)])
def test_the_count_follows_solver_and_splitting(solver: str, splitting: str, wanted: int) -> None:
    folded = Folded(tiny_model(), Integration(4.0, 2, solver, splitting), quantisable=True)
    pieces = Pieces(folded, partial(precision.quantise, seen=precision.ranges(folded, IMAGES[:8])))
    pieces.advance()
    assert pieces.quantised == {"advance": wanted}
    assert precision.quantised(folded) == wanted


def test_weights_use_seven_bits() -> None:
    """Two products of 8 by 8 bits overflow the 16 bits that CPUs without VNNI add them in."""
    graph = eight_bit().step().graph
    weights = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("weight.int8")]
    assert len(weights) == 4
    assert all(np.abs(w.astype(int)).max(0).min() == np.abs(w.astype(int)).max() == 63 for w in weights)


def test_ranges_hold_every_value_and_zero() -> None:
    folded = Folded(tiny_model(), quantisable=True)
    seen = precision.ranges(folded, IMAGES)
    assert set(seen) == set(precision.MATRICES)
    assert all(low <= 0 <= high and low < high for low, high in seen.values())
    with torch.no_grad():
        state = folded.begin(torch.from_numpy(IMAGES))
    assert seen["mlp.up"][1] >= float(state.max())


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
