"""The training loop, for students and teachers alike: optimisers, checkpoints, metrics, resuming.

`fit` runs an `Objective`: a module whose forward gives the named loss terms of a batch. All that it remembers is in one
checkpoint, and every random choice is a function of (seed, epoch, step), so a killed run goes on as if never stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..errors import UserError
from ..files import atomic
from .batches import Batch, PictureDataset, Unreadable, loader, set_epoch
from .muon import Muon
from .progress import Say, bar, clock


class Objective(nn.Module):
    """A network and how it is judged. `forward(batch)` gives each loss term; `net` is what is trained and kept."""

    net: nn.Module
    weights: dict[str, float]

    def prepare(self, batch: Batch, view: int, step: int) -> tuple[Any, ...]:
        """Arguments of `forward` for this batch; runs without gradients (a teacher answers here)."""
        return (batch.pixel_values, batch.labels)

    def matrices(self) -> list[nn.Parameter]:
        """Parameters for Muon."""
        return []

    def watch(self) -> dict[str, float]:
        """Numbers to log once an epoch beside the losses."""
        return {}


@dataclass(frozen=True)
class Plan:
    """How an objective is optimised."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float = 0.05
    schedule: str = "onecycle"
    optimizer: str = "adamw"
    muon_lr: float = 2e-3
    warmup: float = 0.1
    restarts: int = 10
    clip: float = 1.0
    ema: float = 0.0
    seed: int = 0
    save_seconds: float = 120.0
    workers: int = -1
    compile: bool = False
    stop_after: int = 0  # epochs; 0: all


@dataclass
class Progress:
    """Where a run stands; all of it goes into the checkpoint."""

    epoch: int = 0
    batch: int = 0  # batches done in this epoch
    step: int = 0  # batches done in all
    best: float = -math.inf
    lines: int = 0  # of metrics.jsonl that belong to this state
    sums: dict[str, float] = field(default_factory=dict)  # of the loss terms in this epoch
    below_bound: int = 0  # epochs in a row with the losses below the bound
    seconds: float = 0.0  # of training so far


Watch = Callable[[Progress], None]


def accelerator(mixed_precision: str = "no") -> Accelerator:
    """One batch is split over the processes, so that a run means the same on one as on many.

    A batch need not reach every parameter: gradients may end before the stem, and few steps meet few teacher layers.
    """
    return Accelerator(
        mixed_precision=mixed_precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=True),
    )


def optimizers(objective: Objective, plan: Plan) -> list[torch.optim.Optimizer]:
    trainable = [p for p in objective.net.parameters() if p.requires_grad and p.numel()]
    if plan.optimizer == "adamw":
        return [torch.optim.AdamW(trainable, plan.lr, weight_decay=plan.weight_decay)]
    matrices = [p for p in objective.matrices() if p.requires_grad]
    chosen = {id(p) for p in matrices}
    rest = [p for p in trainable if id(p) not in chosen]
    muon = Muon(matrices, plan.muon_lr, plan.weight_decay)
    return [muon, torch.optim.AdamW(rest, plan.lr, weight_decay=plan.weight_decay)]


def scheduler(optimizer: torch.optim.Optimizer, plan: Plan, total: int) -> torch.optim.lr_scheduler.LRScheduler:
    from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

    warmup = int(plan.warmup * total)
    if plan.schedule == "cosine-restarts":
        return get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, warmup, total, plan.restarts)
    if plan.schedule == "onecycle":
        rates = [group["lr"] for group in optimizer.param_groups]
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rates, total_steps=total, pct_start=plan.warmup, cycle_momentum=False
        )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup)))


class MetricsLog:
    """metrics.jsonl and TensorBoard, written by the main process only."""

    def __init__(self, folder: Path, keep: int, active: bool):
        self.path, self.active, self.lines = folder / "metrics.jsonl", active, keep
        if not active:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        old = self.path.read_text().splitlines(keepends=True)[:keep] if keep and self.path.exists() else []
        with atomic(self.path) as scratch:
            scratch.write_text("".join(old))
        self.lines = len(old)
        self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.lines += 1
        if not self.active:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if isinstance(value, int | float):
                self.board.add_scalar(name, value, step)


