"""Graphs that open and fail on their way, single files and parts of a bundle: one sentence that names the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import odevit_serve
from odevit_serve import bundle
from odevit_serve.errors import UserError
from odevit_serve.export import job
from odevit_serve.runtime.graph_builder import every_graph

PICTURE = np.zeros((16, 16, 3), np.uint8)


def damage(path: Path) -> None:
    """An attribute that onnxruntime looks at when the node runs, and not before."""
    model = onnx.load(path)
    nodes = [node for graph in every_graph(model.graph) for node in graph.node if node.op_type == "Gelu"]
    assert nodes
    for node in nodes:
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("approximate", "odd"))
    onnx.save(model, path)


@pytest.mark.parametrize("form", ["onnx", "onnx-adaptive"])
def test_a_single_file(tiny_bundle: Path, tmp_path: Path, form: str) -> None:
    """Found by fuzzing: onnxruntime's exception went through to the user."""
    path = tmp_path / "model.onnx"
    job.export(str(tiny_bundle), job.Settings(form, output=str(path)))
    assert odevit_serve.load(path).predict(PICTURE).steps
    damage(path)
    with pytest.raises(UserError, match=r"^model\.onnx cannot be run: .*(Gelu|approximation)"):
        odevit_serve.load(path).predict(PICTURE)


def test_logits_of_another_shape(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    job.export(str(tiny_bundle), job.Settings("onnx", output=str(path)))
    model = onnx.load(path)
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    for node in model.graph.node:
        node.output[:] = ["narrow" if name == "logits" else name for name in node.output]
        node.input[:] = ["narrow" if name == "logits" else name for name in node.input]
    model.graph.node.append(onnx.helper.make_node("Gather", ["narrow", "one"], ["logits"], axis=1))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "one"))
    logits.type.tensor_type.shape.dim[1].dim_param = "any"
    onnx.save(model, path)
    with pytest.raises(UserError, match=r"model\.onnx cannot be run: its logits have the shape \[1, 1\], not \[1, 5\]"):
        odevit_serve.load(path).predict(PICTURE)


def test_a_part_of_a_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(tiny_bundle, folder)
    damage(folder / bundle.STEP)
    with pytest.raises(UserError, match=r"^mine/step\.onnx cannot be run: .*(Gelu|approximation)"):
        odevit_serve.load(folder).predict(PICTURE)
