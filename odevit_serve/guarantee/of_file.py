"""`calibrate FILE.onnx`: a proof for what was exported, made by running the file itself.

A single file shows answers and depths, no scores. So it is run as a whole at one threshold after the other, and its
answers are compared with those at an infinite one, which is full depth. The measuring images choose a short sequence of
thresholds, the others test it, as in `calibrate`. The limit on Lyapunov times is part of the graph and of the proof.

In a file of fixed depth nothing ends early. With labels it gets what its probabilities mean, and no proof of exits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Calibration, Confidence, Config
from ..data.datasets import Images
from ..errors import UsageError, UserError
from ..files import atomic
from ..runtime.dynamics import Floats
from ..runtime.exits import REASONS
from ..runtime.model import FileModel
from ..runtime.results import Prediction
from .bounds import binomial_tail, upper_bound
from .calibrate import CalibrationReport, Rival, Row, check_numbers, match_labels
from .confidence import measure_confidence
from .thresholds import measuring

SCALES = tuple(2.0**power for power in range(4, -7, -1))  # of the file's own threshold: how far others lie from it
FEWEST = 100  # labelled images that a file of fixed depth is given
BEFORE = 2  # stricter thresholds that are tested before the one that looks right


@dataclass(frozen=True)
class Answers:
    """Of some images at one threshold; an image without numbers has the answer -1."""

    index: np.ndarray
    steps: np.ndarray
    reasons: np.ndarray
    logits: Floats  # up to what softmax does not see


class Runner:
    """Runs the file on some of the images, as often as it takes."""

    def __init__(self, model: FileModel, images: Images, advance: Callable[[], None]):
        self.model, self.images, self.advance = model, images, advance
        known = model.config.confidence
        self.temperature = 1.0 if known is None else known.temperature

    def _picture(self, row: int) -> Any:
        try:
            return self.images.read(int(row))
        except Exception:  # decoders fail in every way there is
            return b""  # which counts as an error, as everything without an answer does

    def run(self, rows: np.ndarray, threshold: float | None) -> Answers:
        nothing = (-1, self.model.config.integration.steps, 4, np.full(len(self.model.labels), np.nan))
        found = []
        asked = {} if threshold is None else {"threshold": threshold}
        for answer in self.model.stream(map(self._picture, rows), **asked):
            self.advance()
            if isinstance(answer, Prediction):
                found.append((answer.index, answer.steps, int(answer.exit), answer.probabilities))
            else:
                found.append(nothing)
        index, steps, ends, chances = zip(*found, strict=True)
        logits = np.log(np.maximum(np.stack(chances), 1e-300)) * self.temperature
        return Answers(np.array(index), np.array(steps), np.array(ends), logits)


def candidates(own: float) -> list[float]:
    """Thresholds around that of the file, strictest first."""
    size = abs(own) or 1.0
    found = [own + size * scale for scale in SCALES] + [own] + [own - size * scale for scale in SCALES[:3:-1]]
    return sorted({float(np.float32(value)) for value in found}, reverse=True)


def errors(early: Answers, full: Answers) -> int:
    return int(((early.index != full.index) | (full.index < 0)).sum())


def calibrate_file(
    path: Path,
    images: Images,
    epsilon: float = 0.01,
    delta: float = 0.05,
    seed: int = 0,
    threads: int | None = None,
    advance: Callable[[], None] = lambda: None,
    output: Path | None = None,
    chosen_as: str = "",
    unsure: float | None = None,
) -> CalibrationReport | Confidence:
    """Prove a threshold for an adaptive file, and with labels fit its probabilities; write both into it."""
    model = FileModel(path, threads=threads)
    compute, config = model.compute(), model.config
    labels = match_labels(images, config)
    fixed = not compute.adaptive or config.exit.rule == "fixed"
    if fixed and labels is None:
        raise UsageError(
            f"{path.name} has a fixed depth of {config.integration.steps} steps: nothing ends early in it, and there "
            "is no threshold to prove; images with labels fit a temperature and, with --unsure, prove a mark"
        )
    check_numbers(0.5 if fixed else epsilon, delta, "agreement", len(images))
    if unsure is not None and (labels is None or not 0 < unsure < 1):
        raise UserError("--unsure is a fraction, and needs labels that match the model's: class folders, or y arrays")
    order = np.random.default_rng(seed).permutation(len(images))
    first, second = order[: measuring(len(order))], order[measuring(len(order)) :]
    runner = Runner(model, images, advance)
    if fixed and labels is not None:
        if len(images) < FEWEST:
            raise UserError(f"a temperature needs at least {FEWEST} labelled images, and there are {len(images)}")
        parts = [(runner.run(rows, None).logits, labels[rows]) for rows in (first, second)]
        found = measure_confidence(parts[0], parts[1], unsure, delta)
        _write(path, output or path, config.replace(confidence=found))
        return found
    rivals, sequence = _measure(runner, first, config.exit.threshold, epsilon)
    full = runner.run(second, math.inf)
    rows: list[Row] = []
    chosen: tuple[Row, Answers] | None = None
    for threshold in sequence:
        early = runner.run(second, threshold)
        wrong, mean = errors(early, full), float(early.steps.mean())
        accuracy = None if labels is None else float((early.index == labels[second]).mean())
        saved = 1 - mean / config.integration.steps
        rows.append(Row(threshold, wrong / len(second), upper_bound(wrong, len(second), delta), mean, accuracy, saved))
        if binomial_tail(wrong, len(second), epsilon) > delta:
            break
        chosen = rows[-1], early
    if chosen is None:
        raise UserError(
            f"no threshold could be proven to err on at most {epsilon:g} of images with confidence {1 - delta:g}; "
            "nothing was changed"
        )
    row, early = chosen
    shares = {reason.short: round(float((early.reasons == reason).mean()), 4) for reason in REASONS}
    seen = hashlib.sha256(early.logits.tobytes() + full.index.tobytes()).hexdigest()
    proof = Calibration(
        epsilon, delta, len(second), seen, compute.setting, "agreement", chosen_as,
        row.observed, row.bound, row.mean_steps, {name: share for name, share in shares.items() if share},
    )  # fmt: skip
    policy = replace(config.exit, threshold=row.threshold, calibration=proof)
    known, kept = None, config.confidence
    if kept is not None:
        kept = replace(kept, unsure=None)  # proven for another threshold
    if labels is not None:
        fitted = runner.run(first, row.threshold).logits
        known = measure_confidence((fitted, labels[first]), (early.logits, labels[second]), unsure, delta)
    _write(path, output or path, config.replace(exit=policy, confidence=known or kept))
    accuracy = None if labels is None else float((full.index == labels[second]).mean())
    return CalibrationReport(policy, row, tuple(rows), tuple(rivals), accuracy, 0, known)


def _measure(runner: Runner, rows: np.ndarray, own: float, epsilon: float) -> tuple[list[Rival], list[float]]:
    """What thresholds give on the measuring images, and those to test: from a little before the best of them on."""
    full, found = runner.run(rows, math.inf), []
    values = candidates(own)
    for value in values:
        early = runner.run(rows, value)
        wrong = errors(early, full) / len(rows)
        found.append(Rival(f"threshold {value:.4g}", float(early.steps.mean()), wrong, None))
        if wrong > epsilon:
            break
    best = max(0, len(found) - 2)
    return found, values[max(0, best - BEFORE) :]


def _write(path: Path, output: Path, config: Config) -> None:
    """The file with another default of its input `threshold`, and the configuration in its metadata."""
    import onnx
    from onnx import numpy_helper

    from ..runtime.graph_files import read, write_metadata

    graph = read(path)
    for tensor in graph.graph.initializer:
        if tensor.name == "threshold":
            tensor.CopyFrom(numpy_helper.from_array(np.array(config.exit.threshold, np.float32), "threshold"))
    write_metadata(graph, config)
    with atomic(output) as scratch:
        onnx.save(graph, str(scratch))