def fit(
    machine: Accelerator,
    objective: Objective,
    pictures: PictureDataset,
    plan: Plan,
    folder: Path,
    validate: Callable[[nn.Module], dict[str, float]],
    keep: Callable[[nn.Module, dict[str, float]], None],
    score: str,
    say: Say,
    finished: Callable[[Progress, dict[str, float]], bool] = lambda progress, values: False,
    best: float = -math.inf,
    watch: Watch | None = None,
) -> Progress:
    """Train to the end of the plan, from the last checkpoint in `folder` if there is one.

    `validate` measures a network, `keep` stores the one with the best `score` above `best`; `finished` may end the run
    early; `watch` is told after each batch where the run stands, in place of a bar for each epoch.
    """
    data: Any = loader(pictures, plan.batch_size, plan.seed, shuffle=True, workers=plan.workers)
    per_epoch = len(data)
    objective.to(machine.device)  # first: the average and what a checkpoint holds are made where the weights are
    steppers = optimizers(objective, plan)
    rates = [scheduler(o, plan, plan.epochs * per_epoch) for o in steppers]
    average = AveragedModel(objective.net, multi_avg_fn=_ema(plan.ema), use_buffers=True) if plan.ema else None
    state = Progress(best=best)
    checkpoint = folder / "last.pt"
    if checkpoint.exists():
        state = _restore(checkpoint, objective.net, average, steppers, rates)
        say(f"resuming at epoch {state.epoch + 1}, batch {state.batch + 1} of {per_epoch}")
    wrapped, data, *prepared = machine.prepare(objective, data, *steppers)
    forward = torch.compile(wrapped) if plan.compile else wrapped
    metrics = MetricsLog(folder, state.lines, machine.is_main_process)
    unreadable = Unreadable(len(pictures), say)
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        state.lines = metrics.lines
        if machine.is_main_process:
            _save(checkpoint, state, objective.net, average, steppers, rates)
        saved = time.monotonic()

    if not checkpoint.exists():
        machine.wait_for_everyone()  # all have looked whether there is one
        save()  # before anything is kept: what is kept without a checkpoint beside it counts as finished
    while state.epoch < (plan.stop_after or plan.epochs):
        objective.train()
        set_epoch(data, pictures, state.epoch)
        batches = machine.skip_first_batches(data, state.batch) if state.batch else data
        with nullcontext(watch) if watch else _bar(say, machine.is_main_process, state, plan, per_epoch) as tick:
            begun = time.monotonic()
            for batch in batches:
                unreadable.add(batch.unreadable)
                with torch.no_grad():
                    arguments = objective.prepare(batch, pictures.view, state.step)
                terms = forward(*arguments)
                loss = _weigh(terms, objective.weights, state)
                machine.backward(loss)
                if plan.clip:
                    machine.clip_grad_norm_(objective.net.parameters(), plan.clip)
                for optimizer, rate in zip(prepared, rates):
                    optimizer.step()
                    optimizer.zero_grad()
                    rate.step()
                if average:
                    average.update_parameters(objective.net)
                state.batch += 1
                state.step += 1
                for name, value in {"loss": loss, **terms}.items():
                    state.sums[name] = state.sums.get(name, 0.0) + float(value.detach())
                tick(state)
                if state.step % 50 == 0:
                    metrics.write(state.step, {f"batch/{k}": float(v.detach()) for k, v in terms.items()})
                now = time.monotonic()
                state.seconds, begun = state.seconds + now - begun, now
                if now - saved > plan.save_seconds:
                    save()
        values = {name: total / max(1, state.batch) for name, total in state.sums.items()}
        net = average.module if average else objective.net
        values |= {**validate(net), **objective.watch()}
        values |= {"lr": float(rates[0].get_last_lr()[0]), "seconds": state.seconds}
        state.epoch, state.batch, state.sums = state.epoch + 1, 0, {}
        metrics.write(state.step, {"epoch": state.epoch, **values})
        say(f"epoch {state.epoch}/{plan.epochs}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
        if values[score] > state.best:
            state.best = values[score]
            if machine.is_main_process:
                keep(net, values)
        end = finished(state, values)
        save()
        if end:
            break
    machine.wait_for_everyone()
    return state


def _ema(decay: float) -> Callable[[Any, Any, Any], None]:
    """Exponential average whose memory grows to `decay`, so that the first weights do not linger in a short run."""

    def update(averaged: Any, current: Any, count: Any) -> None:
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(averaged, current, 1 - min(decay, (1 + float(count)) / (10 + float(count))))
        else:  # counters among the buffers
            torch._foreach_copy_(averaged, current)

    return update


def _weigh(terms: dict[str, Tensor], weights: dict[str, float], state: Progress) -> Tensor:
    for name, value in terms.items():
        if not torch.isfinite(value):
            raise UserError(
                f"the {name} loss became {float(value.detach())} at step {state.step + 1}; "
                "the last good checkpoint is kept: resume it with a lower learning rate"
            )
    return torch.stack([weights[name] * value for name, value in terms.items()]).sum()


PLACE = ("last_epoch", "_step_count", "_last_lr")  # of a schedule: its length is the recipe's, which may have grown


def _save(path: Path, state: Progress, net: nn.Module, average: Any, steppers: list[Any], rates: list[Any]) -> None:
    contents = {
        "progress": vars(state),
        "net": net.state_dict(),
        "average": average.state_dict() if average else {},
        "optimizers": [o.state_dict() for o in steppers],
        "schedules": [{k: r.state_dict()[k] for k in PLACE} for r in rates],
    }
    with atomic(path) as scratch:
        torch.save(contents, scratch)


def _restore(path: Path, net: nn.Module, average: Any, steppers: list[Any], rates: list[Any]) -> Progress:
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        net.load_state_dict(contents["net"])
        if average:
            average.load_state_dict(contents["average"])
        for stepper, source in zip(steppers, contents["optimizers"]):
            asked = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in stepper.param_groups]
            stepper.load_state_dict(source)
            for group, settings in zip(stepper.param_groups, asked):
                group.update(settings)  # rates and decay are the recipe's, too
        for rate, source in zip(rates, contents["schedules"]):
            rate.load_state_dict({**rate.state_dict(), **{k: source[k] for k in PLACE}})
        return Progress(**contents["progress"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, EOFError) as error:
        raise UserError(f"{path} cannot be resumed from ({str(error).splitlines()[0]})") from None


@contextmanager
def _bar(say: Say, active: bool, state: Progress, plan: Plan, per_epoch: int) -> Iterator[Watch]:
    """A bar for each epoch, with loss, speed and time left."""
    begun, first, total = time.monotonic(), state.step, plan.epochs * per_epoch
    with bar(say, f"epoch {state.epoch + 1}/{plan.epochs}", per_epoch, state.batch, active) as show:

        def tell(now: Progress) -> None:
            pace = (now.step - first) / max(1e-9, time.monotonic() - begun)
            left = clock((total - now.step) / max(1e-9, pace))
            loss = now.sums["loss"] / now.batch
            show(now.batch, f"loss {loss:.4f}, {pace * plan.batch_size:.0f} images/s, {left} left")

        yield tell
