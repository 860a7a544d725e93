"""The training loop, for students and teachers alike: optimisers, checkpoints, metrics, resuming.

`fit` runs an `Objective`: a module whose forward gives the named loss terms of a batch. All that it remembers is in one
checkpoint, and every random choice is a function of (seed, epoch, step), so a killed run goes on as if never stopped.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..errors import UserError
from ..files import atomic
from . import checkpoint
from .batches import Batch, PictureDataset, Unreadable, loader, set_epoch
from .checkpoint import Progress
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


Watch = Callable[[Progress], None]


def accelerator(mixed_precision: str = "no") -> Accelerator:
    """One batch is split over the processes, so that a run means the same on one as on many.

    A batch need not reach every parameter: gradients may end before the stem, and few steps meet few teacher layers.
    """
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # of kernels in channels-last: no error
    return Accelerator(
        mixed_precision=mixed_precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=True),
    )


def optimizers(objective: Objective, plan: Plan, half: bool = False) -> list[torch.optim.Optimizer]:
    trainable = [p for p in objective.net.parameters() if p.requires_grad and p.numel()]
    if plan.optimizer == "adamw":
        return [torch.optim.AdamW(trainable, plan.lr, weight_decay=plan.weight_decay)]
    matrices = [p for p in objective.matrices() if p.requires_grad]
    chosen = {id(p) for p in matrices}
    rest = [p for p in trainable if id(p) not in chosen]
    muon = Muon(matrices, plan.muon_lr, plan.weight_decay, half=half)
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


class Fitting:
    """Everything of a run that changes, and how it is kept: networks, optimisers, schedules, average, progress."""

    def __init__(
        self,
        machine: Accelerator,
        objective: Objective,
        pictures: PictureDataset,
        plan: Plan,
        folder: Path,
        say: Say,
        best: float,
    ):
        self.machine, self.objective, self.pictures, self.plan, self.say = machine, objective, pictures, plan, say
        data: Any = loader(pictures, plan.batch_size, plan.seed, shuffle=True, workers=plan.workers)
        self.per_epoch = len(data)
        objective.to(machine.device)  # first: the average and what a checkpoint holds are made where the weights are
        self.steppers = optimizers(objective, plan, half=machine.mixed_precision == "bf16")
        self.rates = [scheduler(o, plan, plan.epochs * self.per_epoch) for o in self.steppers]
        self.average = AveragedModel(objective.net, multi_avg_fn=_ema(plan.ema), use_buffers=True) if plan.ema else None
        self.state, self.checkpoint = Progress(best=best), folder / "last.pt"
        resumed = self.checkpoint.exists()
        if resumed:
            self.state = checkpoint.restore(self.checkpoint, objective.net, self.average, self.steppers, self.rates)
            say(f"resuming at epoch {self.state.epoch + 1}, batch {self.state.batch + 1} of {self.per_epoch}")
        wrapped, self.data, *self.prepared = machine.prepare(objective, data, *self.steppers)
        self.forward = torch.compile(wrapped) if plan.compile else wrapped
        self.metrics = MetricsLog(folder, self.state.lines, machine.is_main_process)
        self.unreadable = Unreadable(len(pictures), say)
        if not resumed:
            machine.wait_for_everyone()  # all have looked whether there is one
            self.save()  # before anything is kept: what is kept without a checkpoint beside it counts as finished
        self.saved = time.monotonic()

    @property
    def net(self) -> nn.Module:
        """The network that is judged and kept."""
        return self.average.module if self.average else self.objective.net

    def save(self) -> None:
        self.state.lines = self.metrics.lines
        if self.machine.is_main_process:
            checkpoint.save(self.checkpoint, self.state, self.objective.net, self.average, self.steppers, self.rates)
        self.saved = time.monotonic()

    def epoch(self, watch: Watch | None) -> dict[str, float]:
        """Train to the end of this epoch; the mean of each loss over it."""
        state, active = self.state, self.machine.is_main_process
        self.objective.train()
        set_epoch(self.data, self.pictures, state.epoch)
        batches = self.machine.skip_first_batches(self.data, state.batch) if state.batch else self.data
        with nullcontext(watch) if watch else _bar(self.say, active, state, self.plan, self.per_epoch) as tick:
            begun = time.monotonic()
            for batch in batches:
                terms = self.step(batch)
                tick(state)
                if state.step % 50 == 0:
                    self.metrics.write(state.step, {f"batch/{k}": float(v.detach()) for k, v in terms.items()})
                now = time.monotonic()
                state.seconds, begun = state.seconds + now - begun, now
                if now - self.saved > self.plan.save_seconds:
                    self.save()
        return {name: total / max(1, state.batch) for name, total in state.sums.items()}

    def step(self, batch: Batch) -> dict[str, Tensor]:
        """One update of the weights; the terms of the loss."""
        state, plan = self.state, self.plan
        self.unreadable.add(batch.unreadable)
        with torch.no_grad():
            arguments = self.objective.prepare(batch, self.pictures.view, state.step)
        terms: dict[str, Tensor] = self.forward(*arguments)
        loss = _weigh(terms, self.objective.weights, state)
        self.machine.backward(loss)
        if plan.clip:
            self.machine.clip_grad_norm_(self.objective.net.parameters(), plan.clip)
        for optimizer, rate in zip(self.prepared, self.rates):
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        if self.average:
            self.average.update_parameters(self.objective.net)
        state.batch += 1
        state.step += 1
        for name, value in {"loss": loss, **terms}.items():
            state.sums[name] = state.sums.get(name, 0.0) + float(value.detach())
        return terms


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
    run = Fitting(machine, objective, pictures, plan, folder, say, best)
    state = run.state
    while state.epoch < (plan.stop_after or plan.epochs):
        values = run.epoch(watch)
        values |= {**validate(run.net), **objective.watch()}
        values |= {"lr": float(run.rates[0].get_last_lr()[0]), "seconds": state.seconds}
        state.epoch, state.batch, state.sums = state.epoch + 1, 0, {}
        run.metrics.write(state.step, {"epoch": state.epoch, **values})
        say(f"epoch {state.epoch}/{plan.epochs}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
        if values[score] > state.best:
            state.best = values[score]
            if machine.is_main_process:
                keep(run.net, values)
        end = finished(state, values)
        run.save()
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
