"""Graphs made of copies of a bundle's own: the same model as in torch, by any solver, stored once."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import tiny_model

from odevit_serve import bundle
from odevit_serve.bundle import METADATA_KEY
from odevit_serve.config import Config, Integration
from odevit_serve.errors import UserError
from odevit_serve.runtime.graph_builder import Builder, cut, every_graph
from odevit_serve.runtime.graph_files import digest, properties, read, write_metadata
from odevit_serve.runtime.graphs import Parts, stem_graph, step_graph, unrolled_graph
from odevit_serve.runtime.model import load
from odevit_serve.solvers import SOLVERS, SPLITTINGS, advance, memories, splits
from odevit_serve.train.model import ODEViT

PAIRS = [(solver, splitting) for solver in SOLVERS for splitting in SPLITTINGS if splits(solver, splitting)]


@pytest.fixture(scope="module")
def parts(tiny_bundle: Path) -> Parts:
    return Parts.of(tiny_bundle, bundle.read_config(tiny_bundle))


def opened(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize(("solver", "splitting"), PAIRS)
@torch.no_grad()
def test_unrolled_and_stepped_equal_torch(parts: Parts, solver: str, splitting: str) -> None:
    model, own = tiny_model(), Integration(4.0, 3, solver, splitting)
    unrolled = opened(unrolled_graph(parts, own))
    stem, step = opened(stem_graph(parts, own)), opened(step_graph(parts, own))
    for batch in (1, 3, 8):
        images = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))
        wanted = model(images, steps=3, horizon=4.0, solver=solver, splitting=splitting)
        (found,) = unrolled.run(["logits"], {"pixel_values": images.numpy()})
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        state = stem.run(None, {"pixel_values": images.numpy()})[0]
        for _ in range(3):
            feed = {"state": state, "step_size": np.full(batch, own.step_size, np.float32)}
            state, logits = step.run(["next_state", "logits"], feed)
        np.testing.assert_allclose(logits, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("solver", "splitting"), [("rk4", "strang"), ("ab2", "lie"), ("heun", "parallel"), ("anderson", "parallel")]
)
def test_the_pieces_of_an_arranged_step_are_found_again(
    tiny_bundles: Callable[..., Path], solver: str, splitting: str
) -> None:
    """A bundle of any solver can become one of any other: what was arranged is cut into the same pieces."""
    folder = tiny_bundles(solver=solver, splitting=splitting)
    again = Parts.of(folder, bundle.read_config(folder))
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    session = opened(unrolled_graph(again, Integration(4.0, 5)))
    with torch.no_grad():
        wanted = ODEViT.from_pretrained(folder)(images, steps=5, solver="euler", splitting="parallel")
    np.testing.assert_allclose(session.run(["logits"], {"pixel_values": images.numpy()})[0], wanted, atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
@torch.no_grad()
def test_the_runtime_takes_another_solver(tiny_bundle: Path, solver: str) -> None:
    model, pictures = load(tiny_bundle), np.random.default_rng(0).integers(0, 256, (4, 20, 20, 3), dtype=np.uint8)
    found = model.predict(list(pictures), solver=solver, steps=5, adaptive=False)
    pixels = torch.from_numpy(np.stack([model.prepare(picture) for picture in pictures]))
    wanted = tiny_model()(pixels, steps=5, solver=solver).softmax(-1)
    np.testing.assert_allclose(np.stack([p.probabilities for p in found]), wanted, atol=1e-4)
    assert not any(p.guaranteed for p in found)


@torch.no_grad()
def test_anderson_by_arrays_tensors_and_the_step_graph_of_bundled_weights() -> None:
    """One function runs on all three; field evaluations are torch's, so that arithmetic alone is compared."""
    folder = bundle.find(None)
    model = ODEViT.from_pretrained(folder).eval()
    own = model.config.integration.by("anderson")
    parts = Parts.of(folder, model.config)
    stem, step = opened(stem_graph(parts, own)), opened(step_graph(parts, own))
    images = torch.randn(3, *model.config.preprocessing.input_size, generator=torch.Generator().manual_seed(0))
    tokens = model.config.architecture.tokens
    state = stem.run(None, {"pixel_values": images.numpy()})[0]
    assert state.shape[1] == (1 + memories("anderson", "parallel")) * tokens
    assert not state[:, tokens:].any()
    size = np.full(3, own.step_size, np.float32)
    tensor, memory = model.stem(images), []
    array, kept = tensor.numpy(), []
    fields = [lambda y, f=f: f(torch.from_numpy(y)).numpy() for f in model.psi.fields]
    for number in range(own.steps):
        start = tensor
        tensor, velocity, memory = advance(model.psi.fields, start, own.step_size, memory, "anderson")
        array, _, kept = advance(tuple(fields), array, np.float32(own.step_size), kept, "anderson")
        state, logits = step.run(["next_state", "logits"], {"state": state, "step_size": size})
        near = 1e-3 * float(tensor.abs().max())
        np.testing.assert_allclose(array, tensor, atol=near)
        np.testing.assert_allclose(state[:, :tokens], tensor, atol=near)
        for row, value in enumerate(memory, 1):
            np.testing.assert_allclose(state[:, row * tokens : (row + 1) * tokens], value, atol=near)
        np.testing.assert_allclose(logits, model.answer(tensor), atol=2e-2)
        if number:  # the first step is Euler's, the second no longer
            assert (tensor - (start + own.step_size * velocity)).abs().max() > 10 * near


