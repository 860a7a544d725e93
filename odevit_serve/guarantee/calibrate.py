"""Choosing the threshold of an exit rule so that a guarantee holds.

The claim: the adaptive answer differs from the full-depth answer on at most a fraction epsilon of images, with
confidence 1 - delta over the draw of the calibration images, whatever distribution they come from.

How it is proven: the images are split at random. On the first part everything is measured that has to be known before
the test: the remaining travel, the limit on Lyapunov times, which rule needs the fewest steps, the thresholds to try.
On the second part, which had no part in any of that, the thresholds are tested from the strictest downwards: each by
the exact binomial test of "it errs on more than epsilon", stopping at the first that cannot be rejected at level delta.
A sequence fixed beforehand keeps the probability of any false claim at most delta: a false claim needs the first true
hypothesis of the sequence to be rejected, and that happens with probability at most delta. Monotonicity is not assumed.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import bundle
from ..config import Calibration, Confidence, Config, Division, ExitPolicy
from ..data.datasets import Images
from ..data.division import pick
from ..errors import UsageError, UserError
from ..model_card import write_card
from ..runtime import exits
from ..runtime.dynamics import Floats
from ..runtime.exits import RULES, ExitReason, Rule
from ..runtime.model import BundleModel
from .bounds import binomial_tail, upper_bound
from .confidence import measure_confidence
from .recording import Followed, Recorder, Recording
from .thresholds import choose, fewest_steps, grid, images_needed, lyapunov_limit, measuring, table_rows

TARGETS = ("agreement", "accuracy")
FIXED = (1, 2, 3)  # numbers of steps over the whole horizon that the table shows beside the rules


@dataclass(frozen=True)
class Row:
    """One threshold in the table."""

    threshold: float
    observed: float
    bound: float
    mean_steps: float
    accuracy: float | None
    time_saved: float


@dataclass(frozen=True)
class Rival:
    """What another rule, or a fixed number of steps, gives on the measuring images. An estimate, not a proof."""

    name: str
    mean_steps: float
    observed: float
    accuracy: float | None
    fixed: bool = False  # the same number of steps for all images


@dataclass(frozen=True)
class CalibrationReport:
    """The outcome: the policy to be written, what every threshold tested would have given, and the rules beside it."""

    policy: ExitPolicy
    chosen: Row
    rows: tuple[Row, ...]
    rivals: tuple[Rival, ...]
    full_accuracy: float | None
    skipped: int  # images that could not be read
    confidence: Confidence | None = None  # with labels


def compete(
    recording: Recording, rules: Sequence[Rule], epsilon: float, target: str, lyapunov: float | None
) -> list[Rival]:
    """The rules on the measuring images, fewest steps first."""
    travel = recording.mean_travel()
    rivals = []
    for rule in rules:
        steps, wrong = fewest_steps(recording, recording.scores(rule, travel), epsilon, target, lyapunov)
        rivals.append(Rival(rule.name, steps, wrong, None))
    return sorted(rivals, key=lambda rival: rival.mean_steps)


def calibrate(
    folder: Path,
    images: Images,
    epsilon: float = 0.01,
    delta: float = 0.05,
    rule: str = "auto",
    target: str = "agreement",
    seed: int = 0,
    threads: int | None = None,
    advance: Callable[[], None] = lambda: None,
    output: Path | None = None,
    steps: int | None = None,
    solver: str | None = None,
    chosen_as: str = "",
    unsure: float | None = None,
    tolerance: float | None = None,
) -> CalibrationReport:
    """Measure, test, and write the policy with its proof into the bundle, or into a copy of it at `output`.

    With `steps`, `solver` or `tolerance` the copy integrates with those, and the proof is for it: full depth is then
    its own trajectory to the horizon. Without a proof, nothing is changed.
    """
    check_numbers(epsilon, delta, target, len(images))
    config = bundle.read_config(folder)
    before = config.integration
    own = replace(before, steps=steps or before.steps).by(solver, tolerance=tolerance)
    if own != before and output is None:
        raise UsageError(
            "a proof for other steps, solver or tolerance than the bundle's needs a bundle of its own: give --output"
        )
    with contextlib.ExitStack() as stack:
        if own.solver != before.solver:
            from ..runtime.graphs import rearrange

            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            rearrange(folder, config, replace(own, tolerance=0.0), scratch)  # a tolerance is put in when it is opened
            folder = scratch
        claim = Claim(epsilon, delta, target, rule, unsure, seed)
        model = BundleModel(folder, config.replace(integration=own), threads=threads)
        return _calibrate(model, folder, images, claim, advance, output, chosen_as)


@dataclass(frozen=True)
class Claim:
    """What is to be proven, and by which rule."""

    epsilon: float
    delta: float
    target: str
    rule: str
    unsure: float | None
    seed: int


def _calibrate(
    model: BundleModel,
    folder: Path,
    images: Images,
    claim: Claim,
    advance: Callable[[], None],
    output: Path | None,
    chosen_as: str,
) -> CalibrationReport:
    """The same for a folder whose graphs step as the model's configuration says."""
    config, epsilon, delta, target = model.config, claim.epsilon, claim.delta, claim.target
    labels = match_labels(images, config)
    if target == "accuracy" and labels is None:
        raise UserError("--target accuracy needs labels: class folders, or y arrays, that match the model's labels")
    if claim.unsure is not None and (labels is None or not 0 < claim.unsure < 1):
        raise UserError("--unsure is a fraction, and needs labels that match the model's: class folders, or y arrays")
    candidates = competitors(claim.rule)
    order = np.random.default_rng(claim.seed).permutation(len(images))
    first, second = order[: measuring(len(order))], order[measuring(len(order)) :]
    recorder = Recorder(model, images, labels, advance=advance)
    measured = recorder.record(first)
    limit = lyapunov_limit(measured, epsilon, target)
    rivals = compete(measured, candidates, epsilon, target, limit)
    winner, travel = RULES[rivals[0].name], measured.mean_travel()
    thresholds = grid(measured, measured.scores(winner, travel))
    tested = recorder.record(second)
    if len(tested) < len(second) and binomial_tail(0, len(tested), epsilon) > delta:
        raise UserError(
            f"only {len(tested)} images could be read: too few for epsilon {epsilon:g}; nothing was changed"
        )
    scores = tested.scores(winner, travel)
    threshold = choose(tested, scores, thresholds, epsilon, delta, target, limit)
    if threshold is None:
        raise UserError(
            f"no threshold of {winner.name!r} could be proven to err on at most {epsilon:g} of images with confidence "
            f"{1 - delta:g}; nothing was changed"
        )
    rows = [
        _row(tested, scores, value, limit, claim, recorder.time_saved) for value in table_rows(thresholds, threshold)
    ]
    chosen = next(entry for entry in rows if entry.threshold == threshold)
    ends = tested.exit_steps(scores, threshold, limit)
    proof = Calibration(
        epsilon, delta, len(tested), recorder.digest.hexdigest(), model.graphs.setting, target, chosen_as,
        chosen.observed, chosen.bound, chosen.mean_steps, reasons(tested, scores, threshold, limit),
        contracting(tested, ends),
    )  # fmt: skip
    policy = ExitPolicy(winner.name, threshold, limit, tuple(travel.tolist()), config.integration.horizon, proof)
    confidence = None
    if measured.labels is not None and tested.labels is not None:
        early = measured.exit_steps(measured.scores(winner, travel), threshold, limit)
        fitting, proving = (measured.logits_at(early), measured.labels), (tested.logits_at(ends), tested.labels)
        confidence = measure_confidence(fitting, proving, claim.unsure, delta)
    write_policy(folder, output, config.replace(exit=policy, confidence=confidence))
    full = None if tested.labels is None else float((tested.answers[:, -1] == tested.labels).mean())
    shown = (*rivals, *fixed_steps(model, images, labels, first, measured, target))
    return CalibrationReport(policy, chosen, tuple(rows), shown, full, recorder.skipped, confidence)


