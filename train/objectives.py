"""What is trained: a student along its trajectory, or a teacher on labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .data import Batch
from .loop import Objective
from .losses import LOSSES, NEEDS_PATCHES, Scene, Target, error_bound
from .model import ODEViT
from .recipe import Training
from .solvers import advance
from .teacher import Memory, Teacher

Advance = Callable[..., tuple[Tensor, Tensor, list[Tensor]]]


class Distillation(Objective):
    """The student's losses for a batch. Without a teacher it is training from scratch."""

    def __init__(
        self,
        student: ODEViT,
        settings: Training,
        weights: dict[str, float],
        teacher: Teacher | None = None,
        schedule: Callable[[int], dict[int, int]] | None = None,
        memory: Memory | None = None,
    ):
        super().__init__()
        self.net, self.settings = student, settings
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.outside: dict[str, Any] = {"teacher": teacher}  # not a submodule: it is neither trained nor saved
        self.schedule, self.memory = schedule, memory

    @property
    def student(self) -> ODEViT:
        assert isinstance(self.net, ODEViT)
        return self.net

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.student.psi.parameters() if p.dim() == 2]

    def watch(self) -> dict[str, float]:
        settings = self.settings
        steps = self.student.config.integration.steps
        return {"bound": error_bound(self.student.psi, steps, settings.bound_radius, settings.bound_lipschitz)}

    def prepare(self, batch: Batch, view: int, step: int) -> tuple[Any, ...]:
        steps, horizon, reached = self.depth(step)
        plan = self.schedule(reached) if self.schedule else {}
        layers, pixels, labels, target = sorted(set(plan.values())), batch.pixel_values, batch.labels, None
        live = self.memory is None
        if self.outside["teacher"] and not live:
            target = self.teach(batch, view, layers)
        if self.settings.mixup:
            pixels, labels, target = self.mix(pixels, labels, target, step)
        if self.outside["teacher"] and live:  # it sees what the student sees: what it says of a mixture is no mixture
            target = self.teach(batch._replace(pixel_values=pixels), view, layers)
        return pixels, labels, target, plan, steps, horizon

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
        """Steps and horizon of this batch, and the step by which the teacher's last state should be reached."""
        own, settings = self.student.config.integration, self.settings
        random = np.random.default_rng((settings.seed, 7, step))
        steps, horizon, reached = own.steps, own.horizon, own.steps
        if settings.random_depth:
            steps = int(random.integers(settings.random_depth[0], settings.random_depth[1] + 1))
            horizon, reached = steps * own.step_size, settings.random_depth[0]
        elif settings.random_resolution:
            steps = int(random.integers(settings.random_resolution[0], settings.random_resolution[1] + 1))
            reached = steps
        if settings.step_jitter:
            horizon *= 1 + settings.step_jitter * random.uniform(-1, 1)
        return steps, horizon, reached

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
            states = teacher.states(batch.pixel_values)
            return torch.stack([states[layer][:, 0] for layer in layers], 1), teacher.answer(states[-1][:, 0])

        if self.memory is None:
            cls, logits = compute()
        else:
            cls, logits = self.memory.answer(batch.rows.cpu(), view, compute)
            cls, logits = cls.to(batch.pixel_values.device), logits.to(batch.pixel_values.device)
        return Target(dict(zip(layers, cls.unbind(1))), logits)

    def forward(
        self, pixels: Tensor, labels: Tensor, target: Target | None, plan: dict[int, int], steps: int, horizon: float
    ) -> dict[str, Tensor]:
        states, velocities = [], []
        for point in self.student.trajectory(self.student.stem(pixels), steps, horizon, advance=self.advance(steps)):
            states.append(point.state)
            velocities.append(point.velocity)
        scene = Scene(self.student, self.settings, states, velocities, horizon / steps, labels, target, plan)
        return {name: LOSSES[name](scene) for name in self.weights}

    def advance(self, steps: int) -> Advance:
        """The integrator's step, without gradients before the last `truncate` steps, or recomputed going back."""
        done = 0

        def step(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
            nonlocal done
            done += 1
            if self.settings.truncate and done <= steps - self.settings.truncate:
                with torch.no_grad():
                    return advance(*arguments)
            if self.settings.checkpointing:
                result: tuple[Tensor, Tensor, list[Tensor]] = checkpoint(advance, *arguments, use_reentrant=False)
                return result
            return advance(*arguments)

        return step


class FineTuning(Objective):
    """A teacher on labelled images, all of it."""

    def __init__(self, teacher: Teacher, label_smoothing: float):
        super().__init__()
        self.net, self.label_smoothing, self.weights = teacher, label_smoothing, {"cross_entropy": 1.0}

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"cross_entropy": F.cross_entropy(self.net(pixels), labels, label_smoothing=self.label_smoothing)}
