"""Ratios that the runtime is held to, each taken in one run.

    python tests/benchmarks/bench_runtime.py [--bundle B] [--data D] [--only NAME] [--output runtime.json]

Without a bundle it takes the one that ships with the package, or a random one of the preset `tiny` (marked as such:
what an exit saves then means nothing, what it costs still does). Needs the extras `train` and `export`, for the graphs
that it is compared with. Times are the best of interleaved repetitions, since other work on the machine only ever adds;
where two things take seconds each, medians of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from odevit_serve import bundle, costs, load
from odevit_serve.config import Integration
from odevit_serve.data.datasets import Images
from odevit_serve.guarantee import calibrate
from odevit_serve.runtime import exits
from odevit_serve.runtime.model import BundleModel
from odevit_serve.runtime.sessions import open_session
from odevit_serve.runtime.slots import Job

Arrays = np.ndarray[Any, Any]


def best(calls: dict[str, Callable[[], object]], repeats: int = 40, seconds: float = 30.0) -> dict[str, float]:
    """The shortest time of each call, taken in turns."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.monotonic() + seconds
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
        if time.monotonic() > end:
            break
    return {name: min(values) for name, values in times.items()}


def random_bundle(folder: Path, steps: int | None = None) -> Path:
    import torch

    from odevit_serve.export import parts
    from odevit_serve.train.model import ODEViT
    from odevit_serve.train.presets import PRESETS

    torch.manual_seed(0)
    config = PRESETS["tiny"]
    if steps:
        config = config.replace(integration=Integration(12.0, steps))
    model = ODEViT(config)
    with torch.no_grad():
        model.head.weight.normal_()
    model.save_pretrained(folder)
    parts(folder)
    return folder


def host_loop(folder: Path, scratch: Path, steps: int = 24) -> dict[str, Any]:
    """24 steps through the runtime against the unrolled graph of 24 steps, one image at a time, same threads."""
    from odevit_serve.export.job import Settings, export

    target = scratch / "unrolled.onnx"
    export(str(folder), Settings(format="onnx", steps=steps, output=str(target)))
    answer: dict[str, Any] = {f"{threads} threads": _loop(folder, target, steps, threads) for threads in (1, 2)}
    return {**answer, "goal": "ratio at most 1.10"}


def _loop(folder: Path, target: Path, steps: int, threads: int) -> dict[str, float]:
    model = BundleModel(folder, bundle.read_config(folder), threads=threads)
    session = open_session(target, threads=threads)
    pixels = np.random.default_rng(0).normal(size=(1, *model.config.preprocessing.input_size)).astype(np.float32)
    slots, size = model.slots(1), model.config.integration.horizon / steps
    depth = exits.Depth(steps, size, steps, exits.find("margin"), np.inf)  # a rule that looks and never stops

    def runtime() -> Arrays:
        slots.admit(pixels, [Job(0, depth)])
        while True:
            ended = slots.step()
            if ended:
                return ended[0].logits

    def bare() -> None:
        """The step graph alone, with nobody looking at what it gives."""
        slots.admit(pixels, [Job(0, depth)])
        for _ in range(steps):
            slots._run_step(1)
        slots.clear()

    def unrolled() -> Arrays:
        return session.run(["logits"], {"pixel_values": pixels})[0]  # type: ignore[no-any-return]

    assert np.abs(runtime() - unrolled()[0]).max() < 1e-3
    got = best({"runtime": runtime, "unrolled": unrolled, "bare": bare}, 80)
    return {
        "runtime_ms": 1000 * got["runtime"],
        "bare_step_graph_ms": 1000 * got["bare"],
        "unrolled_ms": 1000 * got["unrolled"],
        "ratio": got["runtime"] / got["unrolled"],
        "host_against_bare": got["runtime"] / got["bare"],
    }


def pixels_of(model: BundleModel, images: Images) -> Arrays:
    return np.stack([model.prepare(images.read(i)) for i in range(len(images))])


def sweep(model: BundleModel, pixels: Arrays, depth: exits.Depth, capacity: int = 32) -> tuple[float, float]:
    """Seconds and mean steps of all images through the slots; decoding left out."""
    slots, at, steps = model.slots(capacity), 0, 0
    began = time.perf_counter()
    while at < len(pixels) or slots.active:
        count = min(slots.free, len(pixels) - at)
        if count:
            slots.admit(pixels[at : at + count], [Job(i, depth) for i in range(count)])
            at += count
        steps += slots.active
        slots.step()
    return time.perf_counter() - began, steps / len(pixels)


