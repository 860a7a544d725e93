"""`calibrate --from-audit`: a proof for the traffic of a server, from the recordings of its audits.

The same test as in `calibrate`, on images that were drawn at random from all that came. The scores are those that the
server wrote down, so the rule and what it measures travel by stay as they are; threshold and limit are chosen anew.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from .. import bundle
from ..config import Calibration, ExitPolicy
from ..errors import UserError
from ..runtime.model import BundleModel
from . import audit_file
from .bounds import upper_bound
from .calibrate import CalibrationReport, Row, check_numbers, reasons, write_policy
from .thresholds import choose, grid, lyapunov_limit, measuring, table_rows


def calibrate_from_audit(
    folder: Path,
    file: Path,
    epsilon: float = 0.01,
    delta: float = 0.05,
    seed: int = 0,
    threads: int | None = None,
    output: Path | None = None,
    limit: int | None = None,
) -> CalibrationReport:
    """Test thresholds on the newest `limit` audited images (None: all), and write the policy with its proof."""
    config = bundle.read_config(folder)
    setting = BundleModel(folder, config, threads=threads).graphs.setting
    found = audit_file.read(file, audit_file.head(config, setting), limit)
    check_numbers(epsilon, delta, "agreement", len(found))
    order = np.random.default_rng(seed).permutation(len(found))
    first = measuring(len(order))
    measured, tested = found.subset(order[:first]), found.subset(order[first:])
    times = lyapunov_limit(measured, epsilon)
    thresholds = grid(measured, measured.scores)
    threshold = choose(tested, tested.scores, thresholds, epsilon, delta, lyapunov=times)
    if threshold is None:
        raise UserError(
            f"no threshold could be proven to err on at most {epsilon:g} of images with confidence {1 - delta:g} by "
            f"the {len(tested):,} audited images tested; nothing was changed"
        )

    def row(value: float) -> Row:
        ends = tested.exit_steps(tested.scores, value, times)
        wrong, mean = int(tested.errors(ends).sum()), float(ends.mean())
        bound = upper_bound(wrong, len(tested), delta)
        return Row(value, wrong / len(tested), bound, mean, None, 1 - mean / tested.steps)

    rows = [row(value) for value in table_rows(thresholds, threshold)]
    chosen = next(entry for entry in rows if entry.threshold == threshold)
    digest = hashlib.sha256(found.scores.tobytes() + found.answers.tobytes()).hexdigest()
    proof = Calibration(
        epsilon, delta, len(tested), digest, setting, "agreement",
        f"{len(found):,} images that a server audited, drawn at random from its traffic, seed {seed}",
        chosen.observed, chosen.bound, chosen.mean_steps, reasons(tested, tested.scores, threshold, times),
    )  # fmt: skip
    own = config.exit
    policy = ExitPolicy(own.rule, threshold, times, own.travel, own.horizon, proof)
    known = None if config.confidence is None else replace(config.confidence, unsure=None)  # proven for another policy
    write_policy(folder, output, config.replace(exit=policy, confidence=known))
    return CalibrationReport(policy, chosen, tuple(rows), (), None, 0)
