"""What docs/relatives.md compares: accuracy, evaluations at 1% disagreement, and solvers by number of evaluations.

    python tests/benchmarks/bench_relatives.py DATA BUNDLE ... [--limit 400] [--solvers] [--sizes] [--halting]

The images are those that the bundles' runs set aside to choose the model by. Evaluations are of psi, for one image; at
1% disagreement they are those of the best exit rule, its threshold from one half of the images, applied to the other.
`--solvers` also follows the images through the runtime by solvers of one evaluation a step: when the answer settles.
`--sizes` chooses the size of each image's steps by a tolerance; `--halting` fits a head that predicts whether the
answer will still change, on one half of the images, and compares it with the rules on the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from odevit_serve import load, step_size
from odevit_serve.anderson import EMPTY, anderson
from odevit_serve.data.datasets import Images
from odevit_serve.data.division import pick
from odevit_serve.guarantee.recording import Recording
from odevit_serve.runtime.exits import RULES
from odevit_serve.runtime.jobs import Job
from odevit_serve.runtime.options import RequestOptions
from odevit_serve.solvers import SOLVERS
from odevit_serve.train.analysis import collect
from odevit_serve.train.analysis import numbers as sections
from odevit_serve.train.batches import Batch, PictureDataset, loader
from odevit_serve.train.model import ODEViT

EVALUATIONS = (2, 3, 4, 6, 8, 12, 16)


@torch.no_grad()
def record(model: ODEViT, images: Images, parts: list[Batch]) -> Recording:
    """The images along the bundle's own steps."""
    study = collect.Study(model, images, None, None, Path(), "")
    found = [collect.look_trajectory(study, part) for part in parts]
    arrays = {key: np.concatenate([part[key] for part in found]) for key in found[0]}
    labels = np.concatenate([part.labels.numpy() for part in parts])
    return sections.record(arrays, labels, model.config.integration)


def exits(model: ODEViT, images: Images, parts: list[Batch]) -> tuple[float, float, float, str]:
    """Accuracy at full depth, mean evaluations at 1% disagreement, the disagreement there, and by which rule."""
    recording = record(model, images, parts)
    found = sections.rules(recording, 1)["rules"]
    rows = {name: rule["at_levels"]["1%"] for name, rule in found.items()}
    best = min(rows, key=lambda name: rows[name]["mean_steps"])
    right = float((recording.answers[:, -1] == recording.labels).mean())
    return right, rows[best]["mean_steps"], rows[best]["differs"], best


