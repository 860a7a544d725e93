"""SIGKILL at random moments: what was written can be read, what was promised is there.

    PYTHONPATH=tests python -m hardening.kill --times 100

Three programs are killed so often each, one after another, always going on where the one before was killed:
`train` (a recipe of two stages: every file is readable, the run goes on by `--resume`, and the last one ends in the
weights of a run that was never killed), `serve --audit-file` (every recording that was there before is still there, and
the file can be read) and `predict --output` (no picture is missing or twice in the end). Each is the real command in a
process of its own; only the imports are those of the process that forks it, which makes a start cheap.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from camera import shots
from conftest import tiny_folder
from PIL import Image
from servers import png, ready, until

from odevit_serve import bundle, cli
from odevit_serve.bundle import read_config
from odevit_serve.data.datasets import Images
from odevit_serve.files import PART
from odevit_serve.guarantee import audit_file
from odevit_serve.guarantee.calibrate import calibrate
from odevit_serve.runtime.model import load_bundle

PATIENCE = 600.0  # seconds that a program may take to get where it is killed


STARTED: list[Fork] = []


class Fork:
    """A command in a process of its own. `wait` gives its exit code, minus the signal where it was killed."""

    def __init__(self, words: list[str], log: Path):
        self.code: int | None = None
        log.write_text("")
        self.pid = os.fork()
        if self.pid:
            STARTED.append(self)
            return
        try:  # the child, which never returns
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
            sys.argv = ["odevit-serve", *words]
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            code = 99
        os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if found else None
        return self.code

    def wait(self) -> int:
        until(lambda: self.poll() is not None, PATIENCE)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def _later(chance: random.Random, most: float, child: Fork) -> None:
    """Wait for a random while, or until the child has ended by itself."""
    end = time.monotonic() + chance.random() * most
    while time.monotonic() < end and child.poll() is None:
        time.sleep(0.001)


# -- train -------------------------------------------------------------------------------------------------------------

SMALL = {
    "data.augment": "crop-flip", "training.batch_size": 16, "training.lr": 0.003, "training.ema": 0.9,
    "training.save_seconds": 0.0, "training.steps": [2, 3], "architecture.image_size": 16,
    "architecture.patch_size": 4, "architecture.width": 16, "architecture.heads": 1, "architecture.mlp_ratio": 1.0,
    "integration.steps": 3, "integration.horizon": 4.0, "data.workers": 0,
}  # fmt: skip
STAGES = "stages=[{training={epochs=6},architecture={image_size=8}},{training={epochs=6,seed=1}}]"


def _recipe(data: Path, folder: Path) -> list[str]:
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return ["train", str(data), *sets, "--set", STAGES, "-o", str(folder)]


def _readable(run: Path) -> None:
    """Whatever a killed run has left behind."""
    import torch

    from odevit_serve.train.model import ODEViT

    for path in run.rglob("recipe.json"):
        json.loads(path.read_text())
    for path in run.rglob("last.pt"):
        torch.load(path, weights_only=True)
    for path in run.rglob("metrics.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            assert not line.endswith("\n") or json.loads(line)
    for path in run.rglob(bundle.CONFIG):
        read_config(path.parent)
        if (path.parent / bundle.WEIGHTS).exists():
            ODEViT.from_pretrained(path.parent)


def kill_train(folder: Path, times: int, chance: random.Random) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    import odevit_serve.train.run  # noqa: F401  (imported once, for all that are forked)

    torch.set_num_threads(1)
    rng, data = np.random.default_rng(0), folder / "data.npz"
    x, y = rng.integers(0, 256, (120, 16, 16, 3)).astype(np.uint8), np.arange(120) % 3
    np.savez(data, x_train=x[:96], y_train=y[:96], x_test=x[96:], y_test=y[96:])
    whole = folder / "whole"
    begun = time.monotonic()
    assert Fork(_recipe(data, whole), folder / "whole.log").wait() == 0, (folder / "whole.log").read_text()
    took = time.monotonic() - begun
    wanted = load_file(whole / "bundle" / bundle.WEIGHTS)
    lives = deque([took], 5)  # seconds that the latest ones lived: the machine may become quicker or slower
    killed = runs = ended = left = 0
    while killed < times:
        runs += 1
        cut = folder / f"cut-{runs}"
        words = _recipe(data, cut)
        while True:
            begun = time.monotonic()
            child = Fork(words, folder / "cut.log")
            if killed < times:
                _later(chance, 1.2 * max(lives), child)
            else:
                child.wait()
            child.kill()
            lives.append(time.monotonic() - begun)
            if child.code is not None and child.code >= 0:
                assert child.code == 0, (folder / "cut.log").read_text()
                break
            killed += 1
            _readable(cut)
            left += any(cut.rglob(f".*{PART}"))
            words = ["train", "--resume", str(cut)] if (cut / "recipe.json").exists() else _recipe(data, cut)
        ended += 1
        found = load_file(cut / "bundle" / bundle.WEIGHTS)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), "other weights"
        assert not any(cut.rglob(f".*{PART}")), "a resumed run leaves what the killed one was writing"
        shutil.rmtree(cut)
    return {"killed": killed, "while_writing": left, "runs_that_ended_in_the_same_weights": ended}


# -- serve -------------------------------------------------------------------------------------------------------------


def _proven(folder: Path) -> Path:
    """A tiny bundle with a guarantee, so that its answers are audited."""
    taken = shots(600, 0)
    images = Images([str(i) for i in range(600)], None, (), lambda i: Image.fromarray(taken[i]), in_memory=True)
    calibrate(tiny_folder(folder / "plain"), images, 0.03, 0.05, "travel", threads=1, output=folder / "proven")
    return folder / "proven"


def kill_serve(folder: Path, times: int, chance: random.Random) -> dict[str, Any]:
    model, file = _proven(folder), folder / "audit.jsonl"
    loaded = load_bundle(model, threads=1)
    head, found, answered = audit_file.head(loaded.config, loaded.graphs.setting), 0, 0
    bodies = [_encoded(shot) for shot in shots(64, 1)]
    log = folder / "serve.log"
    for _ in range(times):
        words = ["serve", str(model), "--port", "0", "--threads", "1", "--log", "off", "--audit", "1"]
        child = Fork([*words, "--audit-file", str(file)], log)
        until(lambda c=child: "try: curl" in log.read_text() or c.poll() is not None, PATIENCE)  # type: ignore[misc]
        assert child.poll() is None, log.read_text()
        address = log.read_text().split(" on ")[1].split()[0]
        with httpx.Client(timeout=PATIENCE) as client:
            until(lambda c=client, a=address: ready(c, a), PATIENCE)  # type: ignore[misc]
        counted: list[int] = []
        asking = threading.Thread(target=_ask, args=(address, bodies, counted))
        asking.start()
        until(lambda c=counted, a=asking: c or not a.is_alive(), PATIENCE)  # type: ignore[misc]
        _later(chance, 1.0, child)
        child.kill()  # with a request on its way
        asking.join()
        assert set(counted) <= {200}, counted
        answered += len(counted)
        records = _records(file, head)
        assert records >= found, f"{found} recordings became {records}"
        found = records
    return {"killed": times, "answered": answered, "recordings_read": found}


def _ask(address: str, bodies: list[bytes], statuses: list[int]) -> None:
    """One request after another until nobody answers."""
    with httpx.Client(timeout=PATIENCE) as client, contextlib.suppress(httpx.TransportError):
        while True:
            statuses.append(client.post(f"{address}/v1/predict", content=bodies[len(statuses) % 64]).status_code)


def _records(file: Path, head: dict[str, Any]) -> int:
    own, others = audit_file._read(file, head)
    assert not others
    return len(own)


def _encoded(shot: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(shot).save(buffer, "PNG")
    return buffer.getvalue()


# -- predict -----------------------------------------------------------------------------------------------------------


def kill_predict(folder: Path, times: int, chance: random.Random) -> dict[str, Any]:
    model, pictures = tiny_folder(folder / "model"), folder / "pictures"
    pictures.mkdir()
    names = {f"{number:04}.png" for number in range(200)}
    for number, name in enumerate(sorted(names)):
        (pictures / name).write_bytes(png(number))
    killed = ended = 0
    took = 0.0
    while killed < times:
        output = folder / f"answers-{ended}.jsonl"
        words = ["predict", str(pictures), "--model", str(model), "--output", str(output)]
        while True:
            begun = time.monotonic()
            child = Fork(words, folder / "predict.log")
            if killed < times and took:
                _later(chance, 1.2 * took, child)
            else:
                child.wait()
            child.kill()
            if child.code is not None and child.code >= 0:
                assert child.code == 0, (folder / "predict.log").read_text()
                took = took or time.monotonic() - begun
                break
            killed += 1
        ended += 1
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        sources = [Path(row["source"]).name for row in rows]
        assert sorted(sources) == sorted(names), f"{len(sources)} rows of {len(set(sources))} pictures"
    return {"killed": killed, "runs_that_ended_whole": ended, "seconds_of_a_run": round(took, 1)}


PROGRAMS: dict[str, Callable[[Path, int, random.Random], dict[str, Any]]] = {
    "train": kill_train,
    "serve": kill_serve,
    "predict": kill_predict,
}


def main() -> int:
    reader = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    reader.add_argument("programs", nargs="*", default=list(PROGRAMS), help=f"of {', '.join(PROGRAMS)}; default: all")
    reader.add_argument("--times", type=int, default=100)
    reader.add_argument("--seed", type=int, default=0)
    asked = reader.parse_args()
    for name in asked.programs:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            try:
                report = PROGRAMS[name](Path(folder), asked.times, random.Random(asked.seed))
            finally:
                for child in STARTED:
                    child.kill()
            print(json.dumps({"program": name, **report, "seconds": round(time.monotonic() - begun)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
