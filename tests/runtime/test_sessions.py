"""Opening graphs: what is checked, which device answers, and what damaged files come to."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odevit_serve import bundle
from odevit_serve.config import Config
from odevit_serve.errors import UsageError, UserError
from odevit_serve.runtime import sessions as session
from odevit_serve.runtime.sessions import CPU, CUDA, TENSORRT, Graphs, open_session, properties, read_metadata


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def graphs(folder: Path) -> Graphs:
    return Graphs(folder, bundle.read_config(folder))


def test_metadata_without_loading(tiny_bundle: Path) -> None:
    import onnx

    path = tiny_bundle / bundle.STEP
    assert read_metadata(path) == bundle.read_config(tiny_bundle)
    assert properties(path) == {p.key: p.value for p in onnx.load(path).metadata_props}


@pytest.mark.parametrize("name", [bundle.STEM, bundle.STEP, bundle.ATTENTION])
def test_missing_and_damaged_parts(copy: Path, name: str) -> None:
    def use() -> None:
        opened = graphs(copy)
        opened.maps(np.zeros((1, *opened.state_shape), np.float32))

    use()
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"{name} is not a readable ONNX file"):
        use()
    (copy / name).unlink()
    with pytest.raises(UserError, match=f"has no {name}"):
        use()


@pytest.mark.parametrize("name", [bundle.STEM, bundle.STEP, bundle.ATTENTION])
def test_a_part_of_other_weights_is_refused(copy: Path, name: str) -> None:
    """As after a training run that went on: the graphs would answer for a model that is no longer there."""
    import onnx

    model = onnx.load(copy / name)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "weights")
    entry.value = "0" * 64
    onnx.save(model, copy / name)
    with pytest.raises(UserError, match=f"{name} was made from other weights than those in model.safetensors: run "):
        graphs(copy).maps(np.zeros((1, 19, 24), np.float32))


@pytest.mark.parametrize("name", [bundle.STEM, bundle.STEP, bundle.ATTENTION])
def test_metadata_that_is_no_text_is_told(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data.replace(b"cc0-1.0", b"\x80c0-1.0"))
    with pytest.raises(UserError, match=f"{name}"):
        graphs(copy).maps(np.zeros((1, 19, 24), np.float32))


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ([-1, 19, 2, 3, 8], [-1, 19, 2, 3, 7], "while running Reshape"),
        ([17], [7], r"its maps have the shape \[1, 3, 6\]"),  # where the patches end
    ],
)
def test_an_attention_graph_that_opens_and_does_not_fit(
    copy: Path, was: list[int], becomes: list[int], told: str
) -> None:
    """Found by fuzzing: what onnxruntime said was the message."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(copy / bundle.ATTENTION)
    (tensor,) = (t for t in model.graph.initializer if numpy_helper.to_array(t).tolist() == was)
    tensor.CopyFrom(numpy_helper.from_array(np.array(becomes), tensor.name))
    onnx.save(model, copy / bundle.ATTENTION)
    with pytest.raises(UserError, match=f"{bundle.ATTENTION} cannot be run: .*{told}"):
        graphs(copy).maps(np.zeros((1, 19, 24), np.float32))


def test_parts_that_do_not_fit(copy: Path) -> None:
    shutil.copy(copy / bundle.STEM, copy / bundle.STEP)
    with pytest.raises(UserError, match=r"is not an ODE-ViT step\.onnx of this version: its inputs are pixel_values"):
        graphs(copy)


def test_config_that_does_not_fit(copy: Path) -> None:
    text = json.loads((copy / bundle.CONFIG).read_text())
    text["architecture"]["classes"], text["labels"] = 9, []
    (copy / bundle.CONFIG).write_text(json.dumps(text))
    with pytest.raises(UserError, match=r"logits has shape \[5\], config.json says \[9\]"):
        graphs(copy)