@torch.no_grad()
def solvers(model: ODEViT, parts: list[Batch]) -> None:
    """Accuracy, and agreement with the bundle's own answer, after so many evaluations of psi."""
    own = model.config.integration
    wanted = torch.cat([model(part.pixel_values).argmax(-1) for part in parts])
    labels = torch.cat([part.labels for part in parts])

    def accelerated(depth: int) -> Callable[[Tensor, int], Tensor]:
        def answer(pixels: Tensor, evaluations: int) -> Tensor:
            x, window = model.stem(pixels), EMPTY
            for _ in range(evaluations):
                x, _, window = anderson(model.psi, x, own.step_size, window, depth)
            return model.answer(x)

        return answer

    def integrated(solver: str) -> Callable[[Tensor, int], Tensor]:
        def answer(pixels: Tensor, evaluations: int) -> Tensor:
            steps = evaluations // SOLVERS[solver].evaluations
            horizon = own.horizon if SOLVERS[solver].order else own.step_size * steps  # to the rest by the own size
            return model(pixels, steps=steps, horizon=horizon, solver=solver)  # type: ignore[no-any-return]

        return answer

    ways = {name: integrated(name) for name in SOLVERS}
    ways |= {f"anderson {depth}": accelerated(depth) for depth in (0, 1, 3, 5)}
    print("accuracy / agreement with the bundle's own steps, % by evaluations of psi")
    print(f"{'':12}" + "".join(f"{n:>14}" for n in EVALUATIONS))
    for name, way in ways.items():
        each = SOLVERS[name].evaluations if name in SOLVERS else 1
        cells = []
        for count in EVALUATIONS:
            if count % each or count < each:
                cells.append("-")
                continue
            answers = torch.cat([way(part.pixel_values, count).argmax(-1) for part in parts])
            right, same = (100 * (answers == other).float().mean() for other in (labels, wanted))
            cells.append(f"{right:.1f} / {same:.1f}")
        print(f"{name:12}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def settled(source: str, parts: list[Batch], wanted: Sequence[str] = ("euler", "ab2", "anderson")) -> None:
    """By the slots of the runtime: after how many of the bundle's steps an answer is, and stays, the last one."""
    model = load(source)
    pixels = np.concatenate([part.pixel_values.numpy() for part in parts])
    labels = np.concatenate([part.labels.numpy() for part in parts])
    own, found = model.config.integration, dict[str, np.ndarray]()
    for solver in (own.solver, *(name for name in wanted if name != own.solver)):
        slots = model.integrated(solver).slots(50)
        depth = slots.depth(RequestOptions(adaptive=False))
        answers = np.empty((len(pixels), depth.steps), np.int64)
        for start in range(0, len(pixels), 50):
            some = pixels[start : start + 50]
            slots.admit(some, [Job(start + i, depth, trace=True) for i in range(len(some))])
            while slots.active:
                for outcome in slots.step():
                    answers[outcome.job.key] = [step.logits.argmax() for step in outcome.trace]
        found[solver] = answers
    full = found[own.solver][:, -1]
    print(f"by the runtime, {own}: mean evaluations until the answer stays the same; accuracy at the end;")
    print(f"agreement with {own.solver}'s last answer after each step, %")
    for solver, answers in found.items():
        other = answers != answers[:, -1:]
        when = np.where(other.any(1), answers.shape[1] - other[:, ::-1].argmax(1), 0) + 1
        right, same = 100 * (answers[:, -1] == labels).mean(), 100 * (answers == full[:, None]).mean(0)
        print(f"{solver:12} {when.mean():6.2f} {right:6.1f}   {' '.join(f'{part:.1f}' for part in same)}", flush=True)


GRIDS, TOLERANCES, FINE = (4, 12), (4.0, 8.0, 16.0), 12


class TorchOps:
    """As numpy has them; torch's take no plain numbers."""

    sqrt, floor, minimum = torch.sqrt, torch.floor, torch.minimum

    @staticmethod
    def maximum(x: Tensor, y: Tensor | float) -> Tensor:
        return torch.maximum(x, torch.as_tensor(y))


def by_estimate(model: ODEViT, x: Tensor, steps: int, tolerance: float, horizon: float) -> tuple[Tensor, Tensor]:
    """Answers and evaluations by `step_size`, as the runtime does it: Euler's steps of whole numbers of a grid's."""
    grid, rows = horizon / steps, torch.arange(len(x))
    answers, used = torch.empty(len(x), dtype=torch.long), torch.zeros(len(x))
    place, before, last = torch.zeros(len(x)), torch.zeros(len(x)), torch.zeros_like(x[:, 0])
    while len(rows):
        v = model.psi(x)
        change = (v[:, 0] - last).norm(dim=-1)
        most, least = (steps - place) * grid, torch.tensor(grid)
        size = step_size.choose(change, before, torch.tensor(tolerance), least, most, TorchOps)
        x = x + size[:, None, None] * v
        place, used[rows] = place + (size / grid).round(), used[rows] + 1
        stay, done = place < steps, rows[place >= steps]
        answers[done] = model.answer(x[~stay]).argmax(-1)
        rows, x, place, before, last = rows[stay], x[stay], place[stay], size[stay], v[stay, 0]
    return answers, used


def by_heun_pair(model: ODEViT, x: Tensor, steps: int, tolerance: float, horizon: float) -> tuple[Tensor, Tensor]:
    """The reference: h/2 |f(x + h v) - v| of CLS, sizes of any length, steps above the tolerance taken again."""
    rows, size, time = torch.arange(len(x)), torch.full((len(x),), horizon / steps), torch.zeros(len(x))
    answers, used = torch.empty(len(x), dtype=torch.long), torch.zeros(len(x))
    v = model.psi(x)
    used += 1
    while len(rows):
        h = torch.minimum(size, horizon - time)
        other = model.psi(x + h[:, None, None] * v)
        error = (0.5 * h * (other - v)[:, 0].norm(dim=-1)).clamp_min(1e-12)
        good = error <= tolerance
        x = torch.where(good[:, None, None], x + (0.5 * h)[:, None, None] * (v + other), x)
        time, used[rows] = torch.where(good, time + h, time), used[rows] + 1
        size = h * (0.9 * (tolerance / error).sqrt()).clamp(0.2, 5.0)
        stay = time < horizon - 1e-4
        answers[rows[~stay]] = model.answer(x[~stay]).argmax(-1)
        rows, x, v, size, time, good = rows[stay], x[stay], v[stay], size[stay], time[stay], good[stay]
        if good.any():
            v[good] = model.psi(x[good])
            used[rows[good]] += 1
    return answers, used


@torch.no_grad()
def sizes(model: ODEViT, parts: list[Batch]) -> None:
    """Evaluations and disagreement with the own and with fine fixed steps: sizes by a tolerance, and fixed ones."""
    own, labels = model.config.integration, torch.cat([part.labels for part in parts])
    starts = [model.stem(part.pixel_values) for part in parts]

    def fixed(steps: int) -> Tensor:
        found = [model(part.pixel_values, steps=steps).argmax(-1) for part in parts]
        return torch.cat(found)

    wanted = {count: fixed(count) for count in sorted({own.steps, FINE})}
    print(f"evaluations, accuracy, % that differ from {' and '.join(map(str, wanted))} fixed steps")

    def show(name: str, answers: Tensor, used: float) -> None:
        differ = ", ".join(f"{100 * (answers != other).float().mean():.1f}" for other in wanted.values())
        print(f"{name:34} {used:5.2f} {100 * (answers == labels).float().mean():5.1f}%  {differ}", flush=True)

    for count in (1, 2, 3, 4, 6, 8):
        show(f"fixed, {count}", fixed(count), count)
    for name, way in (("estimate", by_estimate), ("Heun pair", by_heun_pair)):
        for steps in GRIDS:
            for tolerance in TOLERANCES:
                pairs = [way(model, start, steps, tolerance, own.horizon) for start in starts]
                answers, used = (torch.cat(values) for values in zip(*pairs))
                show(f"{name}, grid of {steps}, tolerance {tolerance:g}", answers, float(used.mean()))


def halting(model: ODEViT, images: Images, parts: list[Batch]) -> None:
    """Mean steps of rules and of learned heads, thresholds from one quarter of the images, applied to another."""
    recording = record(model, images, parts)
    with torch.no_grad():
        states = torch.cat(
            [torch.stack([p.state[:, 0] for p in model.trajectory(model.stem(b.pixel_values))], 1) for b in parts]
        )
    answers, travel = recording.answers, recording.mean_travel()
    count, steps = answers.shape
    scores = {name: recording.scores(rule, travel) for name, rule in RULES.items() if rule.exports}
    final = torch.from_numpy(answers == answers[:, -1:]).float()
    when = torch.eye(steps).expand(count, steps, steps)
    numbers = torch.stack([torch.from_numpy(score.clip(-1e3, 1e3)).float() for score in scores.values()], -1)
    inputs = {
        "head on the numbers": torch.cat([numbers, when], -1),
        "head on CLS": torch.cat([states, when], -1),
        "head on CLS and the numbers": torch.cat([states, numbers, when], -1),
    }
    half, quarter = count // 2, 3 * count // 4
    scores |= {name: _fit(values, final, half) for name, values in inputs.items()}
    print(f"mean steps of {steps} (differ), thresholds from {quarter - half} images, applied to {count - quarter}")
    for name, values in scores.items():
        cells = []
        for level in (0.01, 0.02, 0.05):
            chosen = _lowest(answers[half:quarter], values[half:quarter], level)
            ends = _ends(values[quarter:], chosen)
            early = answers[quarter:][np.arange(count - quarter), ends]
            cells.append(f"{ends.mean() + 1:.2f} ({100 * (early != answers[quarter:, -1]).mean():.1f}%)")
        print(f"{name:30} {'   '.join(cells)}", flush=True)


def _fit(inputs: Tensor, final: Tensor, half: int) -> np.ndarray:
    """The score of a head with 64 hidden units on every image and step, fitted on the first `half` of the images."""
    torch.manual_seed(0)
    flat = inputs[:half, :-1].flatten(0, 1)
    mean, spread = flat.mean(0), flat.std(0).clamp_min(1e-6)
    head = torch.nn.Sequential(
        torch.nn.Linear(inputs.shape[-1], 64), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(head.parameters(), 1e-3, weight_decay=0.05)
    x, y = (flat - mean) / spread, final[:half, :-1].flatten()
    for _ in range(600):
        rows = torch.randint(len(x), (512,))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(x[rows])[:, 0], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return head.eval()((inputs - mean) / spread)[..., 0].numpy()  # type: ignore[no-any-return]


def _ends(scores: np.ndarray, threshold: float) -> np.ndarray:
    ends = scores >= threshold
    ends[:, -1] = True
    return ends.argmax(1)  # type: ignore[no-any-return]


def _lowest(answers: np.ndarray, scores: np.ndarray, level: float) -> float:
    chosen = np.inf
    for threshold in np.unique(scores[:, :-1])[::-1]:
        early = answers[np.arange(len(answers)), _ends(scores, threshold)]
        if (early != answers[:, -1]).mean() > level:
            break
        chosen = float(threshold)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--limit", type=int, default=400)
    for name in ("--solvers", "--sizes", "--halting"):
        parser.add_argument(name, action="store_true")
    arguments = parser.parse_args()
    for source in arguments.bundles:
        model = ODEViT.from_pretrained(source).requires_grad_(False)
        images = pick(arguments.data, "validation", model.config.division).sample(arguments.limit, 0)
        parts = list(loader(PictureDataset(images, model.config.preprocessing), 50, workers=0))
        if arguments.sizes or arguments.halting:
            if arguments.sizes:
                sizes(model, parts)
            if arguments.halting:
                halting(model, images, parts)
            continue
        right, evaluations, differs, rule = exits(model, images, parts)
        print(
            f"{source}: accuracy {right:.1%}, {evaluations:.2f} evaluations at 1% ({differs:.1%} differ, {rule})",
            flush=True,
        )
        if arguments.solvers:
            solvers(model, parts)
            settled(source, parts)


if __name__ == "__main__":
    main()
