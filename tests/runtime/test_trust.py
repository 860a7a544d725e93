"""ONNX files from somebody else: what reaches beyond the file is refused, memory is bounded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from odevit_serve import load
from odevit_serve.errors import UserError
from odevit_serve.runtime import trust
from odevit_serve.runtime.sessions import open_session

PICTURE = np.zeros((16, 16, 3), np.uint8)


def save(path: Path, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto] = [], **more: object) -> Path:  # noqa: B006
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants,
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("odd.domain", 1)]
    path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=8, **more).SerializeToString())
    return path


def external(location: str) -> onnx.TensorProto:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def loop(rounds: str) -> onnx.NodeProto:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["v"], ["u"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
            helper.make_tensor_value_info("u", TensorProto.FLOAT, None),
        ],
    )
    return helper.make_node("Loop", [rounds, "", "start"], ["y"], body=body)


def test_our_own_files_pass(tiny_bundle: Path, tiny_files: dict[str, Path]) -> None:
    for path in (*tiny_files.values(), *tiny_bundle.glob("*.onnx")):
        trust.check(path)
    for source in (tiny_bundle, *tiny_files.values()):
        assert (
            load(source, threads=1).predict(PICTURE).label == load(source, threads=1, trust=True).predict(PICTURE).label
        )


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "a/../../secret", "", "link", "..\\secret"])
def test_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    path = save(folder / "m.onnx", [helper.make_node("Identity", ["w"], ["y"])], [external(location)])
    with pytest.raises(UserError, match="data outside of its folder"):
        open_session(path, trusted=False)


def test_data_inside_of_a_nested_graph_is_seen(tmp_path: Path) -> None:
    node = loop("n")
    node.attribute[0].g.initializer.append(external("../secret"))
    path = save(tmp_path / "m.onnx", [node])
    with pytest.raises(UserError, match="data outside of its folder"):
        trust.check(path)


def test_data_beside_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    path = save(tmp_path / "m.onnx", [helper.make_node("Identity", ["w"], ["y"])], [external("w.bin")])
    assert open_session(path, trusted=False).run(None, {"x": np.zeros(1, np.int64)})[0].tolist() == [0, 1, 2, 3]


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    save(blobs / "1", [helper.make_node("Identity", ["w"], ["y"])], [external("w.bin")])
    (blobs / "2").write_bytes(bytes(16))
    (folder / "m.onnx").symlink_to(blobs / "1")
    (folder / "w.bin").symlink_to(blobs / "2")
    trust.check(folder / "m.onnx")


def test_custom_operators_and_compiled_code_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.onnx", [helper.make_node("Anything", ["x"], ["y"], domain="odd.domain")])
    with pytest.raises(UserError, match=r"not onnxruntime's own \('odd.domain.Anything'\)"):
        trust.check(path)
    path = save(tmp_path / "b.onnx", [helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft")])
    with pytest.raises(UserError, match="compiled code"):
        trust.check(path)


def test_loops_have_a_fixed_number_of_rounds(tmp_path: Path) -> None:
    start = numpy_helper.from_array(np.zeros(1, np.float32), "start")
    for name, rounds in (("x", 5), ("", 5), ("n", 10**9), ("n", -1)):
        constants = [start, numpy_helper.from_array(np.array(rounds), "n")]
        with pytest.raises(UserError, match="fixed number of iterations"):
            trust.check(save(tmp_path / "m.onnx", [loop(name)], constants))
    trust.check(save(tmp_path / "m.onnx", [loop("n")], [start, numpy_helper.from_array(np.array(8), "n")]))


ALLOCATE = """
import sys
from pathlib import Path
import numpy as np
from odevit_serve.runtime.sessions import open_session
session = open_session(Path(sys.argv[1]), threads=1, trusted=sys.argv[2] == "trusted")
try:
    session.run(None, {"x": np.array([int(sys.argv[3])])})
except Exception as error:
    print(type(error).__name__)
else:
    print("ran")
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    nodes = [helper.make_node("ConstantOfShape", ["x"], ["big"]), helper.make_node("ReduceSum", ["big"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes)

    def run(how: str, size: int) -> str:
        words = [sys.executable, "-c", ALLOCATE, str(path), how, str(size)]
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()

    assert run("strange", 1000) == "ran"
    assert run("strange", trust._memory() // 4 + 2**20) == "Fail"  # refused before a page of it was touched


def test_a_bundle_that_was_tampered_with(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    model = onnx.load(folder / "step.onnx")
    model.graph.initializer.append(external("../../secret"))
    onnx.save(model, folder / "step.onnx")
    with pytest.raises(UserError, match=r"step.onnx refers to data outside of its folder.*--trust"):
        load(folder)
