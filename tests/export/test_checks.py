"""Every check is shown to fail: each test breaks an export on purpose, and no file may be left behind."""

from __future__ import annotations

import getpass
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from odevit_serve.bundle import read_config, write_config
from odevit_serve.errors import UserError
from odevit_serve.export import checks
from odevit_serve.export.formats import onnx_adaptive
from odevit_serve.export.job import Settings, export
from odevit_serve.runtime import graphs
from odevit_serve.runtime.graph_builder import every_graph

Break = Callable[[onnx.ModelProto], object]


@pytest.fixture
def folder(tmp_path: Path, tiny_bundle: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "model"))


def refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, breaks: Break, format: str = "onnx", **settings: object
) -> str:
    """The sentence an export ends with whose graph has been tampered with; nothing else may be there afterwards."""
    where, maker = (graphs, "unrolled_graph") if format == "onnx" else (onnx_adaptive, "adaptive_graph")
    original = getattr(where, maker)

    def tampered(*arguments: object) -> onnx.ModelProto:
        graph = original(*arguments)
        breaks(graph)
        return graph

    monkeypatch.setattr(where, maker, tampered)
    target = folder.parent / "out" / "m.onnx"
    with pytest.raises(UserError) as error:
        export(str(folder), Settings(format=format, output=str(target), **settings))  # type: ignore[arg-type]
    assert list(target.parent.iterdir()) == []
    assert "\n" not in str(error.value)
    return str(error.value)


def scale(name: str, factor: float) -> Break:
    def breaks(model: onnx.ModelProto) -> None:
        for graph in every_graph(model.graph):
            for tensor in graph.initializer:
                if tensor.name.endswith(name):
                    tensor.CopyFrom(
                        numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name)
                    )

    return breaks


def test_wrong_values_are_told_with_both_numbers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    message = refused(monkeypatch, folder, scale("head.weight", 1.001))
    assert "logits against the runtime, off by" in message
    assert "(allowed 0.000" in message


def test_values_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert "not finite" in refused(monkeypatch, folder, scale("head.weight", float("nan")))


def test_wrong_depths_are_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    message = refused(monkeypatch, folder, scale("travel", 0.25), "onnx-adaptive")
    assert "end differently from the runtime's rule" in message
    assert message.endswith("(allowed 0)")


def test_another_opset_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def breaks(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 21

    assert "opset 21 (allowed 20)" in refused(monkeypatch, folder, breaks)


def test_an_invalid_graph_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def breaks(model: onnx.ModelProto) -> None:
        model.graph.node[0].op_type = "NoSuchOperator"

    assert "the ONNX checker says" in refused(monkeypatch, folder, breaks)


def test_weights_stored_twice_are_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def breaks(model: onnx.ModelProto) -> None:
        extra = np.zeros(40_000, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(extra, "again"))

    message = refused(monkeypatch, folder, breaks)
    assert "check failed, nothing was written: bytes " in message


def test_missing_weights_are_refused(folder: Path) -> None:
    config = read_config(folder)
    parts = graphs.Parts.of(folder, config)
    kept = {
        id(t): t.ByteSize() for p in (parts.begin, parts.attention, parts.mlp, parts.answer) for t in p.weights.values()
    }
    least = int(0.9 * sum(kept.values()))
    checks.size(least + 1, parts, config, 1)
    with pytest.raises(UserError, match="bytes"):
        checks.size(least - 1, parts, config, 1)


PRIVATE = {
    "local path": "/home/someone/model.py",
    "stack trace": 'File "model.py", line 3, in forward',
    "the folder it runs in": os.getcwd() + "/x",
    "windows path": "C:\\Users\\someone",
    "user name": f"made by {getpass.getuser()} today",
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_private_text_is_refused_wherever_it_hides(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    def breaks(model: onnx.ModelProto) -> None:
        model.graph.node[3].doc_string = PRIVATE[kind]

    assert "the file would hold a" in refused(monkeypatch, folder, breaks)


def test_private_text_in_the_config_is_refused(folder: Path) -> None:
    write_config(folder, read_config(folder).replace(provenance={"data": "/home/someone/pictures"}))
    target = folder.parent / "m.onnx"
    with pytest.raises(UserError, match="local path: '/home/someone"):
        export(str(folder), Settings(output=str(target)))
    assert not target.exists()


def test_a_label_that_is_also_a_user_name_is_fine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "cat")
    export(str(folder), Settings(output=str(folder.parent / "m.onnx")))
    assert (folder.parent / "m.onnx").is_file()


def test_metadata_inside_loop_bodies_is_searched_too() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (int64 n, bool c, float x) => (float y) {
        y = Loop (n, c, x)
            <body = b (int64 i, bool go, float a) => (bool on, float z) { on = Identity (go) z = Neg (a) }>
    }"""
    model = onnx.parser.parse_model(text)
    checks.privacy(model)
    model.graph.node[0].attribute[0].g.node[1].doc_string = "/home/someone/x"
    with pytest.raises(UserError, match="local path"):
        checks.privacy(model)


def test_a_file_that_does_not_load_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    with pytest.raises(UserError, match="the file is not a readable ONNX file") as error:
        checks.load(tmp_path / "m.onnx")
    assert str(tmp_path) not in str(error.value)


def test_a_wrong_number_of_8_bit_products_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def breaks(model: onnx.ModelProto) -> None:
        rounded = {n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear"}
        node = next(n for n in model.graph.node if n.op_type == "MatMul" and set(n.input) <= rounded)
        node.op_type = "Gemm"

    monkeypatch.setattr(checks, "structure", lambda model, opset: [])  # it would see the broken shapes first
    images = folder.parent / "images.npz"
    np.savez(images, x=np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), np.uint8))
    message = refused(monkeypatch, folder, breaks, precision="int8", calibration=str(images))
    assert "8-bit matrix products 31 (allowed 32)" in message


def test_an_interrupted_export_leaves_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "values", interrupt)
    target = folder.parent / "out" / "m.onnx"
    with pytest.raises(KeyboardInterrupt):
        export(str(folder), Settings(output=str(target)))
    assert list(target.parent.iterdir()) == []