def test_no_ode_vit(tmp_path: Path) -> None:
    import onnx

    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    value = [onnx.helper.make_tensor_value_info(n, 1, [1]) for n in "xy"]
    graph = onnx.helper.make_graph([node], "g", value[:1], value[1:])
    model = onnx.helper.make_model(graph, ir_version=9, opset_imports=[onnx.helper.make_opsetid("", 20)])
    path = tmp_path / "relu.onnx"
    onnx.save(model, path)
    with pytest.raises(UserError, match="not an ODE-ViT exported by odevit-serve"):
        read_metadata(path)
    model.metadata_props.add(key=bundle.METADATA_KEY, value=Config().to_json())
    onnx.save(model, path)
    from odevit_serve.runtime.model import load

    with pytest.raises(UserError, match="is not an ODE-ViT: it takes x and gives y"):
        load(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "e.onnx").write_bytes(b"")
    for name, words in (("e.onnx", "is empty"), ("n.onnx", "does not exist"), (".", "not a file")):
        with pytest.raises(UserError, match=words):
            properties(tmp_path / name)
    with pytest.raises(UserError, match="does not exist"):
        open_session(tmp_path / "n.onnx")


def sentence(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return "fine"


def test_fuzz_metadata_reader(tiny_bundle: Path, tmp_path: Path) -> None:
    """3,000 damaged .onnx files: a configuration or one sentence."""
    whole, rng, path = (tiny_bundle / bundle.STEM).read_bytes(), np.random.default_rng(0), tmp_path / "f.onnx"
    tail = len(whole) - 6000  # most of the file is one field of weights: aim at its head and at the metadata
    told = set()
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 5)):
            at = int(rng.choice([rng.integers(0, 60), rng.integers(tail, len(data))]))
            at = min(at, len(data) - 1)
            if rng.random() < 0.7:
                data[at] = rng.integers(256)
            else:
                del data[at : at + int(rng.integers(1, 50))]
        path.write_bytes(data)
        told.add(sentence(lambda: read_metadata(path)).replace(str(path), "")[:30])
    assert "fine" in told
    assert len(told) > 3


def test_fuzz_config_reader(tiny_bundle: Path) -> None:
    """3,000 damaged config.json texts, and as many with one value of another kind."""
    text = (tiny_bundle / bundle.CONFIG).read_text()
    rng = np.random.default_rng(0)
    values = [None, True, -1, 0, 1e300, "", "x", [], {}, [None], float("nan"), 10**30]
    told = set()
    for case in range(3000):
        letters = list(text)
        for _ in range(rng.integers(1, 4)):
            letters[rng.integers(len(letters))] = str(rng.choice(list('{}[]",:0-9e.x\\\n')))
        told.add(sentence(lambda letters=letters: Config.from_json("".join(letters)))[:25])
        data = json.loads(text)
        inner = data[list(data)[case % len(data)]]
        target = inner if isinstance(inner, dict) and inner and rng.random() < 0.8 else data
        target[list(target)[rng.integers(len(target))]] = values[rng.integers(len(values))]
        told.add(sentence(lambda data=data: Config.from_json(json.dumps(data)))[:25])
    assert len(told) > 10
    assert all("\n" not in words for words in told)


@pytest.mark.slow
def test_fuzz_sessions(tiny_bundle: Path) -> None:
    """Damaged graphs in onnxruntime itself."""
    whole, rng = (tiny_bundle / bundle.STEP).read_bytes(), np.random.default_rng(0)
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 6)):
            data[rng.integers(len(data))] = rng.integers(256)
        cut = bytes(data[: rng.integers(1, len(data))]) if rng.random() < 0.3 else bytes(data)
        assert "\n" not in sentence(lambda cut=cut: open_session(cut, threads=1))


