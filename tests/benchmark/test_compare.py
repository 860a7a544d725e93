"""The benchmark on tiny models: its sums are right, its rows are all there, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from odevit_serve import load
from odevit_serve.benchmark import compare as benchmark
from odevit_serve.benchmark.compare import BenchmarkPlan, PassResult, System
from odevit_serve.benchmark.table import as_markdown, cells
from odevit_serve.guarantee.calibrate import open_images
from odevit_serve.runtime.model import BundleModel

TINY = BenchmarkPlan(batches=(1, 4), pictures=6, rounds=2, judged=10, compiled=False, grown=2, loads=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "some.npz"
    x = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    np.savez(path, x_test=x, y_test=np.arange(20) % 5, classes=np.array(["ant", "bee", "cat", "dog", "eel"]))
    return path


def test_fitted_exponent() -> None:
    sizes = [1, 3, 10, 50]
    assert benchmark.fit_exponent(sizes, [0.2 * n**1.7 for n in sizes]) == pytest.approx(1.7)
    assert benchmark.fit_exponent(sizes, [4.0] * 4) == pytest.approx(0)


def test_a_row_is_the_median_with_its_spread() -> None:
    system = System("x", "y", lambda pixels, batch: PassResult(pixels, []), lambda steps: 1e6 * (steps or 0))
    runs = [(seconds, PassResult(np.zeros(10), [seconds / 5] * 5, 3.0)) for seconds in (1.0, 0.5, 2.0)]
    got = benchmark.row(system, 2, 10, runs, peak=1e8)
    assert got["images_per_second"] == 10
    assert got["images_per_second_spread"] == [5, 20]
    assert (got["p50_ms"], got["p95_ms"]) == (pytest.approx(200), pytest.approx(400))
    assert (got["macs"], got["of_peak"]) == (3e6, pytest.approx(0.3))  # 3 million each, ten a second, of 100 million


def test_rounds_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}  # type: ignore[misc]
    found = benchmark.interleave(calls, 3, lambda text: None)
    assert order == [*"abc", *"abc", *"bca", *"cab"]  # to warm up, then each round starts elsewhere
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_sweeps_give_the_models_answers(tiny_bundle: Path) -> None:
    model = load(tiny_bundle, threads=1)
    assert isinstance(model, BundleModel)
    pixels = benchmark.some_pixels(model.config, 9, None, model.prepare)
    answers = {}
    for system in benchmark.bundle_systems(model, 1):
        runs = [system.run(pixels, batch) for batch in (1, 4)]
        np.testing.assert_array_equal(runs[0].answers, runs[1].answers)
        assert [len(run.latencies) for run in runs] == [9, 9]
        answers[system.name] = runs[0]
    full, early = answers["this model, full depth"], answers["this model, adaptive"]
    assert full.mean_steps == 8
    assert [answers[f"this model, {name}"].mean_steps for name in ("1 step", "2 steps", "3 steps")] == [1, 2, 3]
    assert early.mean_steps is not None
    assert early.mean_steps < 8


def test_batches_cover_all_pictures() -> None:
    sizes = []

    def call(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes.append(len(pixels))
        return np.eye(5)[pixels], pixels

    got = benchmark.in_batches(call, np.array([4, 0, 1, 2, 3]), 2)
    assert sizes == [2, 2, 1]
    assert got.answers.tolist() == [4, 0, 1, 2, 3]
    assert got.mean_steps == 2


@pytest.mark.slow
def test_all_rows(
    tiny_bundle: Path, data: Path, tmp_path: Path, traced_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file
    from timm.models.vision_transformer import VisionTransformer

    from odevit_serve import bundle
    from odevit_serve.benchmark import torch_rows as benchmark_torch
    from odevit_serve.config import TeacherFacts

    # One ViT is enough here: the larger one only takes longer.
    monkeypatch.setattr(benchmark_torch, "vits", lambda config, left_out: {"a ViT": config.teacher})

    folder = tmp_path / "taught"
    folder.mkdir()
    for path in tiny_bundle.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    bundle.write_config(folder, bundle.read_config(folder).replace(teacher=TeacherFacts("t", 2, 24, 1, 4.0)))
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=1, num_classes=5)
    save_file(vit.state_dict(), tmp_path / "t.safetensors")
    images = open_images(str(data))
    (tmp_path / "scratch").mkdir()
    got = benchmark.run(str(folder), TINY, images, str(data), 1, tmp_path / "scratch", tmp_path / "t.safetensors")
    names = {(row["system"], row["where"]) for row in got["rows"]}
    assert names == {
        ("this model, full depth", "odevit-serve"), ("this model, adaptive", "odevit-serve"),
        *((f"this model, {name}", "odevit-serve") for name in ("1 step", "2 steps", "3 steps")),
        ("this model, onnx", "onnxruntime"), ("this model, onnx-adaptive", "onnxruntime"),
        ("this model, onnx, int8", "onnxruntime"), ("the teacher", "onnxruntime"), ("the teacher", "torch eager"),
    }  # fmt: skip
    assert len(got["rows"]) == 2 * len(names)
    by = {(row["system"], row["where"], row["batch"]): row for row in got["rows"]}
    full, onnx = by["this model, full depth", "odevit-serve", 4], by["this model, onnx", "onnxruntime", 4]
    assert full["accuracy"] == onnx["accuracy"]
    assert full["agreement"] == onnx["agreement"] == 1
    pictures, model = [images.read(i) for i in range(min(TINY.judged, len(images)))], load(folder, threads=1)
    both = zip(model.predict(pictures, steps=1, adaptive=False), model.predict(pictures, adaptive=False), strict=True)
    agreement = np.mean([first.label == last.label for first, last in both])
    assert by["this model, 1 step", "odevit-serve", 4]["agreement"] == pytest.approx(agreement)
    assert full["macs"] == onnx["macs"] > by["this model, adaptive", "odevit-serve", 4]["macs"]
    assert by["the teacher", "onnxruntime", 1]["accuracy"] == by["the teacher", "torch eager", 1]["accuracy"]
    assert by["the teacher", "torch eager", 1]["peak_megabytes"] > full["peak_megabytes"]
    assert {curve["over"] for curve in got["growth"]} == {"batch", "steps", "tokens"}
    assert all(len(cells(row)) == 15 for row in got["rows"])
    page = as_markdown(got)
    assert page.count("\n| this model, adaptive |") == 2
    assert "left out by --quick" in page
    json.dumps(got, allow_nan=False)
