"""`odevit-serve analyze`: what the model does on images, measured section by section.

A section is two functions. The first goes over the images in batches and gives arrays with one row an image; it is
what takes time, so its arrays are kept in the output folder and not computed again. The second makes numbers of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ... import __version__
from ...data.datasets import Images
from ...data.division import pick
from ...files import atomic
from ...guarantee.calibrate import match_labels
from ..batches import Batch, Order, PictureDataset, Unreadable, collate
from ..loop import Say
from ..losses import error_bound
from ..model import ODEViT
from ..recipe import Teaching
from ..teacher import Teacher, choose_classes
from ..teacher_sources import load_teacher
from . import lyapunov
from . import numbers as sections
from .energy import energy

Arrays = dict[str, np.ndarray]
LIMIT, QUICK_LIMIT = 2000, 200
STEEP, QUICK_STEEP = 64, 16  # images on which Jacobians are looked at
SHOWN = 4  # images whose attention is shown
RESTING = (0.5, 0.2, 0.1, 0.05)  # speed of a token, as a part of the mean of its image's tokens in the first step
RADIUS, ASSUMED = 10.0, 0.5  # what the paper puts into eq. 11: radius of the states, Lipschitz constant


@dataclass
class Study:
    """One model on one set of images, with what is known of both."""

    model: ODEViT
    images: Images
    labels: np.ndarray | None  # as indices of the model's classes
    teacher: Teacher | None
    output: Path
    key: str
    quick: bool = False
    batch_size: int = 32
    say: Say = print
    unreadable: Unreadable = field(init=False)

    def __post_init__(self) -> None:
        self.unreadable = Unreadable(len(self.images), self.say)

    @cached_property
    def place(self) -> Any:
        """Where to compute, and which of several processes this is: the same as training uses."""
        from accelerate import Accelerator

        return Accelerator()

    @property
    def grid(self) -> list[tuple[int, float]]:
        """Pairs of steps and horizon: the paper's Fig. 7."""
        own = self.model.config.integration
        horizons = (0.5, 0.75, 1.0, 1.25) if self.quick else (0.25, 0.5, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5)
        return [(n, own.horizon * part) for part in horizons for n in self.counts]

    @property
    def counts(self) -> list[int]:
        own = self.model.config.integration.steps
        parts = (0.25, 0.5, 0.75, 1, 1.5) if self.quick else (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 2)
        return sorted({max(1, round(own * part)) for part in parts})

    @property
    def schemes(self) -> list[tuple[str, str]]:
        """Solvers and splittings to compare: those of one evaluation a step, and two that cost more."""
        own = (self.model.config.integration.solver, self.model.config.integration.splitting)
        others = [("euler", "parallel"), ("ab2", "parallel"), ("euler", "lie")]
        if not self.quick:
            others += [("heun", "parallel"), ("euler", "strang")]
        return [own, *(pair for pair in others if pair != own)]

    def over(self, name: str, look: Callable[[Batch], Arrays], limit: int | None = None) -> Arrays:
        """`look` at every batch, and the arrays of all, one row an image; kept on disk under the section's name."""
        path, mark = self.output / "parts" / f"{name}.npz", f"{self.key}:{name}:{limit}"
        kept = _kept(path, mark)
        if kept is not None:
            if self.place.is_main_process:
                self.say(f"{name}: already there")
            return kept
        found = [look(batch) for batch in self._batches(name, limit)]
        found = self._gather(found)
        arrays = {k: np.concatenate([part[k] for part in found]) for k in found[0]}
        order = np.argsort(arrays["row"])
        arrays = {k: v[order] for k, v in arrays.items()}
        if self.place.is_main_process:
            with atomic(path) as scratch, scratch.open("wb") as file:
                np.savez(file, **{"_key": np.array(mark), **arrays})  # type: ignore[arg-type]
        return arrays

    def _batches(self, name: str, limit: int | None) -> Iterator[Batch]:
        count = len(self.images) if limit is None else min(limit, len(self.images))
        pictures = PictureDataset(self.images.subset(np.arange(count)), self.model.config.preprocessing)
        size, place = min(self.batch_size, max(1, count // self.place.num_processes)), self.place
        order = list(Order(count, size, 0, False))[place.process_index :: place.num_processes]
        workers = 0 if self.images.in_memory else min(4, os.cpu_count() or 1)
        source: Any = pictures
        data = DataLoader(source, batch_sampler=order, collate_fn=collate, num_workers=workers)
        for batch in _progress(data, name, len(order), place.is_main_process):
            self.unreadable.add(batch.unreadable)
            yield batch._replace(pixel_values=batch.pixel_values.to(place.device))

    def _gather(self, found: list[Arrays]) -> list[Arrays]:
        if self.place.num_processes == 1:
            return found
        from accelerate.utils import gather_object

        return list(gather_object(found))


def _progress(data: Iterable[Batch], name: str, total: int, show: bool) -> Iterable[Batch]:
    from rich.console import Console
    from rich.progress import track

    if not show:
        return data
    return track(data, f"{name:<12}", total, console=Console(stderr=True), transient=True)


def _kept(path: Path, mark: str) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["_key"]) == mark:
                return {name: file[name] for name in file.files if name != "_key"}
    except (OSError, ValueError, KeyError, EOFError):  # not there, cut short, or of another command
        pass
    return None


def open_study(
    source: str | None,
    data: str,
    output: Path,
    split: str | None = None,
    teacher: str = "",
    teacher_weights: str = "",
    limit: int | None = None,
    quick: bool = False,
    batch_size: int = 32,
    say: Say = print,
) -> Study:
    """Load everything, and refuse what cannot be analysed before any work is done."""
    model = ODEViT.from_pretrained(source)
    model.requires_grad_(False)
    images = pick(data, split, model.config.division)
    images = images.sample(limit or (QUICK_LIMIT if quick else LIMIT), 0)
    # In an order of chance, so that the first few of them are a sample too.
    images = images.subset(np.random.default_rng(1).permutation(len(images)))
    labels = match_labels(images, model.config)
    if images.labels is not None and labels is None:
        say("the data's classes are not the model's: what needs labels is left out")
    expert = None
    if teacher or teacher_weights:
        expert = load_teacher(Teaching(source=teacher, weights=teacher_weights), model.config.architecture).eval()
        expert.requires_grad_(False)
        classes = model.config.architecture.classes
        if getattr(expert.vit.head, "out_features", 0) != classes:
            names = model.config.class_ids or model.config.labels
            choose_classes(expert, names or [str(i) for i in range(classes)])
    key = _digest(model, images, expert, quick)
    study = Study(model, images, labels, expert, output, key, quick, batch_size, say)
    model.to(study.place.device)
    if expert is not None:
        expert.to(study.place.device)
    return study


def _digest(model: ODEViT, images: Images, teacher: Teacher | None, quick: bool) -> str:
    """What the kept arrays depend on: weights, configuration, images, teacher, and how much is measured."""
    digest = hashlib.sha256(json.dumps([bundle_facts(model), quick]).encode())
    for module in (model, teacher):
        for name, value in module.state_dict().items() if module is not None else ():
            digest.update(name.encode() + value.cpu().numpy().tobytes())
    digest.update(json.dumps(list(images.names)).encode())
    for i in range(min(3, len(images))):  # names alone do not tell one array file from another
        try:
            digest.update(images.read(i).tobytes())
        except Exception:  # an unreadable picture is told of when its turn comes
            digest.update(b"unreadable")
    return digest.hexdigest()[:16]


def bundle_facts(model: ODEViT) -> dict[str, Any]:
    own, shape = model.config.integration, model.config.architecture
    return {"architecture": vars(shape), "integration": vars(own), "preprocessing": vars(model.config.preprocessing)}


def _numpy(value: Tensor) -> np.ndarray:
    return value.detach().float().cpu().numpy()


def _base(batch: Batch) -> Arrays:
    return {"row": batch.rows.numpy()}


@torch.no_grad()
def look_trajectory(study: Study, batch: Batch) -> Arrays:
    """The numbers of every step that answers, exits and the free exponent are made of."""
    model, x = study.model, study.model.stem(batch.pixel_values)
    points = list(model.trajectory(x))
    cls = torch.stack([x[:, 0], *(p.state[:, 0] for p in points)], 1)  # [B,N+1,D]
    states = [x, *(p.state for p in points)]
    boundary = [lyapunov.toward_boundary(model, before, after) for before, after in itertools.pairwise(states)]
    arrays = _base(batch) | {
        **{
            name: _numpy(torch.stack(values, 1)) for name, values in zip(("margin", "gain", "exponent"), zip(*boundary))
        },
        "logits": _numpy(model.head(cls[:, 1:])),
        "speed": _numpy(torch.stack([lyapunov.norm(p.velocity) for p in points], 1)),
        "cls_speed": _numpy(torch.stack([p.velocity[:, 0].norm(dim=-1) for p in points], 1)),
        "travel": _numpy((cls[:, -1:] - cls).norm(dim=-1)),
    }
    if study.teacher is not None:
        last = study.teacher.states(batch.pixel_values)[-1][:, 0]
        arrays |= {
            "teacher_logits": _numpy(study.teacher.answer(last)),
            "teacher_distance": _numpy((cls - last[:, None]).norm(dim=-1)),  # [B,N+1]
        }
    return arrays


@torch.no_grad()
def look_depth(study: Study, batch: Batch) -> Arrays:
    """Answers at every pair of steps and horizon, and of every scheme at every number of steps."""

    def answer(**settings: Any) -> np.ndarray:
        return study.model(batch.pixel_values, **settings).argmax(-1).cpu().numpy()  # type: ignore[no-any-return]

    whole = [answer(steps=n, horizon=t) for n, t in study.grid]
    schemes = [
        [answer(steps=n, solver=solver, splitting=splitting) for n in study.counts]
        for solver, splitting in study.schemes[1:]  # the model's own is in the grid
    ]
    arrays = _base(batch) | {"grid": np.stack(whole, 1).astype(np.int32)}
    if schemes:
        arrays["schemes"] = np.stack([np.stack(row, 1) for row in schemes], 1).astype(np.int32)  # [B,schemes,counts]
    return arrays


def look_exponents(study: Study, batch: Batch) -> Arrays:
    own = study.model.config.integration
    step, remembered = lyapunov.own_step(study.model)
    x = study.model.stem(batch.pixel_values)
    count = 1 if study.quick else 3
    found = lyapunov.exponents(step, x, own.steps, own.step_size, count, remembered)
    return _base(batch) | {"exponents": _numpy(found)}


def look_steepness(study: Study, batch: Batch) -> Arrays:
    """Steepness and bend of psi at every state that a step starts from, and how far the steps are off."""
    model = study.model
    x = model.stem(batch.pixel_values)
    with torch.no_grad():
        starts = [x, *(p.state for p in model.trajectory(x))][:-1]
    whole, cls = lyapunov.discretisation_error(model, x)
    iterations = 10 if study.quick else 20
    return _base(batch) | {
        "lipschitz": _numpy(torch.stack([lyapunov.lipschitz(model.psi, s, iterations) for s in starts], 1)),
        "bend": _numpy(torch.stack([lyapunov.acceleration(model.psi, s) for s in starts], 1)),
        "error": _numpy(whole),
        "cls_error": _numpy(cls),
        "radius": _numpy(torch.stack([s.norm(dim=-1).amax(1) for s in starts], 1)),
    }


@torch.no_grad()
def look_energy(study: Study, batch: Batch) -> Arrays:
    """Hopfield energy in every state, and what each step does to it while the keys stay those it started from."""
    model, x = study.model, study.model.stem(batch.pixel_values)
    attention, states = model.psi.attention, [x, *(p.state for p in model.trajectory(x))]
    along = torch.stack([energy(attention, state) for state in states], 1)  # [B,N+1,H,S]
    held = torch.stack([energy(attention, new, old) for old, new in itertools.pairwise(states)], 1) - along[:, :-1]
    return _base(batch) | {
        "cls": _numpy(along[..., 0]),
        "mean": _numpy(along.mean(-1)),
        "cls_held": _numpy(held[..., 0]),
    }


@torch.no_grad()
def look_tokens(study: Study, batch: Batch) -> Arrays:
    """Parts of the tokens that are slow in a step, and that are slow from it on to the end: [B,N,thresholds]."""
    model, x = study.model, study.model.stem(batch.pixel_values)
    speed = torch.stack([p.velocity.norm(dim=-1) for p in model.trajectory(x)], 1)  # [B,N,S]
    part = speed / speed[:, :1].mean(-1, keepdim=True).clamp_min(torch.finfo(speed.dtype).tiny)
    below = torch.stack([part < threshold for threshold in RESTING], 2)  # [B,N,thresholds,S]
    resting = below.flip(1).cumprod(1).flip(1)
    return _base(batch) | {"below": _numpy(below.float().mean(-1)), "resting": _numpy(resting.float().mean(-1))}


@torch.no_grad()
def _attention(study: Study, batch: Batch) -> Tensor:
    """What CLS looks at in every state: [B,N+1,H,S]."""
    model, x = study.model, study.model.stem(batch.pixel_values)
    states = [x, *(p.state for p in model.trajectory(x))]
    return torch.stack([model.psi.attention.maps(s, rows=1)[:, :, 0] for s in states], 1)


def look_entropy(study: Study, batch: Batch) -> Arrays:
    """Entropy of CLS's attention in every state, as a part of the largest there is."""
    maps = _attention(study, batch)
    entropy = -(maps * maps.clamp_min(1e-30).log()).sum(-1).mean(-1) / np.log(maps.shape[-1])
    return _base(batch) | {"entropy": _numpy(entropy)}


def look_maps(study: Study, batch: Batch) -> Arrays:
    """Attention on the patches, mean over the heads, with the pixels it belongs to."""
    maps = _attention(study, batch).mean(2)[..., 1 : 1 + study.model.config.architecture.patches]
    return _base(batch) | {"maps": _numpy(maps), "pixels": _numpy(batch.pixel_values)}


def analyze(study: Study) -> tuple[dict[str, Any], np.ndarray]:
    """All sections, one that this model or these images do not support as a sentence; pixels of the images shown."""
    config, labels = study.model.config, study.labels
    own, names = config.integration, config.labels or tuple(map(str, range(config.architecture.classes)))
    trajectory = study.over("trajectory", lambda batch: look_trajectory(study, batch))
    answers = trajectory["logits"].argmax(-1)[:, -1]
    expert = trajectory["teacher_logits"].argmax(-1) if study.teacher is not None else None
    right = None if labels is None else answers == labels
    found: dict[str, Any] = {
        "depth": sections.depth(
            study.over("depth", lambda batch: look_depth(study, batch)),
            answers, study.grid, study.counts, study.schemes, own, labels, expert,
        )
    }  # fmt: skip
    if own.steps > 1:
        maximal = study.over("exponents", lambda batch: look_exponents(study, batch))["exponents"]
        found["stability"] = sections.stability(maximal, trajectory, own.step_size, labels, names)
        found["exits"] = sections.rules(sections.record(trajectory, labels, own))
    else:
        found["stability"] = found["exits"] = {"left_out": "The model takes a single step: there is no trajectory."}
    if study.teacher is not None:
        found["distance"] = sections.distance(trajectory, labels)
    else:
        found["distance"] = {
            "left_out": "No teacher was given: name one with --teacher-weights FILE or --teacher timm:NAME."
        }
    steep = QUICK_STEEP if study.quick else STEEP
    measured = study.over("steepness", lambda batch: look_steepness(study, batch), steep)
    printed = error_bound(study.model.psi, own.steps, RADIUS, ASSUMED)
    norms = lyapunov.spectral_norms(study.model.psi)
    found["steepness"] = sections.steepness(measured, own, printed, norms, RADIUS, ASSUMED)
    entropy = study.over("entropy", lambda batch: look_entropy(study, batch), 16 * steep)["entropy"]
    found["attention"] = sections.attention(entropy, None if right is None else right[: len(entropy)])
    energies = study.over("energy", lambda batch: look_energy(study, batch), 16 * steep)
    by_step = trajectory["logits"].argmax(-1)[: len(energies["row"])]
    found["energy"] = sections.energy(energies, by_step, None if right is None else right[: len(by_step)])
    found["tokens"] = sections.tokens(
        study.over("tokens", lambda batch: look_tokens(study, batch), 16 * steep), RESTING
    )
    maps = study.over("maps", lambda batch: look_maps(study, batch), SHOWN)
    wanted = None if labels is None else [names[i] for i in labels[: len(maps["row"])]]
    found["attention"]["shown"] = {
        "answers": [names[i] for i in answers[: len(maps["row"])]],
        "labels": wanted,
        "maps": np.round(maps["maps"], 6).tolist(),
    }
    numbers = {
        "model": {"name": config.name, **bundle_facts(study.model)},
        "teacher": None if study.teacher is None else vars(study.teacher.facts),
        "images": len(study.images),
        "labelled": labels is not None,
        "accuracy": None if right is None else float(right.mean()),
        "quick": study.quick,
        "version": __version__,
        "sections": found,
    }
    return numbers, maps["pixels"]
