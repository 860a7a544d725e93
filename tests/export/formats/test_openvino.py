"""OpenVINO's format by the real library: the same answers and depths, one sentence for what cannot be made."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odevit_serve import load
from odevit_serve.bundle import METADATA_KEY, read_config
from odevit_serve.config import Config
from odevit_serve.errors import MissingExtra, UsageError, UserError
from odevit_serve.export.checks import CheckFailed
from odevit_serve.export.formats import openvino
from odevit_serve.export.job import Settings, export

ov = pytest.importorskip("openvino", reason="needs openvino")
PICTURES = np.random.default_rng(3).integers(0, 256, (9, 16, 16, 3), dtype=np.uint8)


def make(bundle: Path, folder: Path, source: str, **more: Any) -> Path:
    target = folder / ("parts" if source == "parts" else f"{source}.xml")
    report = export(str(bundle), Settings(format="openvino", source=source, output=str(target), **more))
    names = {Path(path).name for path in report.files}
    assert names == (
        {f"{n}.{e}" for n in ("stem", "step", "attention") for e in ("xml", "bin")} | {"config.json"}
        if source == "parts"
        else {f"{source}.xml", f"{source}.bin"}
    )
    return target


def test_unrolled(tiny_bundle: Path, tmp_path: Path) -> None:
    path = make(tiny_bundle, tmp_path, "unrolled", steps=5, with_attention=True)
    model = load(tiny_bundle)
    found = openvino.compiled(path)({"pixel_values": np.stack([model.prepare(picture) for picture in PICTURES])})
    expected = model.predict(list(PICTURES), steps=5, adaptive=False)
    for row, answer in enumerate(expected):
        powers = np.exp(found["logits"][row] - found["logits"][row].max())
        np.testing.assert_allclose(powers / powers.sum(), answer.probabilities, atol=1e-5)
    maps = model.attention(PICTURES[0], steps=5, adaptive=False)
    np.testing.assert_allclose(found["cls_attention"][0].reshape(maps.heads.shape), maps.heads, atol=1e-5)


class SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def signal_stack() -> tuple[int | None, int, int]:
    found = SignalStack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found)) == 0
    return found.address, found.flags, found.size


def test_signals_have_the_stack_they_had(tiny_bundle: Path, tmp_path: Path) -> None:
    """Two models, of which the first goes first, left one that was no memory any more: a signal ended the process."""
    before = signal_stack()
    models = [openvino.compiled(make(tiny_bundle, tmp_path, "unrolled", steps=n, overwrite=True)) for n in (1, 2)]
    assert signal_stack() == before
    while models:
        del models[0]
        gc.collect()
    assert signal_stack() == before


def test_adaptive_ends_as_the_runtime_does_in_any_batch(tiny_bundle: Path, tmp_path: Path) -> None:
    model, run = load(tiny_bundle), openvino.compiled(make(tiny_bundle, tmp_path, "adaptive"))
    pixels = np.stack([model.prepare(picture) for picture in PICTURES])
    expected = model.predict(list(PICTURES))
    assert len({answer.steps for answer in expected}) > 2  # else equal depths would prove nothing
    together = run({"pixel_values": pixels})
    assert together["steps"].tolist() == [answer.steps for answer in expected]
    assert together["exit_reason"].tolist() == [int(answer.exit) for answer in expected]
    for row, answer in enumerate(expected):
        alone = run({"pixel_values": pixels[row : row + 1]})
        assert alone["steps"][0] == answer.steps
        assert model.labels[int(alone["logits"][0].argmax())] == answer.label


def test_parts_make_a_trajectory(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = make(tiny_bundle, tmp_path, "parts")
    own = read_config(folder).integration
    model = load(tiny_bundle)
    stem, step = openvino.compiled(folder / "stem.xml"), openvino.compiled(folder / "step.xml")
    pixels = np.stack([model.prepare(picture) for picture in PICTURES[:3]])
    state, size = stem({"pixel_values": pixels})["state"], np.full(3, own.step_size, np.float32)
    for _ in range(own.steps):
        found = step({"state": state, "step_size": size})
        state = found["next_state"].copy()
    labels = [model.labels[int(best)] for best in found["logits"].argmax(-1)]
    assert labels == [answer.label for answer in model.predict(list(PICTURES[:3]), adaptive=False)]


def test_the_file_says_what_it_is_and_nothing_of_this_machine(tiny_bundle: Path, tmp_path: Path) -> None:
    path = make(tiny_bundle, tmp_path, "unrolled", precision="fp16", max_drop=50.0)
    read = ov.Core().read_model(path)
    config = Config.from_json(read.get_rt_info(METADATA_KEY).astype(str))
    assert config.labels == read_config(tiny_bundle).labels
    assert read.get_rt_info("precision").astype(str) == "fp16"
    assert str(tmp_path) not in path.read_text()
    assert json.loads(read.get_rt_info("imgsz").astype(str)) == [16, 16]


def test_a_conversion_that_computes_otherwise_leaves_no_file(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = openvino.Compiled.run
    monkeypatch.setattr(openvino.Compiled, "run", lambda *given: [value + 0.01 for value in run(*given)])
    for source in ("unrolled", "parts"):
        with pytest.raises(CheckFailed, match="logits against the runtime, off by"):
            make(tiny_bundle, tmp_path, source)
    monkeypatch.setattr(openvino.Compiled, "run", lambda *given: [np.flip(value, -1) for value in run(*given)])
    with pytest.raises(CheckFailed, match="end differently from the runtime's rule"):
        make(tiny_bundle, tmp_path, "adaptive")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--source adaptive is fp32 in OpenVINO, not fp16"):
        make(tiny_bundle, tmp_path, "adaptive", precision="fp16")
    with pytest.raises(UserError, match="needs the travel over a horizon of 6"):
        make(tiny_bundle, tmp_path, "adaptive", horizon=6.0)
    (tmp_path / "unrolled.bin").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"unrolled.bin exists: add --overwrite"):
        make(tiny_bundle, tmp_path, "unrolled")
    assert (tmp_path / "unrolled.bin").read_bytes() == b"mine"
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(MissingExtra, match=r"pip install 'odevit-serve\[openvino\]'"):
        make(tiny_bundle, tmp_path, "parts")
