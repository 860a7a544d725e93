"""From arrays with one row an image to the numbers of the report. No model is needed here, only what it left behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...config import Integration
from ...guarantee import thresholds
from ...guarantee.recording import NUMBERS, Recording
from ...runtime import dynamics, exits
from ...runtime.dynamics import Floats
from . import lyapunov
from .statistics import auroc, correlation, flat_from, region

Arrays = dict[str, np.ndarray]
Numbers = dict[str, Any]
LEVELS = (0.01, 0.02, 0.05)  # disagreement at which rules are compared
NEVER_STOPS = {"fixed"}


def _share(values: np.ndarray) -> float:
    return float(np.mean(values))


def depth(
    arrays: Arrays,
    full: np.ndarray,
    grid: Sequence[tuple[int, float]],
    counts: Sequence[int],
    schemes: Sequence[tuple[str, str]],
    own: Integration,
    labels: np.ndarray | None,
    teacher: np.ndarray | None,
) -> Numbers:
    """Accuracy and agreement over steps and horizon, the same over steps for each scheme, and where it is flat.

    Agreement is with the teacher where there is one, else with the model's own answer at its own steps.
    """
    reference = full if teacher is None else teacher

    def judge(answers: np.ndarray) -> Numbers:
        found = {"agreement": _share(answers == reference)}
        return found if labels is None else {"accuracy": _share(answers == labels), **found}

    table = [{"steps": n, "horizon": t, **judge(arrays["grid"][:, i])} for i, (n, t) in enumerate(grid)]
    measure = "agreement" if labels is None else "accuracy"
    mine = [row for row in table if row["horizon"] == own.horizon]
    curves = [{"solver": schemes[0][0], "splitting": schemes[0][1], "rows": mine}]
    for i, (solver, splitting) in enumerate(schemes[1:]):
        rows = [{"steps": n, **judge(arrays["schemes"][:, i, j])} for j, n in enumerate(counts)]
        curves.append({"solver": solver, "splitting": splitting, "rows": rows})
    best = flat_from([row["steps"] for row in mine], [row[measure] for row in mine], own.steps)
    return {
        "own": {"steps": own.steps, "horizon": own.horizon},
        "agreement_with": "the model itself at its own steps" if teacher is None else "the teacher",
        "grid": table,
        "curves": curves,
        "measure": measure,
        "recommended_steps": best,
        "at_recommended": next(row for row in mine if row["steps"] == best),
        "at_own": next(row for row in mine if row["steps"] == own.steps),
        "images": len(full),
    }


def free_exponents(speed: Floats, step_size: float) -> Floats:
    """Growth of the velocity over the whole trajectory: the exponent that costs nothing."""
    return dynamics.exponent(speed[:, -1], speed[:, 0], (speed.shape[1] - 1) * step_size)


def stop_at_time(times: Floats, answers: np.ndarray, step_size: float, labels: np.ndarray | None) -> dict[str, float]:
    """What ending every image at its own time costs: at the first step that reaches it, at least one, at most all."""
    steps = answers.shape[1]
    ends = np.ceil(np.minimum(times, steps * step_size) / step_size - 1e-9).clip(1, steps).astype(int)
    early = answers[np.arange(len(answers)), ends - 1]
    found = {
        "mean_steps": float(ends.mean()),
        "stopped_early": _share(ends < steps),
        "differs": _share(early != answers[:, -1]),
    }
    return found if labels is None else {"accuracy": _share(early == labels), **found}


def stability(
    maximal: Floats, trajectory: Arrays, step_size: float, labels: np.ndarray | None, names: Sequence[str]
) -> Numbers:
    """Exponents against being right, per image and per class, and what stopping at the Lyapunov time costs."""
    logits = trajectory["logits"]
    answers = logits.argmax(-1)
    kinds = {"maximal": maximal[:, 0].astype(float), "free": free_exponents(trajectory["speed"], step_size)}
    found: Numbers = {"images": len(answers), "others": maximal.mean(0).tolist(), "kinds": {}}
    doubt = 1 - dynamics.softmax(logits[:, -1].astype(float)).max(-1)
    for kind, values in kinds.items():
        times = dynamics.lyapunov_time(values)
        row: Numbers = {
            "mean": float(np.nanmean(values)),
            "deviation": float(np.nanstd(values)),
            "positive": _share(values > 0),
            "median_time": float(np.median(times)) if np.isfinite(np.median(times)) else None,
            "stopping": [
                {"times": c, **stop_at_time(c * times, answers, step_size, labels)} for c in (0.5, 1.0, 2.0, 4.0)
            ],
            "values": np.round(values, 5).tolist(),
        }
        if labels is not None:
            wrong = answers[:, -1] != labels
            row["auroc_of_error"] = auroc(values, wrong).to_dict()
            row["correlation_with_right"] = correlation(values, ~wrong).to_dict()
            row["classes"] = by_class(values, ~wrong, labels, names)
            pairs = [(c["exponent"], c["accuracy"]) for c in row["classes"]]
            row["class_correlation"] = correlation([e for e, _ in pairs], [a for _, a in pairs]).to_dict()
        found["kinds"][kind] = row
    if labels is not None:
        wrong = answers[:, -1] != labels
        found["auroc_of_doubt"] = auroc(doubt, wrong).to_dict()
        found["right"] = (~wrong).tolist()
        found["full"] = {"accuracy": _share(~wrong), "steps": answers.shape[1]}
    found["agreement_of_kinds"] = correlation(kinds["maximal"], kinds["free"]).to_dict()
    found["boundary"] = toward_boundary(trajectory["exponent"], answers, step_size)
    return found


def toward_boundary(exponents: Floats, answers: np.ndarray, step_size: float) -> Numbers:
    """The exponent toward the nearest boundary after each step [B,N], and the Lyapunov times passed until then.

    A Lyapunov time is passed when `h * max(exponent, 0)` adds up to 1. The last step has no later answer to tell.
    """
    passed = np.cumsum(step_size * np.maximum(exponents, 0), 1)
    steps = []
    for i in range(exponents.shape[1]):
        changes = answers[:, i] != answers[:, -1]
        steps.append(
            {
                "step": i + 1,
                "exponent": np.nanquantile(exponents[:, i], (0.1, 0.5, 0.9)).tolist(),
                "positive": _share(exponents[:, i] > 0),
                "times": np.nanquantile(passed[:, i], (0.1, 0.5, 0.9)).tolist(),
                "auroc_of_change": auroc(exponents[:, i], changes).to_dict() if i + 1 < exponents.shape[1] else None,
            }
        )
    return {"steps": steps}


def by_class(values: Floats, right: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[Numbers]:
    return [
        {
            "label": names[c],
            "images": int((labels == c).sum()),
            "exponent": float(np.nanmean(values[labels == c])),
            "accuracy": _share(right[labels == c]),
        }
        for c in np.unique(labels)
    ]


def distance(trajectory: Arrays, labels: np.ndarray | None) -> Numbers:
    """How far the student's CLS ends from the teacher's, by who is right, and how near is near enough."""
    far = trajectory["teacher_distance"]
    answers = trajectory["logits"].argmax(-1)[:, -1]
    theirs = trajectory["teacher_logits"].argmax(-1)
    agrees = answers == theirs
    groups: dict[str, np.ndarray] = {"agree": agrees, "differ": ~agrees}
    if labels is not None:
        mine, expert = answers == labels, theirs == labels
        groups = {
            "both right": mine & expert,
            "only the teacher": ~mine & expert,
            "only the student": mine & ~expert,
            "both wrong": ~mine & ~expert,
        }
    found: Numbers = {
        "images": len(far),
        "agreement": _share(agrees),
        "region": region(far[:, -1], agrees),
        "auroc_of_disagreement": auroc(far[:, -1], ~agrees).to_dict(),
        "groups": [
            {
                "name": name,
                "images": int(chosen.sum()),
                "mean": float(far[chosen, -1].mean()) if chosen.any() else None,
                "by_step": far[chosen].mean(0).tolist() if chosen.any() else [],
                "distances": np.round(far[chosen, -1], 4).tolist(),
            }
            for name, chosen in groups.items()
        ],
    }
    if found["region"] is not None:
        found["within_region"] = _share(far[:, -1] <= found["region"])
    if labels is not None:
        found["teacher_accuracy"] = _share(theirs == labels)
    return found


def steepness(
    arrays: Arrays, own: Integration, printed: float, norms: dict[str, dict[str, float]], radius: float, assumed: float
) -> Numbers:
    """The bound on the error of the steps beside the error itself."""
    error, steep, bend = arrays["error"], arrays["lipschitz"], arrays["bend"]
    found: Numbers = {
        "images": len(error),
        "norms": norms,
        "lipschitz": {"by_step": steep.mean(0).tolist(), "highest_by_step": steep.max(0).tolist()},
        "error": {
            "by_step": error.mean(0).tolist(),
            "median": float(np.median(error[:, -1])),
            "highest": float(error[:, -1].max()),
            "median_of_cls": float(np.median(arrays["cls_error"][:, -1])),
        },
        "radius": {"largest_token": float(arrays["radius"].max()), "assumed": radius},
        "printed": {"bound": printed, "lipschitz": assumed, "holds": bool((error[:, -1] <= printed).all())},
    }
    if (own.solver, own.splitting) == ("euler", "parallel"):
        bounds = np.array(
            [
                lyapunov.log10_bound(float(steep[i].max()), float(bend[i].max()), own.step_size, own.horizon)
                for i in range(len(error))
            ]
        )
        excess = bounds - np.log10(error[:, -1])
        found["theorem"] = {
            "log10_bound": bounds.tolist(),
            "log10_error": np.log10(error[:, -1]).tolist(),
            "holds": bool((excess >= 0).all()),
            "median_log10_excess": float(np.median(excess)),
        }
    return found


def record(trajectory: Arrays, labels: np.ndarray | None, own: Integration) -> Recording:
    """The trajectories as calibration has them."""
    numbers: dict[str, Any] = {name: trajectory[name].astype(float) for name in NUMBERS}
    return Recording(own.step_size, trajectory["logits"], **numbers, travels=trajectory["travel"], labels=labels)


def rules(recording: Recording, lines: int = 60) -> Numbers:
    """For each rule: accuracy and disagreement over mean steps, and how well its score tells what will still change.

    What calibration would measure, the travel that is left, is measured on the first fifth of the images.
    """
    steps, labels, answers = recording.steps, recording.labels, recording.answers
    found: Numbers = {"images": len(recording), "steps": steps, "rules": {}}
    if labels is not None:
        found["accuracy"] = _share(answers[:, -1] == labels)
    changes = answers[:, :-1] != answers[:, -1:]
    found["still_to_change"] = changes.mean(0).tolist()
    travel = recording.subset(np.arange(max(1, thresholds.measuring(len(recording))))).mean_travel()
    for name, rule in exits.RULES.items():
        if name not in NEVER_STOPS:
            found["rules"][name] = judge_rule(recording, recording.scores(rule, travel), changes, lines)
    return _plain(found)


def judge_rule(recording: Recording, scores: Floats, changes: np.ndarray, lines: int = 60) -> Numbers:
    """What a rule with these scores [n,N] gives."""
    curve: list[Numbers] = []
    for threshold in thresholds.grid(recording, scores, lines):
        ends = recording.exit_steps(scores, float(threshold))
        row = {"mean_steps": float(ends.mean()), "differs": _share(recording.errors(ends))}
        if recording.labels is not None:
            row["accuracy"] = _share(recording.answers_at(ends) == recording.labels)
        if not curve or curve[-1] != row:
            curve.append(row)
    return {
        "curve": curve,
        "auroc_by_step": [auroc(-scores[:, n], changes[:, n]).value for n in range(recording.steps - 1)],
        "at_levels": at_levels(recording, scores),
    }


def at_levels(recording: Recording, scores: Floats) -> dict[str, Numbers]:
    """Mean steps at given disagreement: the threshold from one half of the images, applied to the other."""
    half = len(recording) // 2
    first, second = np.arange(half), np.arange(half, len(recording))
    fit, held, found = recording.subset(first), recording.subset(second), {}
    for level in LEVELS:
        chosen = math.inf
        for threshold in thresholds.grid(fit, scores[first]):
            if fit.errors(fit.exit_steps(scores[first], float(threshold))).mean() > level:
                break
            chosen = float(threshold)
        ends = held.exit_steps(scores[second], chosen)
        found[f"{level:.0%}"] = {"mean_steps": float(ends.mean()), "differs": _share(held.errors(ends))}
    return found


def attention(entropy: Floats, right: np.ndarray | None) -> Numbers:
    """Entropy of CLS's attention over time (1: it looks everywhere alike)."""
    found: Numbers = {"images": len(entropy), "entropy": entropy.mean(0).tolist(), "spread": entropy.std(0).tolist()}
    if right is not None and right.any() and not right.all():
        found |= {"right": entropy[right].mean(0).tolist(), "wrong": entropy[~right].mean(0).tolist()}
    return found