def adaptive(folder: Path, images: Images, scratch: Path) -> dict[str, Any]:
    """The same images at full depth and with calibrated exits; the saving in time against the saving in steps."""
    copy = Path(shutil.copytree(folder, scratch / "calibrated"))
    half = len(images) // 2
    report = calibrate.calibrate(copy, images.subset(range(half)), 0.01, 0.05)
    model = load(copy, threads=2)
    assert isinstance(model, BundleModel)
    pixels = pixels_of(model, images.subset(range(half, len(images))))
    own, full = model.depth(), model.depth(adaptive=False)
    parts = [pixels[at : at + 500] for at in range(0, len(pixels), 500)]
    for depth in (own, full):
        sweep(model, parts[0], depth)
    found: list[tuple[float, float, float]] = []  # adaptive and full seconds of a part, one after the other; its steps
    for _ in range(3):
        for part in parts:
            seconds, mean = sweep(model, part, own)
            found.append((seconds, sweep(model, part, full)[0], mean))
    fast, slow, steps = np.array(found).T
    ratios = slow / fast
    shares = ratios * steps / full.steps
    mean, shape, way = float(steps.mean()), model.config.architecture, model.config.integration
    return {
        "images": len(pixels),
        "calibrated_on": half,
        "threshold": report.policy.threshold,
        "travel": "scaled by speed" if report.policy.cls_speed else "measured",
        "images_per_second": {
            "adaptive": len(parts[0]) / float(np.median(fast)),
            "full depth": len(parts[0]) / float(np.median(slow)),
        },
        "mean_steps": mean,
        "full_steps": full.steps,
        "ratio": float(np.median(ratios)),
        "promised_by_steps": full.steps / mean,
        "promised_by_multiply_adds": way.macs(shape) / way.macs(shape, mean),
        "of_promise": float(np.median(shares)),
        "of_promise_quartiles": np.percentile(shares, [25, 75]).tolist(),
        "goal": "of_promise at least 0.9",
    }


def cold(folder: Path, scratch: Path) -> dict[str, Any]:
    """From shell to answer in a new process, against importing torch; peak memory of that process."""
    from PIL import Image

    picture = scratch / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)).save(picture)
    command = [sys.executable, "-c", "from odevit_serve.cli import main; main()", "predict", str(picture)]
    command += ["--model", str(folder)]

    def call(words: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(words, check=True, capture_output=True)

    got = best({"predict": call(command), "torch": call([sys.executable, "-c", "import torch"])}, 5)
    measure = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, capture_output=True); "
    measure += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    peak = subprocess.run([sys.executable, "-c", measure, *command], check=True, capture_output=True, text=True).stdout
    return {
        "predict_seconds": got["predict"],
        "import_torch_seconds": got["torch"],
        "ratio": got["predict"] / got["torch"],
        "peak_megabytes": int(peak) / 1024,
        "goal": "ratio below 1, peak below 300 MB",
    }


def against_vit(folder: Path, scratch: Path) -> dict[str, Any]:
    """Images a second at full depth, and those of a timm ViT of the same width and 12 layers, both in onnxruntime."""
    import timm
    import torch

    model = load(folder, threads=2)
    assert isinstance(model, BundleModel)
    shape = model.config.architecture
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=shape.image_size, patch_size=shape.patch_size, embed_dim=shape.width,
        num_heads=shape.heads, depth=12, num_classes=shape.classes,
    ).eval()  # fmt: skip
    path = scratch / "vit.onnx"
    example = torch.zeros(2, 3, shape.image_size, shape.image_size)
    with contextlib.redirect_stdout(sys.stderr):
        program = torch.onnx.export(
            vit, (example,), dynamo=True, opset_version=20, input_names=["x"], verbose=False,
            dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}},
        )  # fmt: skip
    program.save(path)
    session = open_session(path, threads=2)
    pixels = np.random.default_rng(0).normal(size=(128, *model.config.preprocessing.input_size)).astype(np.float32)
    full = model.depth(adaptive=False)

    def teacher() -> None:
        for at in range(0, 128, 32):
            session.run(None, {"x": pixels[at : at + 32]})

    got = best({"vit": teacher, "model": lambda: sweep(model, pixels, full)}, 8, 60)
    own = model.config.integration
    answer: dict[str, Any] = {
        "vit_images_per_second": 128 / got["vit"],
        "model_images_per_second": 128 / got["model"],
        "full_steps": full.steps,
        "ratio": got["vit"] / got["model"],
        "macs": {"model, full depth": int(own.macs(shape)), "vit": None},
    }
    if model.config.teacher:
        answer["macs"]["vit"] = costs.teacher_macs(model.config.teacher, shape)
    return answer


def show(results: dict[str, Any]) -> None:
    """A table of two columns, nested names joined."""

    def rows(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                rows(inner, f"{name} / {key}" if name else key)
        else:
            print(f"{name:<70} {value:.4g}" if isinstance(value, float) else f"{name:<70} {value}")

    rows(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle")
    parser.add_argument("--data", help="pictures for the benchmarks of exits; without them those are left out")
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--only", choices=["host_loop", "adaptive", "cold", "against_vit"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shipped = bundle.DEFAULT in bundle.bundled()
        random = options.bundle is None and not shipped
        folder = random_bundle(scratch / "random") if random else bundle.find(options.bundle)
        images = calibrate.open_images(options.data, limit=options.limit) if options.data else None
        jobs: dict[str, Callable[[], dict[str, Any]]] = {
            "host_loop": lambda: host_loop(folder, scratch),
            "cold": lambda: cold(folder, scratch),
            "against_vit": lambda: against_vit(folder, scratch),
        }
        if images is not None:
            jobs["adaptive"] = lambda: adaptive(folder, images, scratch)
        results: dict[str, Any] = {
            "bundle": "random weights" if random else bundle.read_config(folder).name,
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0],
        }
        for key, job in jobs.items():
            if options.only in (None, key):
                print(f"{key} ...", file=sys.stderr)
                results[key] = job()
        results["peak_megabytes_here"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    show(results)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
