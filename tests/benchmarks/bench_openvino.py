"""OpenVINO beside onnxruntime, in turns: `python tests/benchmarks/bench_openvino.py BUNDLE --data DATA`.

Three graphs, as they are used: one step of the runtime, the unrolled file, and the adaptive file on real pictures
(how many steps they take decides its time). Both compute in fp32 on the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from bench_export import BATCHES, pictures

from odevit_serve import bundle
from odevit_serve.export.formats.openvino import F32
from odevit_serve.export.job import Settings, export
from odevit_serve.runtime.sessions import open_session


def best(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Best time of each, taken in turns so that a busy moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(next(iter(times.values()))) < 7:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: min(found) for name, found in times.items()}


def measure(source: str, data: str | None, threads: int, seconds: float) -> list[dict[str, Any]]:
    folder = bundle.find(source)
    config = bundle.read_config(folder)
    pixels = pictures(config, data, max(BATCHES))
    core, rows = openvino.Core(), []
    with tempfile.TemporaryDirectory() as scratch:
        files = {"one step": folder / bundle.STEP}
        for name, kind in (("unrolled", "onnx"), ("adaptive", "onnx-adaptive")):
            files[name] = Path(scratch) / f"{name}.onnx"
            export(str(folder), Settings(format=kind, output=str(files[name])))
        stem = open_session(folder / bundle.STEM, threads=threads)
        for name, path in files.items():
            theirs = open_session(path, threads=threads)
            compiled = core.compile_model(path, "CPU", {**F32, "INFERENCE_NUM_THREADS": threads})
            for batch in BATCHES:
                request = compiled.create_infer_request()
                feed: dict[str, Any] = {"pixel_values": pixels[:batch]}
                if name == "one step":
                    size = np.full(batch, config.integration.step_size, np.float32)
                    feed = {"state": stem.run(["state"], feed)[0], "step_size": size}
                right, ours = theirs.run(["logits"], feed)[0], request.infer(feed)["logits"]
                runs: dict[str, Callable[[], object]] = {
                    "onnxruntime": lambda feed=feed, theirs=theirs: theirs.run(None, feed),
                    "openvino": lambda feed=feed, request=request: request.infer(feed, share_inputs=True),
                }
                found = best(runs, seconds)
                rows.append(
                    {
                        "graph": name,
                        "batch": batch,
                        **{f"{key} images/s": batch / value for key, value in found.items()},
                        "ratio": found["onnxruntime"] / found["openvino"],
                        "logits off by": float(np.abs(right - ours).max()),
                    }
                )
    return rows


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("bundle")
    words.add_argument("--data", help="folder, zip or .npz of pictures; without it, noise")
    words.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    words.add_argument("--seconds", type=float, default=8.0, help="for each graph and batch size")
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    rows = measure(given.bundle, given.data, given.threads, given.seconds)
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print("| graph | batch | onnxruntime images/s | OpenVINO images/s | ratio | logits off by |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        speeds = f"{row['onnxruntime images/s']:,.0f} | {row['openvino images/s']:,.0f} | {row['ratio']:.2f}"
        print(f"| {row['graph']} | {row['batch']} | {speeds} | {row['logits off by']:.1e} |")


if __name__ == "__main__":
    main()
