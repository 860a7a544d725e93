"""Graphs put together by name, and weights in half the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from odevit_serve import bundle
from odevit_serve.export.onnx import assemble, halve
from odevit_serve.runtime.graph_builder import Builder
from odevit_serve.runtime.graphs import Parts


def test_weights_that_float16_holds_are_stored_in_it_and_nothing_changes(tiny_bundle: Path) -> None:
    graph = onnx.load(tiny_bundle / bundle.STEM)
    exact, rough = sorted((t for t in graph.graph.initializer if len(t.dims) > 1), key=lambda t: -np.prod(t.dims))[:2]
    small = onnx.numpy_helper.to_array(exact).astype(np.float16).astype(np.float32)
    exact.CopyFrom(onnx.numpy_helper.from_array(small, exact.name))
    before, name, kept = graph.ByteSize(), exact.name, rough.name
    images = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
    wanted = onnxruntime.InferenceSession(graph.SerializeToString())
    halve(graph, least=16)
    onnx.checker.check_model(graph, full_check=True)
    kinds = {t.name: t.data_type for t in graph.graph.initializer}
    assert (kinds[f"{name}.half"], kinds[kept]) == (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)
    assert graph.ByteSize() < before
    found = onnxruntime.InferenceSession(graph.SerializeToString())
    np.testing.assert_array_equal(*(s.run(None, {"pixel_values": images})[0] for s in (wanted, found)))


def test_pieces_used_twice_share_weights_and_nothing_else(tiny_bundle: Path) -> None:
    """The composition of f with itself, put together by name, is f after f."""
    mlp = Parts.of(tiny_bundle, bundle.read_config(tiny_bundle)).mlp.as_model()
    text = """twice (float[batch, 19, 24] a) => (float[batch, 19, 24] c) {
        b = piece.F (a)
        c = piece.F (b)
    }"""
    once = onnxruntime.InferenceSession(mlp.SerializeToString())
    made = assemble(text, {"F": mlp})
    assert len(made.graph.initializer) == len(mlp.graph.initializer)
    twice = onnxruntime.InferenceSession(made.SerializeToString())
    x = np.random.default_rng(0).normal(size=(2, 19, 24)).astype(np.float32)
    middle = once.run(None, {once.get_inputs()[0].name: x})[0]
    again = once.run(None, {once.get_inputs()[0].name: middle})[0]
    np.testing.assert_allclose(twice.run(None, {"a": x})[0], again, atol=1e-6)


def test_values_of_a_graph_add_and_multiply() -> None:
    builder = Builder()
    a, b = builder.input("a", ["batch", 2]), builder.input("b", ["batch", 1])
    made = builder.model({"c": (2.0 * a + a * b - 1.0) / (b + 3.0)}, {"c": ["batch", 2]})
    onnx.checker.check_model(made, full_check=True)
    x, y = np.array([[1.0, 2.0]], np.float32), np.array([[5.0]], np.float32)
    (found,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"a": x, "b": y})
    np.testing.assert_allclose(found, (2 * x + x * y - 1) / (y + 3))


def test_what_only_one_branch_reads_is_computed_there_and_what_nobody_reads_is_left_out() -> None:
    text = """branches (float[n] a, bool asked) => (float[n] e) {
        b = Exp (a)
        c = Neg (b)
        d = Mul (c, c)
        unread = Sin (b)
        more = Add (unread, weight)
        kept = Tanh (a)
        e = If (asked) <
            then_branch = yes () => (float[n] then) { then = Add (d, kept) },
            else_branch = no () => (float[n] otherwise) { otherwise = Abs (kept) }
        >
    }"""
    made = assemble(text, {}, {"weight": np.ones(2, np.float32)})
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node] == ["Tanh", "If"]
    assert not made.graph.initializer
    branches = {a.name: [node.op_type for node in a.g.node] for a in made.graph.node[1].attribute}
    assert branches == {"then_branch": ["Exp", "Neg", "Mul", "Add"], "else_branch": ["Abs"]}
    session, a = onnxruntime.InferenceSession(made.SerializeToString()), np.array([-1.0, 2.0], np.float32)
    for asked, wanted in ((True, np.exp(a) ** 2 + np.tanh(a)), (False, np.abs(np.tanh(a)))):
        found = session.run(None, {"a": a, "asked": np.array(asked)})[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
