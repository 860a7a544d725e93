"""Choosing the threshold of an exit rule so that a guarantee holds.

The claim: the adaptive answer differs from the full-depth answer on at most a fraction epsilon of images, with
confidence 1 - delta over the draw of the calibration images, whatever distribution they come from.

How it is earned: the images are split at random. On the first part everything is measured that has to be known before
the test: the remaining travel, whether to scale it by an image's own speed, the Lyapunov limit, the thresholds to try.
On the second part, which has had no say in any of that, the thresholds are tested from the safest downwards: each by
the exact binomial test of "it errs on more than epsilon", stopping at the first that cannot be rejected at level delta.
A sequence fixed beforehand keeps the chance of any false claim below delta: a false claim needs the first true
hypothesis of the sequence to be rejected, and that happens with probability at most delta. It asks for no monotonicity.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import bundle, data, dynamics, exits
from .bundle import Calibration, Config, ExitPolicy
from .card import write_card
from .data import Images
from .dynamics import Floats
from .errors import UsageError, UserError
from .exits import Depth, Measured, Rule
from .model import CAPACITY, BundleModel, Reader
from .slots import Job, Outcome, Slots

MEASURED = 0.2  # part of the images that measures; the rest tests
TARGETS = ("agreement", "accuracy")


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """P(Binomial(trials, chance) <= successes)."""
    if successes >= trials or chance <= 0:
        return 1.0
    if successes < 0 or chance >= 1:
        return 0.0
    counts = np.arange(1, successes + 1)
    choose = np.concatenate([[0.0], np.cumsum(np.log((trials - counts + 1) / counts))])  # ln C(trials, i)
    terms = (
        choose
        + np.arange(successes + 1) * math.log(chance)
        + np.arange(trials, trials - successes - 1, -1) * (math.log1p(-chance))
    )
    largest = float(terms.max())
    return min(1.0, math.exp(largest) * float(np.exp(terms - largest).sum()))


def upper_bound(successes: int, trials: int, delta: float) -> float:
    """Clopper-Pearson: the largest chance under which so few successes still have probability delta or more."""
    if successes >= trials:
        return 1.0
    low, high = successes / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(successes, trials, middle) > delta else (low, middle)
    return high


def images_needed(epsilon: float, delta: float) -> int:
    """How many images must be there for a threshold that never errs on them to be proven."""
    tests = math.ceil(math.log(delta) / math.log1p(-epsilon) - 1e-9)
    count = math.floor(tests / (1 - MEASURED))
    while count - measuring(count) < tests:
        count += 1
    return count


def measuring(count: int) -> int:
    """How many of `count` images measure rather than test."""
    return round(MEASURED * count)


@dataclass(frozen=True)
class Recording:
    """Images followed to the full depth of N steps: what a rule would have seen at every one of them."""

    scores: Floats  # [n,N] of the rule
    answers: np.ndarray  # [n,N]
    margins: Floats  # [n,N]
    cls_speeds: Floats  # [n,N]
    growths: Floats  # [n,N] exponent times time, the number of Lyapunov times that have passed
    travels: Floats  # [n,N+1] distance of CLS to where it ends
    labels: np.ndarray | None  # [n]

    def __len__(self) -> int:
        return len(self.answers)

    def exit_steps(self, threshold: float, lyapunov: float | None = None) -> np.ndarray:
        """The step (from 1) at which each image would have ended."""
        ends = self.scores >= threshold
        if lyapunov is not None:
            ends = ends | (self.growths >= lyapunov)
        ends[:, -1] = True
        return ends.argmax(1) + 1

    def answers_at(self, steps: np.ndarray) -> np.ndarray:
        return self.answers[np.arange(len(self)), steps - 1]


def losses(recording: Recording, steps: np.ndarray, target: str) -> np.ndarray:
    """Per image, whether ending at `steps` is an error. For accuracy: full depth is right and the early answer is not,
    which happens at least as often as accuracy drops."""
    early, full = recording.answers_at(steps), recording.answers[:, -1]
    if target == "agreement":
        return early != full
    assert recording.labels is not None
    return (full == recording.labels) & (early != recording.labels)


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
class Report:
    """The outcome: the policy to be written, and what every threshold tested would have given."""

    policy: ExitPolicy
    chosen: Row
    rows: tuple[Row, ...]
    full_accuracy: float | None
    skipped: int  # images that could not be read


def grid(recording: Recording, lines: int = 512) -> Floats:
    """Thresholds to test, safest first: ranks of the scores, and of those at which an answer was still to change."""
    before = recording.scores[:, :-1]
    wrong = recording.answers[:, :-1] != recording.answers[:, -1:]
    still = np.where(wrong, before, -np.inf).max(1, initial=-np.inf)
    finite = before[np.isfinite(before)]
    if not len(finite):
        return np.array([])
    ranks = np.linspace(0, 1, lines)
    values: list[Floats] = [np.quantile(finite, ranks)]
    if np.isfinite(still).any():
        values.append(np.quantile(still[np.isfinite(still)], ranks))
    return np.unique(np.concatenate(values))[::-1]


def contraction_scores(recording: Recording, travel: Floats, cls_speed: Floats | None) -> Floats:
    """Scores of the rule `contraction` under travel [N+1] measured for the same steps, scaled by speed or not."""
    left = np.broadcast_to(travel[1:], recording.margins.shape)
    if cls_speed is not None:
        left = left * recording.cls_speeds / np.maximum(cls_speed, dynamics.TINY)
    return recording.margins / np.maximum(left, dynamics.TINY)


def fewest_steps(recording: Recording, epsilon: float, target: str = "agreement") -> float:
    """Mean steps at the lowest threshold that errs on at most epsilon of these images (an estimate, no bound)."""
    best = float(recording.answers.shape[1])
    for threshold in grid(recording):
        steps = recording.exit_steps(threshold)
        if losses(recording, steps, target).mean() > epsilon:
            break
        best = float(steps.mean())
    return best


def measure(recording: Recording, rule: Rule, threshold: float, epsilon: float, target: str) -> ExitPolicy:
    """What has to be known before the test, from the measuring part."""
    travel, speed = recording.travels.mean(0), recording.cls_speeds.mean(0)
    limit = float(np.nanmax(recording.growths, initial=-np.inf))
    # Past any image seen here, a trajectory is less stable than the data. Without a growing one there is no limit.
    policy = ExitPolicy(rule.name, threshold, limit if rule.contracts and limit > 0 else None, tuple(travel.tolist()))
    if rule.name == "contraction":
        plain = replace(recording, scores=contraction_scores(recording, travel, None))
        scaled = replace(recording, scores=contraction_scores(recording, travel, speed))
        if fewest_steps(scaled, epsilon, target) < fewest_steps(plain, epsilon, target):
            policy = replace(policy, cls_speed=tuple(speed.tolist()))
    return policy


def choose(
    recording: Recording,
    thresholds: Sequence[float] | Floats,
    epsilon: float,
    delta: float,
    target: str = "agreement",
    lyapunov: float | None = None,
) -> float | None:
    """Fixed-sequence test from the first threshold (the safest) on; the last that passes, or None."""
    chosen = None
    for threshold in thresholds:
        wrong = int(losses(recording, recording.exit_steps(threshold, lyapunov), target).sum())
        if binomial_tail(wrong, len(recording), epsilon) > delta:
            break
        chosen = float(threshold)
    return chosen


def calibrate(
    folder: Path,
    images: Images,
    epsilon: float = 0.01,
    delta: float = 0.05,
    rule: str = "contraction",
    target: str = "agreement",
    seed: int = 0,
    threads: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Measure, test, and write the policy with its proof into the bundle. Changes nothing if there is no proof."""
    _check(epsilon, delta, target, len(images))
    chosen_rule = exits.find(rule)
    if chosen_rule.name == "fixed":
        raise UsageError("the rule 'fixed' never stops early: there is nothing to calibrate")
    config = bundle.read_config(folder)
    model = BundleModel(folder, config, threads=threads)
    labels = match_labels(images, config)
    if target == "accuracy" and labels is None:
        raise UserError("--target accuracy needs labels: class folders, or y arrays, that match the model's labels")
    order = np.random.default_rng(seed).permutation(len(images))
    first, second = order[: measuring(len(order))], order[measuring(len(order)) :]
    recorder = Recorder(model, images, labels, chosen_rule, advance)
    if not chosen_rule.needs_travel or chosen_rule.name == "contraction":
        measured = recorder.record(first)
        policy = measure(measured, chosen_rule, 0.0, epsilon, target)
        recorder.apply(policy)
        if chosen_rule.name == "contraction":
            speed = np.array(policy.cls_speed) if policy.cls_speed else None
            measured = replace(measured, scores=contraction_scores(measured, np.array(policy.travel), speed))
    else:  # a rule of the user's that looks at travel: measure it, then look again
        policy = measure(recorder.record(first), chosen_rule, 0.0, epsilon, target)
        recorder.apply(policy)
        measured = recorder.record(first)
    tested = recorder.record(second)
    if len(tested) < len(second) and binomial_tail(0, len(tested), epsilon) > delta:
        raise UserError(
            f"only {len(tested)} images could be read: too few for epsilon {epsilon:g}; nothing was changed"
        )
    thresholds = grid(measured)
    threshold = choose(tested, thresholds, epsilon, delta, target, policy.lyapunov)
    if threshold is None:
        raise UserError(
            f"no threshold of {rule!r} could be proven to err on at most {epsilon:g} of images with confidence "
            f"{1 - delta:g}; nothing was changed"
        )
    rows = [_row(tested, t, policy, delta, target, recorder) for t in _shown(thresholds, threshold)]
    chosen = next(row for row in rows if row.threshold == threshold)
    own = config.integration
    proof = Calibration(
        epsilon, delta, len(tested), recorder.digest.hexdigest(), target, chosen.observed, chosen.bound,
        chosen.mean_steps, own.steps, own.horizon,
    )  # fmt: skip
    policy = replace(policy, threshold=threshold, calibration=proof)
    try:
        bundle.write_config(folder, config.replace(exit=policy))
        write_card(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): calibrate a copy of it") from None
    full = None if tested.labels is None else float((tested.answers[:, -1] == tested.labels).mean())
    return Report(policy, chosen, tuple(rows), full, recorder.skipped)


