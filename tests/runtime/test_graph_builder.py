"""Pieces of graphs: cut out, they compute what they did inside."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from odevit_serve.errors import UserError
from odevit_serve.runtime.graph_builder import cut, every_graph, replace


def graph() -> onnx.ModelProto:
    """c = relu((a + w) * b), where b = w + w depends on weights alone."""
    nodes = [
        helper.make_node("Add", ["w", "w"], ["b"]),
        helper.make_node("Add", ["a", "w"], ["s"]),
        helper.make_node("Mul", ["s", "b"], ["p"]),
        helper.make_node("Relu", ["p"], ["c"]),
        helper.make_node("Neg", ["a"], ["unused"]),
    ]
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        nodes,
        "g",
        [value("a", 1, ["n"])],
        [value("c", 1, ["n"]), value("unused", 1, ["n"])],
        [numpy_helper.from_array(np.array([2.0], np.float32), "w"), numpy_helper.from_array(np.zeros(9), "other")],
        value_info=[value(name, 1, ["n"]) for name in ("s", "p")],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def run(model: onnx.ModelProto, name: str, values: list[float]) -> list[float]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {name: np.array(values, np.float32)})[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("begin", "end", "wanted"), [("a", "c", [0.0, 12.0]), ("s", "c", [0.0, 4.0]), ("a", "s", [-1.0, 3.0])]
)
def test_a_piece_computes_what_it_did_inside(begin: str, end: str, wanted: list[float]) -> None:
    assert run(cut(graph(), [begin], [end]).as_model(), begin, [-3.0, 1.0]) == wanted


def test_a_piece_has_only_what_it_reads() -> None:
    found = cut(graph(), ["s"], ["c"])
    assert [node.op_type for node in found.nodes] == ["Mul", "Relu"]
    assert [node.output[0] for node in found.constants] == ["b"]
    assert set(found.weights) == {"w"}


def test_where_it_cannot_be_cut() -> None:
    with pytest.raises(UserError, match="'a' is neither a weight nor made by a node"):
        cut(graph(), ["p"], ["s"])


def test_graphs_inside_of_nodes_are_found() -> None:
    inner, outer = graph().graph, graph()
    inner.name = "inside"
    node = helper.make_node("If", ["a"], ["y"], then_branch=inner, else_branch=inner)
    outer.graph.node.append(node)
    assert [found.name for found in every_graph(outer.graph)] == ["g", "inside", "inside"]
    replace(outer.graph.node, [n for n in outer.graph.node if n.op_type != "If"])
    assert len(list(every_graph(outer.graph))) == 1
