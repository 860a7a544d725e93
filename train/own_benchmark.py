"""`benchmark own`: what `train PHOTOS` gives on photographs that it never got, beside simpler ways and their cost.

Some kinds are drawn from a folder of class folders, some photographs of each are put into a folder, and the real
command is run on it. All figures are of the photographs that were left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import costs
from ..config import Config, Division, Preprocessing
from ..data.datasets import Images, open_splits
from ..data.division import divide
from ..data.images import prepare
from ..errors import UserError
from ..runtime.model import load_bundle
from .features import encoder, features
from .finish import interval
from .loop import accelerator
from .model import ODEViT
from .own import CALIBRATION, SIZE, VALIDATION, resized
from .presets import PRESETS
from .progress import Say, counted
from .recipe import Teaching
from .teacher_head import probe
from .teacher_sources import load_teacher

LEAST = 5  # photographs of a kind that are left out at least


@dataclass(frozen=True)
class Task:
    """So many kinds, so many photographs of each in the folder."""

    kinds: int = 8
    photographs: int = 55
    held_out: int = 50  # of each kind, at most
    minutes: float = 5.0
    seed: int = 0
    start: str = ""
    left_out: tuple[str, ...] = ()  # kinds that do not take part


def draw(data: str, task: Task, folder: Path, say: Say) -> Images:
    """Fill the folder with links to photographs; gives those that are left out of it."""
    images = open_splits(data).get("train")
    if images is None or images.labels is None or not Path(data).is_dir():
        raise UserError(f"{data} is not a folder of class folders")
    random = np.random.default_rng(task.seed)
    counts = np.bincount(images.labels)
    open_to = [c for c in range(len(counts)) if images.classes[c] not in task.left_out]
    if len(open_to) < task.kinds:
        raise UserError(f"{data} has {len(open_to)} kinds, fewer than the {task.kinds} asked for")
    enough = [c for c in open_to if counts[c] >= task.photographs + LEAST]
    if len(enough) >= task.kinds:
        chosen = sorted(random.permutation(enough)[: task.kinds].tolist())
    else:
        chosen = sorted(sorted(open_to, key=lambda c: -counts[c])[: task.kinds])
        say(f"only {len(enough)} kinds have {task.photographs + LEAST} photographs: the largest {task.kinds} are taken")
    held = []
    for kind in chosen:
        rows = random.permutation(np.flatnonzero(images.labels == kind))
        count = min(task.photographs, len(rows) - LEAST)
        for row in rows[:count]:
            link = folder / images.classes[kind] / f"{row}{Path(images.names[row]).suffix}"
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(Path(data, images.names[row]).resolve(), link)
        held += rows[count : count + task.held_out].tolist()
    return images.subset(np.sort(held))


def run(data: str, task: Task, teacher_weights: Path | None, scratch: Path, say: Say) -> dict[str, Any]:
    folder, made = scratch / "photos", scratch / "run"
    held = draw(data, task, folder, say)
    words = [sys.executable, "-m", "odevit_serve", "train", str(folder), "--minutes", str(task.minutes)]
    words += ["--seed", str(task.seed), "-o", str(made), *(["--start", task.start] if task.start else [])]
    begun = time.monotonic()
    if subprocess.run(words).returncode:
        raise UserError("the training failed")
    seconds = time.monotonic() - begun
    model = load_bundle(made)
    own = open_splits(str(folder))["train"]
    assert held.labels is not None
    truth = np.array([own.classes.index(held.classes[label]) for label in held.labels])
    rows = [_row("the largest class", np.full(len(truth), np.bincount(own.labels).argmax()), truth, 0.0)]  # type: ignore[arg-type]
    start = resized(ODEViT.from_pretrained(task.start or None), 0 if task.start else SIZE)
    rows.append(_probed("logistic regression, same features", *_student(start), own, held, truth, task, say))
    if teacher_weights is not None:
        named = "probe of the teacher"
        rows.append(_probed(named, *_teacher(teacher_weights), own, held, truth, task, say))
    config = model.config
    for name, asked in (("this command, full depth", {"adaptive": False}), ("this command, early exit", {})):
        answers = list(model.stream((held.read(i) for i in range(len(held))), **asked))
        found = np.array([getattr(answer, "index", -1) for answer in answers])
        steps = float(np.mean([getattr(answer, "steps", config.integration.steps) for answer in answers]))
        rows.append(_row(name, found, truth, config.integration.macs(config.architecture, steps), steps))
    proof = config.exit.calibration
    return {
        "task": asdict(task),
        "kinds": list(own.classes),
        "photographs": len(own),
        "held_out": len(held),
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "epsilon": proof.epsilon if proof else None,
        "rows": rows,
    }


def _row(name: str, answers: np.ndarray, truth: np.ndarray, macs: float, steps: float | None = None) -> dict[str, Any]:
    right = int((answers == truth).sum())
    low, high = interval(right, len(truth))
    return {"name": name, "accuracy": right / len(truth), "interval": [low, high], "macs": macs, "steps": steps}


Encoder = tuple[Callable[[Tensor], Tensor], Preprocessing, float]


def _student(model: ODEViT) -> Encoder:
    config: Config = model.config
    return encoder(model), config.preprocessing, config.integration.macs(config.architecture)


def _teacher(weights: Path) -> Encoder:
    preset = PRESETS["tiny-224"]
    teacher = load_teacher(Teaching(weights=str(weights)), preset.architecture).eval()
    return (
        lambda pixels: teacher.states(pixels)[-1][:, 0],
        preset.preprocessing,
        float(costs.teacher_macs(teacher.facts, preset.architecture)),
    )


def _probed(
    name: str,
    encode: Callable[[Tensor], Tensor],
    spec: Preprocessing,
    macs: float,
    own: Images,
    held: Images,
    truth: np.ndarray,
    task: Task,
    say: Say,
) -> dict[str, Any]:
    """A head on frozen features, fitted and chosen on the very photographs that the command learned and chose by."""
    parts = divide({"train": own}, Division(VALIDATION, CALIBRATION, task.seed))
    head, _ = probe(encode, spec, parts["train"], parts["validation"], accelerator(), say, name)
    with counted(say, name, len(held)) as advance:

        def batches() -> Any:
            for start in range(0, len(held), 64):
                rows = range(start, min(start + 64, len(held)))
                yield torch.from_numpy(np.stack([prepare(held.read(row), spec) for row in rows]))
                advance(len(rows))

        answers = head.answers(features(encode, batches()))
    return _row(name, answers, truth, macs)