def _row(
    tested: Recording,
    scores: Floats,
    threshold: float,
    limit: float | None,
    claim: Claim,
    time_saved: Callable[[float], float],
) -> Row:
    """What the testing images give at a threshold."""
    ends = tested.exit_steps(scores, threshold, limit)
    wrong, mean = int(tested.errors(ends, claim.target).sum()), float(ends.mean())
    accuracy = None if tested.labels is None else float((tested.answers_at(ends) == tested.labels).mean())
    bound = upper_bound(wrong, len(tested), claim.delta)
    return Row(threshold, wrong / len(tested), bound, mean, accuracy, time_saved(mean))


def competitors(rule: str) -> list[Rule]:
    """The rules that take part: the one named, or for `auto` all that a graph can hold."""
    if rule != "auto":
        found = exits.find(rule)
        if found.name == "fixed":
            raise UsageError("the rule 'fixed' never stops early: there is nothing to calibrate")
        return [found]
    return [own for own in RULES.values() if own.exports]


def reasons(recording: Followed, scores: Floats, threshold: float, lyapunov: float | None) -> dict[str, float]:
    """Share of the images by the reason they end for."""
    ends = recording.exit_steps(scores, threshold, lyapunov)
    rows = np.arange(len(recording))
    whole = ends == recording.lengths
    by_rule = ~whole & (scores[rows, ends - 1] >= threshold)
    shares = {ExitReason.EARLY: by_rule, ExitReason.LYAPUNOV: ~whole & ~by_rule, ExitReason.HORIZON: whole}
    return {reason.short: round(float(rows_of.mean()), 4) for reason, rows_of in shares.items()}


