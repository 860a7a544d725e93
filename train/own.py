"""`odevit-serve train PHOTOS`: from a folder of photographs to a bundle that can be served, in minutes.

The head is fitted first, on the frozen features of the bundle it starts from: the baseline. Then all of it is trained
at a low rate, for as long as there is time and it helps. What is best on the photographs set aside is kept, the
baseline included, and made a bundle: graphs, calibration, card. A baseline that stays the best is fitted once more, on
the photographs that chose it, too: nothing is left for them to choose.

run/
  config.json, model.safetensors, *.onnx, README.md    the bundle: `serve`, `demo` and all other commands take `run`
  training/run.json    what was asked for, and the baseline; with it, `--resume` goes on
  training/best/       the best weights so far
  training/baseline/   the baseline, fitted on the photographs that choose, too
  training/last.pt, metrics.jsonl, tensorboard/    as in other runs
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from .. import __version__, bundle
from ..config import Config, Division
from ..data.datasets import Images
from ..errors import UsageError, UserError
from ..files import atomic
from ..schema import build
from .batches import PictureDataset, loader
from .checkpoint import Progress
from .features import balanced, class_mean, encoder, features, fit_head, refit
from .finish import Finished, finish
from .loop import Plan, accelerator, fit
from .model import ODEViT
from .objective import Distillation
from .photographs import Part, largest_share, look_through, open_parts
from .progress import Say, bar, clock, counted
from .recipe import Training
from .warm_start import start_from

VALIDATION, CALIBRATION = 0.15, 0.15  # parts of the photographs that choose the model, and that calibrate it
WORK = "training"
RESERVE = 20.0  # seconds kept for what comes after fine-tuning, beside the time of the photographs
LEAST = 10.0  # seconds of fine-tuning that are worth a beginning
ROUNDS = 12  # times at least that the model is judged, where there is time for less than so many passes
PASSES = 120  # over the photographs, at most
PATIENCE = 0.7  # part of the plan without a better model after which it ends
SIZE = (
    96  # side of the pictures, starting from the bundled model of 64 px: a point more of accuracy where there are few
)
LOSSES = {"cross_entropy": 1.0, "intermediate": 0.5}  # answers on the way are trained, too: early exit needs them


@dataclass(frozen=True)
class Wanted:
    """What the command asks for."""

    data: str
    start: str = ""  # a bundle; empty: the bundled one
    minutes: float = 5.0  # from the command to the finished bundle
    epochs: int | None = None  # passes over the photographs, in place of minutes; 0: the head alone
    size: int = 0  # side of the pictures in pixels; 0: SIZE for the bundled model, else that of the bundle
    batch_size: int = 32
    lr: float = 2e-4
    seed: int = 0
    epsilon: float = 0.01
    delta: float = 0.05


@dataclass
class OwnRun:
    """A run under way: where it takes place, what it has, and when it has to end."""

    wanted: Wanted
    folder: Path
    parts: dict[str, Part]
    student: ODEViT
    machine: Accelerator
    say: Say
    begun: float
    until: float
    baseline: float = 0.0  # accuracy of the fitted head on the photographs that choose
    epochs: int = 0  # planned, each of
    draws: int = 0  # so many photographs

    @property
    def work(self) -> Path:
        return self.folder / WORK

    def left(self) -> float:
        """Seconds for fine-tuning: all but what making the bundle will take, on a machine that may be busy."""
        busy = max(1.0, (time.monotonic() - self.begun) / max(1.0, time.process_time()))
        return self.until - time.monotonic() - RESERVE * min(busy, 5.0)

    def write(self) -> None:
        facts = {"wanted": vars(self.wanted), "baseline": self.baseline, "epochs": self.epochs, "draws": self.draws}
        with atomic(self.work / "run.json") as path:
            path.write_text(json.dumps(facts, indent=2) + "\n")


def read_run(folder: Path) -> dict[str, Any] | None:
    """What is known of the run in a folder; None where there is none of this kind."""
    path = folder / WORK / "run.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        build(Wanted, facts["wanted"], "wanted")
        return facts
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{path} cannot be resumed from ({error})") from None


def train(
    wanted: Wanted, folder: Path, make_graphs: Callable[[Path], object], say: Say, begun: float, resumed: bool = False
) -> Finished:
    """Begin or resume a run in `folder`; `begun` is when its time began. `make_graphs` adds the graphs to a bundle."""
    machine = accelerator()
    if machine.num_processes > 1:
        raise UsageError("training on your own pictures runs in one process: start it without a launcher")
    start = resized(ODEViT.from_pretrained(wanted.start or None), wanted.size or (0 if wanted.start else SIZE))
    named, division = open_parts(wanted.data, Division(VALIDATION, CALIBRATION, wanted.seed), say)
    parts = look_through(named, start.config.preprocessing, say)
    say(
        f"{len(parts['train']):,} to learn from, {len(parts['validation']):,} to choose the model by, "
        f"{len(parts['calibration']):,} to calibrate and measure it (seed {wanted.seed})"
    )
    torch.manual_seed(wanted.seed)
    student = adapted(start, named["train"], division, wanted, folder.resolve().name)
    job = OwnRun(wanted, folder, parts, student, machine, say, begun, begun + 60 * wanted.minutes)
    facts = read_run(folder) if resumed else None
    if facts and (job.work / "best" / bundle.WEIGHTS).is_file():
        job.baseline, job.epochs, job.draws = facts["baseline"], facts["epochs"], facts["draws"]
        job.student = ODEViT.from_pretrained(job.work / "best")
        if job.student.config.labels != student.config.labels:
            raise UserError(f"the classes of {wanted.data} are not those of the run in {folder}: begin a new one")
    else:
        fit_baseline(job, start.config.name)
    interrupted = False
    try:
        fine_tune(job)
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: the best so far becomes the bundle (interrupt again to stop at once)")
    best = chosen(job.work, say)
    made = finish(best, job.folder, job.work, parts, make_graphs, wanted.epsilon, wanted.delta, say)
    return dataclasses.replace(made, interrupted=interrupted)


def resized(start: ODEViT, side: int) -> ODEViT:
    """The model for pictures of another size; 0: as it is."""
    own = start.config
    if not side or side == own.architecture.image_size:
        return start
    if side < 0 or side % own.architecture.patch_size:
        raise UsageError(f"--size must be a multiple of {own.architecture.patch_size} pixels, a patch, not {side}")
    student = ODEViT(
        own.replace(
            architecture=dataclasses.replace(own.architecture, image_size=side),
            preprocessing=dataclasses.replace(own.preprocessing, input_size=(own.architecture.channels, side, side)),
        )
    )
    start_from(student, start)
    return student.eval()


def chosen(work: Path, say: Say) -> ODEViT:
    """The best model; where that is the baseline, the one that was fitted on more photographs."""
    best, baseline = ODEViT.from_pretrained(work / "best"), work / "baseline"
    if (baseline / bundle.CONFIG).is_file() and bundle.read_config(baseline).metrics == best.config.metrics:
        say("fine-tuning found nothing better: the head is fitted again, also on the photographs that chose it")
        return ODEViT.from_pretrained(baseline)
    return best


def adapted(start: ODEViT, images: Images, division: Division, wanted: Wanted, name: str) -> ODEViT:
    """The model it starts from with a head for other classes, which is still to be fitted."""
    own = start.config
    shape = dataclasses.replace(own.architecture, classes=len(images.classes))
    asked = dataclasses.replace(wanted, data=Path(wanted.data).name, start=Path(wanted.start).name)  # no local paths
    provenance = {
        "version": __version__,
        "torch": torch.__version__,
        "own": vars(asked),
        "started_from": own.name,
        "note": f"Trained by `odevit-serve train` on somebody's own photographs, starting from `{own.name}`.",
    }
    config = Config(
        shape, own.integration, own.preprocessing, images.classes, division=division, name=name,
        license=own.license, provenance=provenance,
    )  # fmt: skip
    student = ODEViT(config)
    state = {key: value for key, value in start.state_dict().items() if not key.startswith("head.")}
    student.load_state_dict(state, strict=False)
    return student


def fit_baseline(job: OwnRun, name: str) -> None:
    """The head by logistic regression on frozen features; kept as the best so far."""
    learn, judge, spec = job.parts["train"], job.parts["validation"], job.student.config.preprocessing
    device, own = job.machine.device, job.student.to(job.machine.device).eval()
    encode = encoder(own)
    with counted(job.say, "features", 2 * (len(learn) + len(judge))) as advance:

        def seen(pixels: torch.Tensor) -> torch.Tensor:
            found = encode(pixels.to(device))
            advance(len(pixels))
            return found

        def both(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
            """Of the photographs, and of their mirror images."""
            mirrored = (pixels.flip(-1) for pixels in part.batches(spec))
            return features(seen, part.batches(spec)), features(seen, mirrored)

        known, judged = both(learn), both(judge)
    labels = np.tile(learn.labels, 2)
    head = fit_head(torch.cat(known), labels, judged[0], judge.labels, own.config.architecture.classes)
    head.copy_to(own.head)
    values = judged_by(job)(own)
    job.baseline = values["accuracy"]
    job.work.mkdir(parents=True, exist_ok=True)
    job.write()
    keep(own, job.work / "best", values)
    whole = refit(head, torch.cat([*known, *judged]), np.concatenate([labels, np.tile(judge.labels, 2)]))
    weights = copy.deepcopy(own)
    whole.copy_to(weights.head)
    keep(weights, job.work / "baseline", values)
    job.say(
        f"baseline, the head alone on the features of {name}: {job.baseline:.1%} of the photographs that choose "
        f"(the largest class alone: {largest_share(judge.labels):.1%})"
    )


def judged_by(job: OwnRun) -> Callable[[nn.Module], dict[str, float]]:
    """What measures a model on the photographs that choose."""
    part = job.parts["validation"]
    labels = torch.from_numpy(part.labels)

    @torch.no_grad()
    def judge(net: nn.Module) -> dict[str, float]:
        was_training = net.training
        net.eval()
        batches = part.batches(job.student.config.preprocessing)
        logits = torch.cat([net(pixels.to(job.machine.device)).float().cpu() for pixels in batches])
        net.train(was_training)
        answers = logits.argmax(1).numpy()
        loss = float(F.cross_entropy(logits, labels))
        score = class_mean(answers, part.labels) - 1e-3 * min(loss, 10.0)  # among equals, the surer one
        return {"accuracy": float((answers == part.labels).mean()), "val_loss": loss, "score": score}

    return judge


def keep(net: nn.Module, folder: Path, values: dict[str, float]) -> None:
    assert isinstance(net, ODEViT)
    metrics = {"validation_accuracy": round(values["accuracy"], 5), "score": values["score"]}
    net.config = net.config.replace(metrics=metrics)
    net.save_pretrained(folder)


def fine_tune(job: OwnRun) -> None:
    """Train all of the student at a low rate, with views of the photographs and any number of steps."""
    wanted, learn, student = job.wanted, job.parts["train"], job.student
    settings = Training(batch_size=wanted.batch_size, lr=wanted.lr, seed=wanted.seed)
    pictures = PictureDataset(learn.small, student.config.preprocessing, "photo", wanted.seed)
    pictures.weights = balanced(learn.labels, student.config.architecture.classes)
    objective = Distillation(student.to(job.machine.device), settings, LOSSES)
    judge = judged_by(job)
    before = _checkpoint(job.work / "last.pt")
    if not plan(job, objective, pictures, judge, before):
        return
    pictures.draws = job.draws
    job.write()
    best = student.config.metrics["score"]
    shown = {"accuracy": student.config.metrics["validation_accuracy"]}
    begun, spent = time.monotonic(), before.seconds if before else 0.0
    per_epoch = max(1, job.draws // wanted.batch_size)
    found_at = before.epoch if before else 0

    def better(net: nn.Module, values: dict[str, float]) -> None:
        keep(net, job.work / "best", values)
        if values["accuracy"] > shown["accuracy"]:
            job.say(f"fine-tuning, {clock(spent + time.monotonic() - begun)}: {values['accuracy']:.1%}")
        shown["accuracy"] = values["accuracy"]

    def finished(state: Progress, values: dict[str, float]) -> bool:
        nonlocal found_at
        found_at = state.epoch if values["score"] >= state.best else found_at
        if state.epoch - found_at > max(ROUNDS, PATIENCE * job.epochs):
            job.say("fine-tuning no longer helps")
            return True
        return wanted.epochs is None and job.left() < 0

    with bar(job.say, "fine-tuning", job.epochs * per_epoch) as show:

        def watch(state: Progress) -> None:
            done = state.step / (job.epochs * per_epoch)
            left = job.left() if wanted.epochs is None else state.seconds * (1 / max(done, 1e-9) - 1)
            show(state.step, f"{shown['accuracy']:.1%} so far (baseline {job.baseline:.1%}), {clock(left)} left")

        settled = Plan(job.epochs, wanted.batch_size, wanted.lr, ema=0.99, seed=wanted.seed, save_seconds=20.0)
        try:
            fit(
                job.machine, objective, pictures, settled, job.work, judge, better, "score", _silent, finished, best,
                watch,
            )  # fmt: skip
        except UserError as error:  # a loss that is not finite: what was best before still is
            job.say(f"fine-tuning ended: {error}")


def plan(
    job: OwnRun,
    objective: Distillation,
    pictures: PictureDataset,
    judge: Callable[[nn.Module], dict[str, float]],
    before: Progress | None,
) -> bool:
    """Set how many epochs of how many photographs there is time for; False: none, which is said."""
    wanted, whole = job.wanted, max(1, len(pictures) // job.wanted.batch_size)
    if wanted.epochs is not None:
        job.epochs, job.draws = wanted.epochs, whole * wanted.batch_size
        return (before.epoch if before else 0) < job.epochs
    done = before.epoch if before else 0
    if job.left() < LEAST:
        job.say("no time is left for fine-tuning: give more with --minutes")
        return False
    a_batch, a_judgement = _paces(job, objective, pictures, judge)
    fits = job.left() / a_batch
    if not job.draws:
        job.draws = max(1, min(whole, int(fits / ROUNDS))) * wanted.batch_size
    per_epoch = job.draws // wanted.batch_size
    most = max(1, PASSES * whole // per_epoch)
    count = min(most, int(job.left() / (per_epoch * a_batch + a_judgement)))
    if count < 1:
        job.say("no time is left for fine-tuning: give more with --minutes")
        return False
    job.epochs = done + count
    return True


def _paces(
    job: OwnRun, objective: Distillation, pictures: PictureDataset, judge: Callable[[nn.Module], dict[str, float]]
) -> tuple[float, float]:
    """Seconds of a batch, at every number of steps once, and of a judgement. No weight is changed."""
    pictures.draws = job.wanted.batch_size * job.student.config.integration.steps
    own, times = job.student.config.integration.steps, []
    for number, batch in enumerate(loader(pictures, job.wanted.batch_size, job.wanted.seed, shuffle=True, workers=0)):
        begun = time.monotonic()
        pixels, labels = batch.pixel_values.to(job.machine.device), batch.labels.to(job.machine.device)
        steps, horizon = number % own + 1, job.student.config.integration.horizon
        sum(objective(pixels, labels, None, {}, steps, horizon).values()).backward()  # type: ignore[union-attr]
        times.append(time.monotonic() - begun)
    objective.zero_grad()
    begun = time.monotonic()
    judge(job.student)
    views = time.monotonic()
    for row in range(min(len(pictures), job.wanted.batch_size)):
        pictures[row]
    augmenting = (time.monotonic() - views) / min(len(pictures), job.wanted.batch_size) * job.wanted.batch_size
    return sum(times) / len(times) + augmenting, views - begun


def _checkpoint(path: Path) -> Progress | None:
    if not path.exists():
        return None
    try:
        return Progress(**torch.load(path, map_location="cpu", weights_only=True)["progress"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, EOFError) as error:
        raise UserError(f"{path} cannot be resumed from ({str(error).splitlines()[0]})") from None


def _silent(text: str) -> None:
    pass
