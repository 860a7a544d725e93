"""How many answers are marked as unsure on pictures of none of the model's classes, and on pictures of its own.

    python tests/benchmarks/bench_unsure.py BUNDLE --own cifar10.npz --other cifar100.npz --limit 500

BUNDLE is one that `odevit-serve calibrate --unsure` has written. Classes of --other whose names the model knows are
left out; others that mean the same by another name have to be named with --without.
"""

from __future__ import annotations

import argparse

import numpy as np

from odevit_serve.data.division import pick
from odevit_serve.runtime.model import load
from odevit_serve.runtime.results import Prediction


def share(model: object, source: str, limit: int, left_out: set[str]) -> str:
    images = pick(source)
    rows = np.random.default_rng(0).permutation(len(images))
    if images.labels is not None:
        rows = np.array([row for row in rows if images.classes[images.labels[row]] not in left_out])
    answers = [a for a in model.stream(images.read(int(row)) for row in rows[:limit]) if isinstance(a, Prediction)]  # type: ignore[attr-defined]
    marked = sum(bool(answer.unsure) for answer in answers)
    mean = np.mean([answer.probability for answer in answers])
    return f"{marked / len(answers):.1%} of {len(answers):,} marked, mean probability {mean:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--own", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=500)
    asked = parser.parse_args()
    model = load(asked.bundle, threads=1)
    known = model.config.confidence
    if known is None or known.unsure is None:
        parser.error(f"{asked.bundle} has no threshold: run odevit-serve calibrate --unsure on it first")
    print("its own classes:", share(model, asked.own, asked.limit, set()))
    print("other classes:  ", share(model, asked.other, asked.limit, {*model.labels, *asked.without}))


if __name__ == "__main__":
    main()
