"""The unrolled graph: the same model as in torch, stored once, with nothing local in it."""

from __future__ import annotations

import ast
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import tiny_model

from odevit_serve.bundle import METADATA_KEY, SOLVERS, SPLITTINGS, Config, Integration
from odevit_serve.export.graph import Folded
from odevit_serve.export.onnx import assemble, every_graph, halve, write_metadata
from odevit_serve.export.pieces import Pieces
from odevit_serve.export.unrolled import unrolled
from odevit_serve.train.model import ODEViT
from odevit_serve.train.presets import PRESETS

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.mark.parametrize(
    ("solver", "splitting", "steps", "horizon"),
    [
        ("euler", "parallel", 8, 4.0),
        ("ab2", "parallel", 5, 4.0),
        *[(o, s, 3, 4.0) for o in SOLVERS for s in SPLITTINGS],
    ],
)
def test_unrolled_equals_torch(solver: str, splitting: str, steps: int, horizon: float) -> None:
    model = tiny_model()
    graph = unrolled(Pieces(Folded(model, Integration(horizon, steps, solver, splitting))))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    for batch in (1, 3, 8):
        images = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))
        (found,) = session.run(["logits"], {"pixel_values": images.numpy()})
        with torch.no_grad():
            wanted = model(images, steps=steps, horizon=horizon, solver=solver, splitting=splitting)
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_stem_of_convolutions_is_exported_too() -> None:
    model = tiny_model(stem="convolutions")
    session = onnxruntime.InferenceSession(unrolled(Pieces(Folded(model))).SerializeToString())
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    (found,) = session.run(["logits"], {"pixel_values": images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, model(images), atol=1e-4)


def test_weights_that_float16_holds_are_stored_in_it_and_nothing_changes() -> None:
    model = tiny_model(stem="convolutions")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)).numpy()
    graph = Pieces(Folded(model)).stem()
    before = graph.ByteSize()
    exact = next(t for t in graph.graph.initializer if t.name.endswith("patch.2.weight"))
    rough = next(t for t in graph.graph.initializer if t.name.endswith("patch.4.weight"))
    value = onnx.numpy_helper.to_array(rough) * np.float32(1.001)  # no longer among float16's numbers
    rough.CopyFrom(onnx.numpy_helper.from_array(value, rough.name))
    wanted = onnxruntime.InferenceSession(graph.SerializeToString())
    name, kept = exact.name, rough.name
    halve(graph, least=16)
    onnx.checker.check_model(graph, full_check=True)
    kinds = {t.name: t.data_type for t in graph.graph.initializer}
    assert (kinds[f"{name}.half"], kinds[kept]) == (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)
    assert graph.ByteSize() < before
    found = onnxruntime.InferenceSession(graph.SerializeToString())
    for session in (wanted, found):
        assert [i.name for i in session.get_inputs()] == ["pixel_values"]
    np.testing.assert_array_equal(*(s.run(None, {"pixel_values": images})[0] for s in (wanted, found)))


def test_names_and_shapes_are_those_promised() -> None:
    graph = unrolled(Pieces(Folded(tiny_model())), with_attention=True).graph
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }
    assert shapes == {"pixel_values": ["batch", 3, 16, 16], "logits": ["batch", 5], "cls_attention": ["batch", 3, 16]}


def test_attention_output_equals_torch_and_adds_no_weights() -> None:
    model = tiny_model()
    plain, both = (unrolled(Pieces(Folded(model)), maps) for maps in (False, True))
    images = torch.randn(3, 3, 16, 16)
    session = onnxruntime.InferenceSession(both.SerializeToString())
    (found,) = session.run(["cls_attention"], {"pixel_values": images.numpy()})
    with torch.no_grad():
        *_, last = model.trajectory(model.stem(images))
        np.testing.assert_allclose(found, model.cls_attention(last.state), atol=1e-5)
    assert _weights(both) - _weights(plain) < 0.01 * _weights(plain)


def _weights(model: onnx.ModelProto) -> int:
    return sum(t.ByteSize() for g in every_graph(model.graph) for t in g.initializer)


def test_weights_are_stored_once() -> None:
    """At the size of the smallest preset, where what a step adds weighs most."""
    torch.manual_seed(0)
    model = ODEViT(PRESETS["tiny"]).eval()
    sizes = {}
    for steps in (1, 24):
        graph = unrolled(Pieces(Folded(model, Integration(12.0, steps))))
        write_metadata(graph, model.config)
        sizes[steps] = graph.ByteSize()
    assert sizes[24] <= 1.05 * sizes[1]


def test_nothing_the_exporter_noted_down_is_left() -> None:
    graph = unrolled(Pieces(Folded(tiny_model())))
    data = graph.SerializeToString()
    for word in (b".py", b"stack_trace", b"site-packages", b"pkg.torch", b"/tests/"):
        assert word not in data
    assert all(not node.doc_string and not node.metadata_props for node in graph.graph.node)
    assert graph.producer_name == "odevit-serve"
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 20)]


def test_shapes_of_intermediate_values_are_kept() -> None:
    graph = unrolled(Pieces(Folded(tiny_model()))).graph
    known = {value.name for value in (*graph.value_info, *graph.output)}
    made = [name for node in graph.node for name in node.output]
    assert len(set(made)) == len(made)
    assert sum(name in known for name in made) > 0.9 * len(made)


def test_metadata_holds_the_config_and_plain_keys() -> None:
    model = tiny_model()
    graph = unrolled(Pieces(Folded(model)))
    write_metadata(graph, model.config, format="onnx")
    props = {entry.key: entry.value for entry in graph.metadata_props}
    assert Config.from_json(props[METADATA_KEY]) == model.config
    assert ast.literal_eval(props["names"]) == dict(enumerate(("ant", "bee", "cat", "dog", "eel")))
    assert json.loads(props["imgsz"]) == [16, 16]
    assert (props["stride"], props["task"], props["license"], props["format"]) == ("4", "classify", "cc0-1.0", "onnx")


def test_pieces_used_twice_share_weights_and_nothing_else() -> None:
    """The composition of f with itself, put together by name, is f after f."""
    advance = Pieces(Folded(tiny_model())).advance()
    text = """twice (float[batch, 19, 24] a) => (float[batch, 19, 24] c) {
        b = piece.Advance (a)
        c = piece.Advance (b)
    }"""
    once = onnxruntime.InferenceSession(advance.SerializeToString())
    twice = onnxruntime.InferenceSession(assemble(text, {"Advance": advance}).SerializeToString())
    x = np.random.default_rng(0).normal(size=(2, 19, 24)).astype(np.float32)
    middle = once.run(None, {"state": x})[0]
    np.testing.assert_allclose(twice.run(None, {"a": x})[0], once.run(None, {"state": middle})[0], atol=1e-6)