def contracting(recording: Recording, ends: np.ndarray) -> float | None:
    """Of the images that end early, the share whose exponent is below 0 there; None where all go to full depth."""
    early = ends < recording.steps
    if not early.any():
        return None
    exponent = recording.exponent[np.arange(len(recording)), ends - 1]
    return round(float((exponent[early] < 0).mean()), 4)


def fixed_steps(
    model: BundleModel, images: Images, labels: np.ndarray | None, rows: np.ndarray, full: Recording, target: str
) -> list[Rival]:
    """The same images at fixed small numbers of steps over the whole horizon: the strongest rival of early exit."""
    found = []
    chosen = full.positions is not None  # sizes of steps: then the grid itself is a rival, too
    for count in (*FIXED, full.steps) if chosen else FIXED:
        if count > full.steps or (count == full.steps and not chosen):
            break
        short = Recorder(model, images, labels, steps=count).record(rows)
        if len(short) != len(full):
            continue  # a picture that could be read once and not again
        answers = short.answers[:, -1]
        wrong = float((answers != full.answers[:, -1]).mean())
        accuracy = None if full.labels is None else float((answers == full.labels).mean())
        found.append(Rival(f"fixed, {count} step{'s' * (count > 1)}", float(count), wrong, accuracy, fixed=True))
    return found


def write_policy(folder: Path, output: Path | None, config: Config) -> None:
    """The new configuration, read back before it replaces the old one, in the bundle or in a copy of it."""
    target = output or folder
    Config.from_json(config.to_json())
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            for name in (bundle.WEIGHTS, bundle.STEM, bundle.STEP, bundle.ATTENTION):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, output / name)
        bundle.write_config(target, config)
        write_card(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}): give another folder with --output") from None


def check_numbers(epsilon: float, delta: float, target: str, count: int) -> None:
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value < 1:
            raise UsageError(f"{name} must lie between 0 and 1, not {value}")
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}")
    needed = images_needed(epsilon, delta)
    if count < needed:
        raise UserError(
            f"epsilon {epsilon:g} at confidence {1 - delta:g} needs at least {needed:,} images, "
            f"and there are {count:,}; nothing was changed"
        )


def match_labels(images: Images, config: Config) -> np.ndarray | None:
    """The images' labels as indices of the model's classes; None when there are none or the names do not match."""
    if images.labels is None:
        return None
    known = config.class_index()
    if set(images.classes) <= set(known):
        return np.array([known[name] for name in images.classes])[images.labels]
    if not config.labels and len(images.classes) == config.architecture.classes:
        return images.labels
    return None


def open_images(
    source: str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    division: Division | None = None,
) -> Images:
    """The images to calibrate on, as `division.pick` finds them; at most `limit` of them, drawn at random."""
    images = pick(source, split, division)
    if limit is not None and limit < len(images):
        images = images.subset(np.random.default_rng(seed).permutation(len(images))[:limit])
    return images


def summary(report: CalibrationReport) -> dict[str, Any]:
    """Plain data, as printed by `calibrate --json`."""
    proof = report.policy.calibration
    assert proof is not None
    return {
        "rule": report.policy.rule,
        "threshold": report.policy.threshold,
        "lyapunov": report.policy.lyapunov,
        "calibration": asdict(proof),
        "confidence": None if report.confidence is None else asdict(report.confidence),
        "full_accuracy": report.full_accuracy,
        "skipped": report.skipped,
        "table": [vars(row) for row in report.rows],
        "rules": [vars(rival) for rival in report.rivals],
    }
