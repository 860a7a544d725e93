"""How soon the audit of a running engine notices that the camera has changed: noise and blur on real pictures.

    python tests/benchmarks/bench_audit.py cifar10 --data cifar10.npz

Pictures of the test split go through the engine with `--clients` on their way at any time, a part `--rate` of them
audited. They are as they are until `--clean` of them are audited; then the camera changes, and what counts is how many
more are audited until the guarantee is rejected. `--seeds` runs of each kind, at most `--most` audited images.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from odevit_serve.data.datasets import Images
from odevit_serve.data.division import pick
from odevit_serve.runtime.model import load_bundle
from odevit_serve.serving.audit import REJECTED, Audit, AuditOptions
from odevit_serve.serving.engine import Engine

Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def noisy(sigma: float) -> Change:
    """Sensor noise, in grey levels."""

    def change(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        values = np.asarray(picture.convert("RGB"), float)
        return Image.fromarray(np.clip(values + rng.normal(0, sigma, values.shape), 0, 255).astype(np.uint8))

    return change


def blurred(radius: float) -> Change:
    """Out of focus, in pixels."""
    return lambda picture, _: picture.filter(ImageFilter.GaussianBlur(radius))


CAMERAS: dict[str, Change] = {
    "no change": lambda picture, _: picture,
    "noise 25": noisy(25.0),
    "noise 50": noisy(50.0),
    "blur 1.0": blurred(1.0),
    "blur 1.5": blurred(1.5),
}


def run(engine: Engine[Any], pictures: Images, change: Change, asked: argparse.Namespace, seed: int) -> Any:
    """Audited images from the change to the alarm (None: no alarm), and how many of those differ."""
    audit, rng = engine.audit, np.random.default_rng(seed)
    assert audit is not None
    audit.clear()
    flying: deque[Future[Any]] = deque()
    begun: tuple[int, int] | None = None

    def shots() -> Iterator[Image.Image]:
        while True:
            yield from (pictures.read(int(row)) for row in rng.permutation(len(pictures)))

    for picture in shots():
        if begun is None and audit.test.images >= asked.clean:
            if audit.state == REJECTED:
                return 0, 0.0, _seen(audit, (0, 0))  # a false alarm
            begun = (audit.test.images, audit.test.differences)
        if begun is not None and (audit.state == REJECTED or audit.test.images >= begun[0] + asked.most):
            break
        flying.append(engine.submit(picture if begun is None else change(picture, rng)))
        if len(flying) >= asked.clients:
            flying.popleft().result(60)
    for future in flying:
        future.result(60)
    assert begun is not None
    alarmed = audit.state == REJECTED
    return (audit.test.images - begun[0] if alarmed else None), *_seen(audit, begun)


def _seen(audit: Audit, begun: tuple[int, int]) -> tuple[float, float]:
    images = audit.test.images - begun[0]
    return (audit.test.differences - begun[1]) / max(1, images), audit.coverage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--rate", type=float, default=0.25)
    parser.add_argument("--clean", type=int, default=300)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cameras", nargs="*", default=list(CAMERAS), choices=list(CAMERAS))
    asked = parser.parse_args()
    pictures = pick(asked.data, asked.split, None)
    model = load_bundle(asked.bundle)
    for name in asked.cameras:
        alarms, rates, coverage = [], [], 1.0
        for seed in range(asked.seeds):
            with Engine(model, audit=AuditOptions(asked.rate, seed=seed)) as engine:
                alarm, rate, covered = run(engine, pictures, CAMERAS[name], asked, seed)
            alarms.append(alarm)
            rates.append(rate)
            coverage = min(coverage, covered)
        told = [f"after {alarm}" if alarm is not None else f"none in {asked.most}" for alarm in alarms]
        print(f"{name:10} differ {statistics.mean(rates):.1%}, alarm {', '.join(told)}, coverage {coverage:.1%}")


if __name__ == "__main__":
    main()
