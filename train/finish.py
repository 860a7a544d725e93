"""The end of a run on somebody's own photographs: graphs, calibration, card, and what the model is worth.

It is measured on the photographs that calibrate: they neither trained the model nor chose it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .. import bundle
from ..data.datasets import Images
from ..errors import UserError
from ..files import replace
from ..guarantee.bounds import upper_bound
from ..guarantee.calibrate import calibrate
from ..guarantee.thresholds import images_needed, measuring
from ..model_card import write_card
from ..runtime.model import BundleModel, load_bundle
from .model import ODEViT
from .photographs import Part
from .progress import Say

WORTH = 0.1  # largest epsilon that is worth proving
TIMED = 24  # photographs whose time is taken
FILES = (
    bundle.WEIGHTS, bundle.STEM, bundle.STEP, bundle.ATTENTION, bundle.CARD, bundle.PROCESSOR, bundle.CONFIG,
)  # fmt: skip


@dataclass(frozen=True)
class Confusion:
    """The two classes that are taken for each other most often."""

    one: str
    other: str
    mistakes: int
    images: int  # of both


@dataclass(frozen=True)
class Finished:
    """What came out."""

    folder: Path
    accuracy: float
    interval: tuple[float, float]  # exact, at 95%
    images: int  # it was measured on
    chosen_by: bool  # those chose the model too: there were none to spare
    confusion: Confusion | None
    milliseconds: float  # of one picture, reading included
    mean_steps: float
    interrupted: bool = False


def interval(right: int, count: int, delta: float = 0.05) -> tuple[float, float]:
    """Clopper-Pearson: the exact two-sided interval of a share at confidence 1 - delta."""
    if not count:
        return 0.0, 1.0
    return 1 - upper_bound(count - right, count, delta / 2), upper_bound(right, count, delta / 2)


def smallest_epsilon(count: int, delta: float) -> float:
    """What so many images can prove at best, rounded up to a tenth of a percent."""
    tests = count - measuring(count)
    return 1.0 if tests < 1 else math.ceil((1 - delta ** (1 / tests)) * 1000 + 1e-9) / 1000


def worst_pair(answers: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Confusion | None:
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, (labels, answers), 1)
    both = np.triu(counts + counts.T, 1)
    one, other = np.unravel_index(int(both.argmax()), both.shape)
    if not both[one, other]:
        return None
    concerned = int(np.isin(labels, (one, other)).sum())
    return Confusion(classes[one], classes[other], int(both[one, other]), concerned)


def finish(
    model: ODEViT,
    folder: Path,
    work: Path,
    parts: dict[str, Part],
    make_graphs: Callable[[Path], object],
    epsilon: float,
    delta: float,
    say: Say,
) -> Finished:
    """Make the bundle in a folder of its own, and move it into place when all of it is there."""
    part = parts["calibration"]
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        made = Path(scratch) / "bundle"
        metrics = {"validation_accuracy": model.config.metrics["validation_accuracy"]}
        model.config = model.config.replace(metrics=metrics)
        model.save_pretrained(made)
        say("making the graphs")
        make_graphs(made)
        _calibrate(made, part.images, epsilon, delta, say)
        measured = part if len(part) else parts["validation"]
        answers = _answers(model, measured)
        right = int((answers == measured.labels).sum())
        low, high = interval(right, len(measured))
        accuracy = right / len(measured)
        config = bundle.read_config(made)
        if len(part):
            found = {"accuracy": round(accuracy, 5), "accuracy_low": round(low, 5), "accuracy_high": round(high, 5)}
            metrics |= {f"calibration_{key}": value for key, value in found.items()}
            metrics["calibration_images"] = len(measured)
        bundle.write_config(made, config.replace(metrics=metrics))
        write_card(made)
        milliseconds, steps = _time(load_bundle(made), measured.images)
        _install(made, folder)
    pair = worst_pair(answers, measured.labels, model.config.labels)
    return Finished(folder, accuracy, (low, high), len(measured), not len(part), pair, milliseconds, steps)


def _calibrate(made: Path, images: Images, epsilon: float, delta: float, say: Say) -> None:
    """Prove the epsilon asked for, or the smallest that so many photographs can prove, or say what is missing."""
    needed, least = images_needed(epsilon, delta), smallest_epsilon(len(images), delta)
    missing = f"{needed - len(images):,} more set aside are needed for {epsilon:.1%}"
    if least > max(epsilon, WORTH):
        say(f"early exit is not calibrated: {len(images):,} photographs prove too little, {missing}; full depth")
        return
    asked = max(epsilon, least)
    say(f"calibrating on {len(images):,} photographs")
    try:
        report = calibrate(made, images, asked, delta, chosen_as=f"{len(images):,} that training set aside")
    except UserError as error:
        say(f"early exit is not calibrated: {error}; full depth")
        return
    short = "" if asked == epsilon else f" ({missing})"
    say(
        f"early exit: {report.chosen.mean_steps:.2f} of {report.policy.calibration.setting.steps} steps on average, "  # type: ignore[union-attr]
        f"answers differ from full depth on at most {asked:.1%} of such photographs, "
        f"with confidence {1 - delta:.0%}{short}"
    )


@torch.no_grad()
def _answers(model: ODEViT, part: Part) -> np.ndarray:
    batches = part.batches(model.config.preprocessing)
    return np.concatenate([model(pixels).argmax(1).numpy() for pixels in batches])


def _time(model: BundleModel, images: Images) -> tuple[float, float]:
    """Median milliseconds of one picture from its file to its answer, and the mean steps."""
    times, steps = [], []
    for row in range(min(TIMED, len(images))):
        begun = time.perf_counter()
        answer = model.predict(images.read(row))
        times.append(1000 * (time.perf_counter() - begun))
        steps.append(answer.steps)
    return float(np.median(times)), float(np.mean(steps))


def _install(made: Path, folder: Path) -> None:
    """File by file, the configuration last; what an older bundle had and this one has not is removed first."""
    try:
        (folder / bundle.CONFIG).unlink(missing_ok=True)
        for name in FILES:
            if (made / name).is_file():
                replace(made / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from None