def energy(arrays: Arrays, answers: np.ndarray, right: np.ndarray | None) -> Numbers:
    """Whether the Hopfield energy falls, head by head, and whether it tells which answers will still change.

    `held` is the change by a step with the keys that it started from: the one that must be negative where values are
    keys and nothing else moves a token.
    """
    along, held = arrays["cls"].astype(float), arrays["cls_held"].astype(float)  # [B,N+1,H], [B,N,H]
    heads = [
        {
            "by_step": along[:, :, h].mean(0).tolist(),
            "of_all_tokens": arrays["mean"][:, :, h].mean(0).tolist(),
            "falls": _share(np.diff(along[:, :, h], axis=1) < 0),
            "falls_with_held_keys": _share(held[:, :, h] < 0),
            "falls_over_all": _share(along[:, -1, h] < along[:, 0, h]),
        }
        for h in range(along.shape[2])
    ]
    changes = answers[:, :-1] != answers[:, -1:]
    total = along.sum(2)
    scores = {"energy": total[:, 1:-1], "change of energy": np.abs(np.diff(total, axis=1))[:, :-1]}
    found: Numbers = {
        "images": len(along),
        "heads": heads,
        "auroc_of_change": {
            name: [auroc(score[:, n], changes[:, n]).to_dict() for n in range(changes.shape[1])]
            for name, score in scores.items()
        },
    }
    if right is not None:
        found["auroc_of_error"] = auroc(total[:, -1], ~right).to_dict()
    return _plain(found)  # type: ignore[no-any-return]


def tokens(arrays: Arrays, thresholds: Sequence[float]) -> Numbers:
    """Parts of the tokens below each threshold of speed, by step; what leaving those out that stay there could save."""
    below, resting = arrays["below"].mean(0), arrays["resting"].mean(0)  # [N,thresholds]
    return {
        "images": len(arrays["below"]),
        "thresholds": list(thresholds),
        "below": below.T.tolist(),
        "resting": resting.T.tolist(),
        # A token that rests from step n on is computed in step n, where this is seen, and not in those after it.
        "saved": (resting[:-1].sum(0) / len(resting)).tolist(),
    }


def _plain(value: Any) -> Any:
    """The same without numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
