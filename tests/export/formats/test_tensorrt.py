"""Real engines, built for a named GPU generation on whatever machine this is; running one needs the GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from odevit_serve import bundle
from odevit_serve.errors import UsageError, UserError
from odevit_serve.export import precision
from odevit_serve.export.formats import tensorrt
from odevit_serve.export.formats.onnx_adaptive import adaptive_graph
from odevit_serve.runtime.graphs import Parts, step_graph, unrolled_graph
from odevit_serve.runtime.sessions import Graphs

BATCH = (1, 8, 64)


@pytest.fixture(scope="module")
def trt() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx")


Make = Callable[[str, str], onnx.ModelProto]


@pytest.fixture
def graph(tiny_bundle: Path) -> Make:
    def make(kind: str, number: str) -> onnx.ModelProto:
        config = bundle.read_config(tiny_bundle)
        parts = Parts.of(tiny_bundle, config)
        if number == "fp16":
            precision.halve_fields(parts)
        if number == "int8":
            images = np.random.default_rng(1).normal(size=(8, 3, 16, 16)).astype(np.float32)
            precision.quantise_fields(parts, precision.states(Graphs(tiny_bundle, config), images), symmetric=True)
        if kind == "unrolled":
            return unrolled_graph(parts, config.integration, with_attention=True)
        if kind == "step":
            return step_graph(parts, config.integration)
        return adaptive_graph(parts, config, compact=kind == "compact loop")

    return make


@pytest.mark.parametrize("number", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["unrolled", "step", "loop"])
def test_engines_build_without_a_gpu(trt: Any, graph: Make, kind: str, number: str) -> None:
    engine = tensorrt.build(trt, graph(kind, number).SerializeToString(), BATCH, "ada")
    assert len(engine) > 10_000


def test_an_8_bit_engine_builds(trt: Any, graph: Make) -> None:
    assert len(tensorrt.build(trt, graph("unrolled", "int8").SerializeToString(), BATCH, "SM89")) > 10_000


@pytest.mark.parametrize("generation", ["ampere", "blackwell-rtx"])
def test_engines_build_for_other_generations(trt: Any, graph: Make, generation: str) -> None:
    assert tensorrt.build(trt, graph("step", "fp32").SerializeToString(), (1, 1, 1), generation)


def test_a_generation_that_cannot_do_it_is_told_in_tensorrts_words(trt: Any, graph: Make) -> None:
    with pytest.raises(UserError, match=r"cannot build an engine: .*FP32 GEMM is not supported"):
        tensorrt.build(trt, graph("step", "fp32").SerializeToString(), BATCH, "SM75")


def test_a_graph_it_does_not_know_is_refused_in_one_sentence(trt: Any) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[n] x) => (float[m] y) { y = Unique (x) }'
    with pytest.raises(UserError, match=r"tensorrt_rtx refuses the graph: UNSUPPORTED_NODE at Unique") as error:
        tensorrt.build(trt, onnx.parser.parse_model(text).SerializeToString(), BATCH, "ada")
    assert "\n" not in str(error.value)


def test_a_loop_whose_shapes_change_is_refused(trt: Any, graph: Make) -> None:
    """The reason why engines get a loop of their own."""
    with pytest.raises(UserError, match="refuses the graph: UNSUPPORTED_NODE"):
        tensorrt.build(trt, graph("compact loop", "fp32").SerializeToString(), BATCH, "ada")


def test_a_damaged_graph_is_refused(trt: Any) -> None:
    with pytest.raises(UserError, match="refuses the graph"):
        tensorrt.build(trt, b"not a graph", BATCH, "ada")


def test_a_mistyped_generation_proposes_the_nearest(trt: Any) -> None:
    with pytest.raises(UsageError, match="unknown GPU generation 'adda': did you mean 'ada'"):
        tensorrt.capability(trt, "adda")


@pytest.mark.parametrize("text", ["8", "1,8", "a,b,c", "8,1,64", "0,8,64"])
def test_batches_must_be_three_growing_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="--batch takes three") as error:
        tensorrt.parse_batch(text)
    assert text in str(error.value)


class Recorder:
    """Stands in for the modules that cannot be installed here, to see what the builder asks of them."""

    def __init__(self, name: str, version: str):
        self.__name__, self.__version__ = name, version
        self.NetworkDefinitionCreationFlag = type("Flag", (), {"STRONGLY_TYPED": 1})


def test_strong_typing_is_asked_for_in_version_10_only() -> None:
    assert tensorrt._flags(Recorder("tensorrt", "10.9.0")) == 1 << 1
    assert tensorrt._flags(Recorder("tensorrt", "11.0.1")) == 0
    assert tensorrt._flags(Recorder("tensorrt_rtx", "1.7.1")) == 0


@pytest.mark.skipif(tensorrt.no_cuda() is None, reason="this machine has a GPU")
def test_running_an_engine_without_a_gpu_says_so_and_does_not_crash(tmp_path: Path) -> None:
    (tmp_path / "m.engine").write_bytes(b"engine")
    command = [sys.executable, "-m", "odevit_serve.export.run_engine", str(tmp_path / "m.engine")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("m.engine needs an NVIDIA GPU to run: ")
    assert len(done.stderr.strip().splitlines()) == 1
