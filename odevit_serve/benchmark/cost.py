"""What a fresh process pays: the time to load a model and the memory it takes at most, and the machine's matrix peak.

It is a process of its own, so that nothing that was loaded before counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import UserError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def fresh(threads: int, **task: Any) -> dict[str, float]:
    """The answer of a new process to a task."""
    words = [sys.executable, "-m", "odevit_serve.benchmark.cost", json.dumps({"threads": threads, **task}, default=str)]
    limits = dict.fromkeys(THREADS, str(threads))
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **limits})
    if done.returncode:
        raise UserError(f"measuring {task['kind']} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def peak_memory() -> float:
    """Most megabytes that this process has held."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):  # not Linux; there a new process may inherit the figure of its parent
        import resource

        scale = 1024**2 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def matrix_peak(seconds: float = 0.4, size: int = 1024) -> dict[str, float]:
    """Multiply-adds a second of a single-precision matrix product by numpy's library."""
    import numpy as np

    a = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    out = a @ a
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        np.matmul(a, a, out=out)
        count += 1
    return {"macs_per_second": count * size**3 / (time.perf_counter() - began)}


def _load(task: dict[str, Any]) -> dict[str, float]:
    began = time.perf_counter()
    threads, batch, shape = task["threads"], task["batch"], task["shape"]
    import numpy as np

    pixels = np.zeros((batch, *shape), np.float32)
    if task["kind"] == "bundle":
        from ..runtime.model import load_bundle
        from .compare import sweep

        model = load_bundle(task["path"], threads=threads)
        loaded = time.perf_counter()
        sweep(model.slots(batch), model.depth(adaptive=False), pixels)
    elif task["kind"] == "graph":
        from ..runtime.sessions import open_session

        session = open_session(Path(task["path"]), threads=threads)
        loaded = time.perf_counter()
        session.run(None, {session.get_inputs()[0].name: pixels})
    else:
        from .torch_rows import open_vit

        vit = open_vit(Path(task["path"]), task["vit"], threads)
        loaded = time.perf_counter()
        vit(pixels)
    return {"load_seconds": loaded - began, "peak_megabytes": peak_memory()}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(matrix_peak() if given["kind"] == "peak" else _load(given)))
