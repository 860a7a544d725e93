"""What is trained: a student along its trajectory, or a teacher on labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import Batch
from .gradients import GRADIENTS
from .loop import Objective
from .losses import LOSSES, NEEDS_PATCHES, NEEDS_STATES, NEEDS_VELOCITIES, Rollout, Target, error_bound
from .model import ODEViT
from .recipe import Training
from .teacher import Teacher, TeacherCache, WholePictures, on_grid


class Distillation(Objective):
    """The student's losses for a batch. Without a teacher it is training from scratch."""

    def __init__(
        self,
        student: ODEViT,
        settings: Training,
        weights: dict[str, float],
        teacher: Teacher | None = None,
        times: Mapping[int, float] | None = None,
        cache: TeacherCache | None = None,
        whole: WholePictures | None = None,
    ):
        """`times` says by when each teacher layer should be reached; `whole` asks about rows of the data, where the
        teacher does not see the batch itself.
        """
        super().__init__()
        self.net, self.settings = student, settings
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.outside: dict[str, Any] = {"teacher": teacher}  # not a submodule: it is neither trained nor saved
        self.times, self.cache, self.whole = times or {}, cache, whole

    @property
    def student(self) -> ODEViT:
        assert isinstance(self.net, ODEViT)
        return self.net

    def matrices(self) -> list[nn.Parameter]:
        stem = self.student.patch.parameters() if self.settings.muon_stem else ()
        return [p for p in self.student.psi.parameters() if p.dim() == 2] + [p for p in stem if p.dim() == 4]

    def watch(self) -> dict[str, float]:
        settings = self.settings
        steps = self.student.config.integration.steps
        return {"bound": error_bound(self.student.psi, steps, settings.bound_radius, settings.bound_lipschitz)}

    def prepare(self, batch: Batch, view: int, step: int) -> tuple[Any, ...]:
        steps, horizon, reached = self.depth(step)
        plan = on_grid(self.times, reached) if self.times else {}
        layers, pixels, labels, target = sorted(self.times), batch.pixel_values, batch.labels, None
        live = self.cache is None
        if self.outside["teacher"] and not live:
            target = self.teach(batch, view, layers)
        if self.settings.mixup:
            pixels, labels, target = self.mix(pixels, labels, target, step)
        if self.outside["teacher"] and live:  # it sees what the student sees: what it says of a mixture is no mixture
            target = self.teach(batch._replace(pixel_values=pixels), view, layers)
        return pixels, labels, target, plan, steps, horizon, self.solver(step)

    def mix(
        self, pixels: Tensor, labels: Tensor, target: Target | None, step: int
    ) -> tuple[Tensor, Tensor, Target | None]:
        """Every image with another of its batch, in shares drawn for it; remembered answers are mixed alike."""
        random = np.random.default_rng((self.settings.seed, 11, step))
        drawn = random.beta(self.settings.mixup, self.settings.mixup, len(pixels))
        share = torch.from_numpy(drawn).to(pixels)

        def mixed(x: Tensor) -> Tensor:
            return torch.lerp(x.flip(0), x, share.view(-1, *[1] * (x.dim() - 1)))

        classes = self.student.config.architecture.classes
        shares = F.one_hot(labels.clamp_min(0), classes) * (labels >= 0).unsqueeze(1)
        if target is not None:
            temperature = self.settings.distillation_temperature
            answer = mixed((target.logits / temperature).softmax(-1))
            logits = answer.clamp_min(torch.finfo(answer.dtype).tiny).log() * temperature
            target = Target({layer: mixed(x) for layer, x in target.cls.items()}, logits)
        return mixed(pixels), mixed(shares.to(pixels)), target

    def depth(self, step: int) -> tuple[int, float, int]:
        """Steps and horizon of this batch, and the step by which the teacher's last state should be reached.

        The number of steps over the model's own horizon is drawn anew for each batch; of those, up to the part
        `beyond` is added at the same step size.
        """
        own, settings = self.student.config.integration, self.settings
        random = np.random.default_rng((settings.seed, 7, step))
        reached = int(random.choice(settings.steps or np.arange(1, own.steps + 1)))
        steps = reached + int(random.integers(0, math.floor(settings.beyond * reached) + 1))
        return steps, own.horizon * steps / reached, reached

    def solver(self, step: int) -> str:
        """Of this batch: drawn, so that the field is one that all of them can follow."""
        random = np.random.default_rng((self.settings.seed, 13, step))
        return str(random.choice(self.settings.solvers or [self.student.config.integration.solver]))

    def teach(self, batch: Batch, view: int, layers: list[int]) -> Target:
        teacher: Teacher = self.outside["teacher"]
        if NEEDS_PATCHES & self.weights.keys():
            states = teacher.states(batch.pixel_values)
            return Target(
                {layer: states[layer][:, 0] for layer in layers},
                teacher.answer(states[-1][:, 0]),
                {layer: states[layer][:, 1:] for layer in layers},
            )

        def compute() -> tuple[Tensor, Tensor]:
            pixels, half = batch.pixel_values, self.settings.mixed_precision == "bf16"
            with torch.autocast(pixels.device.type, torch.bfloat16) if half else nullcontext():
                return self.whole(batch.rows, pixels.device) if self.whole else teacher.at(pixels, layers)

        if self.cache is None:
            cls, logits = compute()
        else:
            cls, logits = self.cache.answer(batch.rows, 0 if self.whole else view, compute)
        return Target(dict(zip(layers, cls.unbind(1))), logits)

    def forward(
        self,
        pixels: Tensor,
        labels: Tensor,
        target: Target | None,
        plan: dict[int, int],
        steps: int,
        horizon: float,
        solver: str | None = None,
    ) -> dict[str, Tensor]:
        advance = GRADIENTS[self.settings.gradient](list(self.student.psi.parameters()), steps, self.settings)
        cls, states, velocities = [], [], []
        for point in self.student.trajectory(self.student.stem(pixels), steps, horizon, solver, advance=advance):
            cls.append(point.state[:, 0].clone())  # a view would keep the whole state
            if NEEDS_STATES & self.weights.keys():
                states.append(point.state)
            if NEEDS_VELOCITIES & self.weights.keys():
                velocities.append(point.velocity)
        rollout = Rollout(self.student, self.settings, cls, states, velocities, horizon / steps, labels, target, plan)
        return {name: LOSSES[name](rollout) for name in self.weights}


class FineTuning(Objective):
    """A teacher on labelled images, all of it."""

    def __init__(self, teacher: Teacher, label_smoothing: float):
        super().__init__()
        self.net, self.label_smoothing, self.weights = teacher, label_smoothing, {"cross_entropy": 1.0}

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"cross_entropy": F.cross_entropy(self.net(pixels), labels, label_smoothing=self.label_smoothing)}
