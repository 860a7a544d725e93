"""The CNN beside the model: a graph that runs, of the size it is said to have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from odevit_serve import bundle
from odevit_serve.benchmark.cnn import write
from odevit_serve.runtime.sessions import open_session, read_metadata


@pytest.fixture(scope="module")
def path(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cnn") / "cnn.onnx", bundle.read_config(tiny_bundle))


def test_the_cnn_has_the_size_of_a_resnet_20(path: Path) -> None:
    values = [numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    assert 0.26e6 < sum(v.size for v in values if v.dtype == np.float32) < 0.28e6
    nodes = onnx.load(path).graph.node
    kernels = [next(a.ints for a in node.attribute if a.name == "pads")[0] for node in nodes if node.op_type == "Conv"]
    assert kernels.count(1) + 1 == 20  # convolutions of 3 by 3, and the layer at the end


def test_it_answers_the_pictures_and_classes_of_the_model(path: Path, tiny_bundle: Path) -> None:
    session, pixels = open_session(path, threads=1), np.random.default_rng(0).normal(size=(3, 3, 16, 16))
    (logits,) = session.run(["logits"], {"pixel_values": pixels.astype(np.float32)})
    assert logits.shape == (3, 5)
    assert np.ptp(logits, axis=0).min() > 0  # it looks at the pictures
    (alone,) = session.run(["logits"], {"pixel_values": pixels[1:2].astype(np.float32)})
    np.testing.assert_allclose(alone[0], logits[1], rtol=1e-4)
    assert read_metadata(path) == bundle.read_config(tiny_bundle)


def test_it_is_the_same_file_every_time(path: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    assert write(tmp_path / "again.onnx", bundle.read_config(tiny_bundle)).read_bytes() == path.read_bytes()