def _check(epsilon: float, delta: float, target: str, count: int) -> None:
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
    if set(images.classes) <= set(config.labels):
        return np.array([config.labels.index(name) for name in images.classes])[images.labels]
    if not config.labels and len(images.classes) == config.architecture.classes:
        return images.labels
    return None


def _shown(thresholds: Floats, chosen: float, lines: int = 12) -> list[float]:
    """A readable choice of the thresholds, the chosen one among them, with some on its unsafe side."""
    at = int(np.flatnonzero(thresholds == chosen)[0])
    end = min(len(thresholds), at + 1 + max(3, (at + 1) // 2))
    picks = {at, *np.unique(np.linspace(0, end - 1, lines).astype(int)).tolist()}
    return [float(thresholds[i]) for i in sorted(picks)]


def _row(
    recording: Recording, threshold: float, policy: ExitPolicy, delta: float, target: str, recorder: Recorder
) -> Row:
    steps = recording.exit_steps(threshold, policy.lyapunov)
    wrong = int(losses(recording, steps, target).sum())
    accuracy = None
    if recording.labels is not None:
        accuracy = float((recording.answers_at(steps) == recording.labels).mean())
    return Row(
        threshold,
        wrong / len(recording),
        upper_bound(wrong, len(recording), delta),
        float(steps.mean()),
        accuracy,
        recorder.time_saved(float(steps.mean())),
    )


class Recorder:
    """Follows images to full depth and writes down what the rule sees."""

    def __init__(
        self,
        model: BundleModel,
        images: Images,
        labels: np.ndarray | None,
        rule: Rule,
        advance: Callable[[], None] = lambda: None,
    ):
        own = model.config.integration
        self.model, self.images, self.labels, self.advance = model, images, labels, advance
        # Never stops by itself: the limit and the threshold are applied to the recording.
        self.depth = Depth(own.steps, own.step_size, own.steps, rule, math.inf)
        self.slots: Slots = model.slots(CAPACITY)
        self.slots.measured = None
        self.digest = hashlib.sha256()
        self.skipped = 0
        self.steps_run = self.images_run = 0

    def apply(self, policy: ExitPolicy) -> None:
        """Let the rule see what has been measured."""
        self.slots.measured = Measured.of(self.model.config.replace(exit=policy))

    def time_saved(self, mean_steps: float) -> float:
        stem = self.slots.seconds["stem"] / max(1, self.images_run)
        step = self.slots.seconds["step"] / max(1, self.steps_run)
        return 1 - (stem + mean_steps * step) / (stem + self.depth.steps * step)

    def record(self, indices: np.ndarray) -> Recording:
        found: dict[int, tuple[np.ndarray, ...]] = {}
        reader = Reader(indices.tolist(), self._pixels)
        while not reader.done or self.slots.active:
            ready = reader.take(self.slots.free, wait=not self.slots.active)
            good = [(item.place, item.pixels) for item in ready if item.pixels is not None]
            self.skipped += len(ready) - len(good)
            for _, pixels in good:
                self.digest.update(pixels.tobytes())
            if good:
                batch = np.stack([pixels for _, pixels in good])
                self.slots.admit(batch, [Job(place, self.depth, trace=True, keep="cls") for place, _ in good])
                self.images_run += len(good)
            self.steps_run += self.slots.active
            for outcome in self.slots.step():
                found[outcome.job.key] = _summary(outcome)
                self.advance()
        if not found:
            raise UserError("none of the images could be read")
        places = sorted(found)
        scores, answers, margins, speeds, growths, travels = (
            np.stack([found[place][i] for place in places]) for i in range(6)
        )
        labels = None if self.labels is None else self.labels[indices[places]]
        return Recording(scores, answers, margins, speeds, growths, travels, labels)

    def _pixels(self, index: int) -> np.ndarray:
        try:
            return self.model.prepare(self.images.read(index))
        except UserError:
            raise
        except Exception as error:  # the decoders' many ways to fail
            raise UserError(f"{self.images.names[index]} cannot be read ({error})") from None


def _summary(outcome: Outcome) -> tuple[np.ndarray, ...]:
    trace = outcome.trace
    return (
        np.array([s.score for s in trace]),
        np.array([int(s.logits.argmax()) for s in trace], np.int32),
        np.array([s.margin for s in trace]),
        np.array([s.cls_speed for s in trace]),
        np.array([s.exponent * s.time for s in trace]),
        dynamics.travel_to_end(np.stack(outcome.states)),
    )


def open_images(
    source: str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
) -> Images:
    """The images to calibrate on, as `data.pick` finds them; at most `limit` of them, drawn at random."""
    images = data.pick(source, split, provenance)
    if limit is not None and limit < len(images):
        images = images.subset(np.random.default_rng(seed).permutation(len(images))[:limit])
    return images


def summary(report: Report) -> dict[str, Any]:
    """Plain data, as printed by `calibrate --json`."""
    proof = report.policy.calibration
    assert proof is not None
    return {
        "rule": report.policy.rule,
        "threshold": report.policy.threshold,
        "lyapunov": report.policy.lyapunov,
        "travel": "scaled by speed" if report.policy.cls_speed else "measured",
        "calibration": vars(proof),
        "full_accuracy": report.full_accuracy,
        "skipped": report.skipped,
        "table": [vars(row) for row in report.rows],
    }