def test_bad_device_and_threads(tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match="unknown device 'tpu': choose one of cpu, cuda, tensorrt, auto"):
        open_session(tiny_bundle / bundle.STEM, "tpu")
    with pytest.raises(UsageError, match="threads must be at least 1, not 0"):
        open_session(tiny_bundle / bundle.STEM, threads=0)


class Fake:
    """An onnxruntime whose wheel claims providers that do not come up."""

    def __init__(self, real: Any, claims: list[str], works: list[str], folder: Path, raises: bool = False):
        self.__dict__.update(vars(real))
        self.__file__ = str(folder / "onnxruntime" / "__init__.py")
        self.get_available_providers = lambda: claims
        self.asked: list[list[str]] = []

        def create(source: Any, options: Any, providers: list[str], enable_fallback: int) -> Any:
            assert not enable_fallback  # onnxruntime's own fallback prints to stdout
            self.asked.append(providers)
            if raises and providers != [CPU]:
                raise RuntimeError("EP Error")
            return types.SimpleNamespace(get_providers=lambda: [p for p in providers if p in works])

        self.InferenceSession = create


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    import onnxruntime

    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    monkeypatch.setattr(session, "_told", set())

    def make(claims: list[str], works: list[str], raises: bool = False) -> Fake:
        monkeypatch.setattr(session, "_absent", set())
        ort = Fake(onnxruntime, claims, works, tmp_path, raises)
        monkeypatch.setattr(session, "runtime", lambda: ort)
        return ort

    return make


def test_auto_falls_back_with_one_warning(fake: Any) -> None:
    fake([CUDA, CPU], [CPU])
    with pytest.warns(RuntimeWarning) as told:
        [open_session(b"", "auto") for _ in range(3)]
    assert len(told) == 1
    assert "running on the CPU: libonnxruntime_providers_cuda.so: cannot open" in str(told[0].message)


def test_auto_on_a_cpu_wheel(fake: Any) -> None:
    ort = fake([CPU], [CPU])
    with pytest.warns(RuntimeWarning, match="has no CUDAExecutionProvider"):
        open_session(b"", "auto")
    assert ort.asked == [[CPU]]


def test_a_named_device_is_a_demand(fake: Any) -> None:
    # listed but silently not there; listed, and raising when it is set up; not even listed
    for claims, raises in (([TENSORRT, CUDA, CPU], False), ([TENSORRT, CUDA, CPU], True), ([CPU], False)):
        fake(claims, [CPU], raises)
        for device in ("cuda", "tensorrt"):
            with pytest.raises(UserError, match=f"device '{device}' is not available: "):
                open_session(b"", device)


def test_a_device_that_works(fake: Any, recwarn: pytest.WarningsRecorder) -> None:
    fake([CUDA, CPU], [CUDA, CPU])
    assert open_session(b"", "auto").get_providers()[0] == CUDA
    assert open_session(b"", "cuda").get_providers()[0] == CUDA
    assert not recwarn


def test_two_wheels(fake: Any, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime-1.31.1.dist-info").mkdir()
    (tmp_path / "onnxruntime_extensions-0.1.dist-info").mkdir()
    assert session.clash(tmp_path) is None
    (tmp_path / "onnxruntime_gpu-1.31.1.dist-info").mkdir()
    assert "onnxruntime and onnxruntime-gpu are both installed" in str(session.clash(tmp_path))
    fake([CPU], [CPU])
    with pytest.raises(UserError, match="both installed"):
        open_session(b"", "cuda")
    with pytest.warns(RuntimeWarning, match="both installed"):
        open_session(b"", "cpu")


def test_what_removing_one_of_two_wheels_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(UserError, match="incomplete"):
        session.runtime()


def test_real_cuda_is_not_here(tiny_bundle: Path) -> None:
    import onnxruntime

    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this machine may have a GPU")
    with pytest.raises(UserError, match=r"device 'cuda' is not available: .* has no CUDAExecutionProvider"):
        Graphs(tiny_bundle, bundle.read_config(tiny_bundle), "cuda")