def test_sums_of_values_are_those_of_arrays() -> None:
    builder = Builder()
    x = builder.input("x", ["batch", 3, 4])
    outputs = {"kept": x.sum((1, 2), keepdims=True), "plain": x.sum(axis=(-1,))}
    assert [(value.ndim, list(value.shape or ())) for value in outputs.values()] == [
        (3, ["batch", 1, 1]),
        (2, ["batch", 3]),
    ]
    array = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    kept, plain = opened(builder.model(outputs)).run(["kept", "plain"], {"x": array})
    np.testing.assert_allclose(kept, array.sum((1, 2), keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(plain, array.sum(-1), rtol=1e-5)
    with pytest.raises(ValueError, match="is not known"):
        builder.node("Identity", x)[0].ndim  # noqa: B018


def test_attention_output_equals_torch_and_adds_no_weights(parts: Parts) -> None:
    model, own = tiny_model(), parts.config.integration
    plain, both = (unrolled_graph(parts, own, maps) for maps in (False, True))
    images = torch.randn(3, 3, 16, 16)
    (found,) = opened(both).run(["cls_attention"], {"pixel_values": images.numpy()})
    with torch.no_grad():
        *_, last = model.trajectory(model.stem(images))
        np.testing.assert_allclose(found, model.cls_attention(last.state), atol=1e-5)
    assert _weights(both) - _weights(plain) < 0.01 * _weights(plain)


def _weights(model: onnx.ModelProto) -> int:
    return sum(t.ByteSize() for g in every_graph(model.graph) for t in g.initializer)


def test_weights_are_stored_once() -> None:
    """Of the default model: 24 steps are at most a twentieth larger than one."""
    folder = bundle.find(None)
    parts = Parts.of(folder, bundle.read_config(folder))
    sizes = {}
    for steps in (1, 24):
        graph = unrolled_graph(parts, Integration(12.0, steps))
        write_metadata(graph, parts.config)
        sizes[steps] = graph.ByteSize()
    assert sizes[24] <= 1.05 * sizes[1]


def test_names_shapes_and_nothing_local(parts: Parts) -> None:
    model = unrolled_graph(parts, parts.config.integration, with_attention=True)
    graph = model.graph
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }
    assert shapes == {"pixel_values": ["batch", 3, 16, 16], "logits": ["batch", 5], "cls_attention": ["batch", 3, 16]}
    known = {value.name for value in (*graph.value_info, *graph.output)}
    made = [name for node in graph.node for name in node.output]
    assert len(set(made)) == len(made)
    assert sum(name in known for name in made) > 0.9 * len(made)
    for word in (b".py", b"stack_trace", b"site-packages", b"pkg.torch", b"/tests/"):
        assert word not in model.SerializeToString()
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 20)]


def test_metadata_holds_the_config_plain_keys_and_a_digest_of_the_graph_alone(parts: Parts) -> None:
    graph = unrolled_graph(parts, parts.config.integration)
    before = digest(graph)
    write_metadata(graph, parts.config, format="onnx")
    props = properties(graph)
    assert props["graph"] == before == digest(graph)
    assert Config.from_json(props[METADATA_KEY]) == parts.config
    assert ast.literal_eval(props["names"]) == dict(enumerate(("ant", "bee", "cat", "dog", "eel")))
    assert json.loads(props["imgsz"]) == [16, 16]
    assert (props["stride"], props["task"], props["license"], props["format"]) == ("4", "classify", "cc0-1.0", "onnx")


def test_what_cannot_be_cut_is_told(tiny_bundle: Path, tmp_path: Path) -> None:
    step = read(tiny_bundle / bundle.STEP)
    with pytest.raises(UserError, match="'nothing' is neither a weight nor made by a node"):
        cut(step, ["state"], ["nothing"])
    del step.metadata_props[:]
    with pytest.raises(
        UserError, match="does not name its pieces, as one of an older version: run odevit-serve export"
    ):
        Parts(read(tiny_bundle / bundle.STEM), step, bundle.read_config(tiny_bundle))
    with pytest.raises(UserError, match=r"has no stem\.onnx: run odevit-serve export .* --format parts --overwrite"):
        Parts.of(tmp_path, bundle.read_config(tiny_bundle))
    (tmp_path / bundle.STEM).write_bytes(b"\x08\x0a nothing of the kind")
    with pytest.raises(UserError, match="is not a readable ONNX file"):
        Parts.of(tmp_path, bundle.read_config(tiny_bundle))
