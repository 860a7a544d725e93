"""One export from beginning to end: put together, check, and only then leave a file behind.

Every graph is made of copies of the bundle's own parts, without torch. What is compared with is the runtime on those
parts, which were checked against torch when they were made.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .. import __version__, bundle
from ..config import Config, ExitPolicy, Integration
from ..errors import UsageError, UserError, nearest
from ..model_card import accuracy_at
from ..runtime import exits
from ..runtime.graph_builder import OPSET
from ..runtime.graph_files import write_metadata
from ..runtime.graphs import Parts
from ..runtime.jobs import Job
from ..runtime.sessions import Graphs
from ..runtime.slots import Slots, Step
from ..solvers import SOLVERS, SPLITTINGS
from . import checks, formats, install, precision, references
from .checks import Check

Array = np.ndarray[Any, Any]
SOURCES = ("unrolled", "parts", "adaptive")


@dataclass(frozen=True)
class Settings:
    """What the command was told; None leaves a number to the bundle."""

    format: str = "onnx"
    steps: int | None = None
    horizon: float | None = None
    solver: str | None = None
    splitting: str | None = None
    tolerance: float | None = None
    precision: str = "fp32"
    calibration: str | None = None
    max_drop: float = 0.5
    with_attention: bool = False
    batch: str = "1,8,64"
    gpu: str = "ada"
    source: str = "unrolled"
    output: str | None = None
    overwrite: bool = False
    check: str = "runtime"  # or torch, beside it

    def given(self) -> dict[str, object]:
        """The options that differ from their defaults, by the names they have on the command line."""
        fields = {f.name: (f.default, getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {k.replace("_", "-"): v for k, (default, v) in fields.items() if v != default and k != "format"}


@dataclass
class ExportReport:
    """What was made and what was checked."""

    format: str
    model: str
    precision: str
    integration: Integration
    macs: int
    files: dict[str, int] = field(default_factory=dict)  # path -> bytes
    checks: list[Check] = field(default_factory=list)
    comparison: dict[str, float | str] = field(default_factory=dict)
    accuracy: str = ""  # what the card says of this number of steps
    seconds: dict[str, float] = field(default_factory=dict)
    load_seconds: float | None = None
    next: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


class ExportJob:
    """An export under way. Formats call it for the parts, the checks and the progress lines they share."""

    def __init__(self, source: str | None, settings: Settings, say: Callable[[str], None]):
        self.settings: Settings = settings
        self.say = say
        self.entry = formats.find(settings.format)
        formats.check_options(self.entry, settings.given())
        for name, value, known in (
            ("precision", settings.precision, precision.PRECISIONS),
            ("source", settings.source, SOURCES),
            ("check", settings.check, ("runtime", "torch")),
        ):
            if value not in known:
                raise UsageError(nearest(name, value, known))
        if settings.max_drop < 0:
            raise UsageError(f"--max-drop must be 0 or more points, not {settings.max_drop}")
        self.batch = formats.tensorrt.parse_batch(settings.batch)
        self.folder: Path = bundle.find(source)
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is exported already: give the bundle it was made from")
        self.own = bundle.read_config(self.folder)
        self.integration = _integration(self.own, settings, "tolerance" in self.entry.options)
        if self.integration.tolerance and settings.precision != "fp32":
            raise UsageError(f"a tolerance needs --precision fp32, not {settings.precision}: give --tolerance 0")
        self.config = self._config()
        self.name: str = re.sub(r"[^\w.-]+", "-", self.own.name) or "model"
        macs = int(self.integration.macs(self.own.architecture))
        self.report = ExportReport(settings.format, self.own.name, settings.precision, self.integration, macs)
        self.target = install.fitting(Path(settings.output), self) if settings.output else self.entry.target(self)
        self._check_depth()

    @property
    def stem(self) -> str:
        """The name of a file without its ending."""
        suffix = "" if self.settings.precision == "fp32" else f"-{self.settings.precision}"
        return f"{self.name}-{self.integration.steps}steps{suffix}"

    @property
    def _exits_inside(self) -> bool:
        """Whether images are to exit inside the graph."""
        return self.settings.format == "onnx-adaptive" or self.settings.source == "adaptive"

    @property
    def quoted(self) -> str:
        return shlex.quote(str(self.target))

    def _config(self) -> Config:
        """That of the export: a proof made for other settings is left out, and so is travel over another horizon."""
        own, policy = self.own, self.own.exit
        same = self.integration == own.integration and self.settings.precision == "fp32"
        if policy.calibration is not None and not same:
            policy = dataclasses.replace(policy, calibration=None)
            self.say(f"note: the guarantee was proven for {own.integration!s} in fp32, and does not cover this export")
        if policy.travel and self.integration.horizon != own.integration.horizon:
            rule = exits.RULES.get(policy.rule)
            if self._exits_inside and rule is not None and rule.needs_travel:
                raise UserError(
                    f"the rule {policy.rule!r} needs the travel over a horizon of {self.integration.horizon:g}, and it "
                    f"was measured over {own.integration.horizon:g}: calibrate a bundle of that horizon first"
                )
            policy = ExitPolicy(policy.rule, policy.threshold, policy.lyapunov)
        confidence = own.confidence
        if confidence is not None and not same:
            confidence = dataclasses.replace(confidence, unsure=None)
        return own.replace(
            integration=self.integration,
            exit=policy,
            confidence=confidence,
            exported_from=own.integration,
            provenance={**own.provenance, "export": self._provenance()},
        )

    def _provenance(self) -> dict[str, Any]:
        """The command without what is private to this machine: where the bundle, the images and the output lie."""
        words = ["odevit-serve", "export", self.own.name, "--format", self.settings.format]
        for option, value in self.settings.given().items():
            if option not in ("output", "overwrite", "calibration"):
                words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
        return {"command": " ".join(words), "version": __version__, "precision": self.settings.precision}

    def _check_depth(self) -> None:
        """Quote what the card says of this number of steps; refuse a loss of more than `--max-drop` points."""
        own, asked = self.own, self.integration
        self.report.accuracy, drop = accuracy_at(own, asked)
        if drop is not None and drop > self.settings.max_drop:
            raise UserError(
                f"{asked} loses {drop:.1f} points of accuracy ({self.report.accuracy}), more than the "
                f"{self.settings.max_drop:g} allowed: choose another, or allow it with --max-drop"
            )
        if self.report.accuracy and asked != own.integration:
            self.say(f"note: {self.report.accuracy}")

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.report.seconds[text] = round(time.perf_counter() - began, 3)
        self.say(f"  {text:<44} {self.report.seconds[text]:7.2f} s")

    def passed(self, *done: Check) -> None:
        self.report.checks.extend(done)

    @cached_property
    def parts(self) -> Parts:
        """The pieces of the bundle, at the precision asked for."""
        with self.stage("read the bundle's parts"):
            parts = Parts.of(self.folder, self.own)
            graphs = self.graphs  # refuses parts of other weights
        if self.settings.precision == "fp16":
            precision.halve_fields(parts)
        if self.settings.precision == "int8":
            images = precision.needed(self.pictures)
            some = images.pixels[: precision.WATCHED]
            with self.stage(f"quantise on {len(some)} images"):
                symmetric = self.settings.format == "tensorrt"
                precision.quantise_fields(parts, precision.states(graphs, some), symmetric)
        return parts

    @cached_property
    def graphs(self) -> Graphs:
        """The bundle's own parts in onnxruntime, by the solver asked for: what every export is compared with."""
        own = self.integration
        return Graphs(self.folder, self.own, solver=own.solver, splitting=own.splitting, tolerance=own.tolerance)

    @cached_property
    def pictures(self) -> precision.Pictures | None:
        return precision.pictures(self.config, self.folder, self.settings.calibration)

    @cached_property
    def torch_model(self) -> Any:
        """The model in torch: for `parts`, and to compare with where it was asked for."""
        from ..train.model import ODEViT

        with self.stage("load the weights"):
            return ODEViT.from_pretrained(self.folder)

    def images(self, batch: int) -> Array:
        found = self.pictures or precision.noise(self.config, max(checks.BATCHES))
        return found.pixels[np.arange(batch) % len(found.pixels)]

    def reference(self, pixels: Array, with_attention: bool = False) -> dict[str, Array]:
        """What the runtime answers on the bundle's own parts."""
        return references.of_graphs(self.graphs, self.integration, pixels, with_attention)

    def torch_reference(self, pixels: Array, with_attention: bool = False) -> dict[str, Array]:
        return references.of_torch(self.torch_model, self.integration, pixels, with_attention)

    def run_parts(self, sessions: Mapping[str, Any], pixels: Array) -> dict[str, Array]:
        """A trajectory by freshly made parts."""
        return references.of_parts(sessions, self.config, pixels)

    def save(self, graph: onnx.ModelProto, path: Path, **plain: object) -> None:
        """Write a graph with its metadata to a scratch file, and check the file by itself."""
        fresh = plain.get("format") == "parts" and self.settings.precision == "fp32"  # made of weights, not of parts
        if fresh:
            made_of = {"weights": bundle.digest(self.folder / bundle.WEIGHTS)}
        else:
            made_of = {"weights": self.parts.weights_digest}
            if plain.get("format") != "parts":
                made_of |= self.parts.digests
        write_metadata(graph, self.config, precision=self.settings.precision, **plain, **made_of)
        with self.stage(f"write {path.name} and check it"):
            onnx.save(graph, path)
            written = onnx.load(path)
            self.passed(*checks.structure(written, OPSET), checks.privacy(written))

    def open(self, path: Path) -> Any:
        with self.stage(f"open {path.name} in onnxruntime"):
            session, seconds = checks.load(path)
        self.report.load_seconds = (self.report.load_seconds or 0.0) + seconds
        return session

    def check_size(self, paths: list[Path], steps: int) -> None:
        found = sum(path.stat().st_size for path in paths)
        self.passed(checks.size(found, self.parts, self.config, checks.evaluations(self.config, steps)))

    def check_answers(self, answer: Callable[[Array], Mapping[str, Array]], with_attention: bool = False) -> None:
        """Values against the runtime, or torch; at lower precision also the answers on images."""
        kind, from_weights = (
            self.settings.precision,
            self.settings.format == "parts" and self.settings.precision == "fp32",
        )
        others = [] if from_weights else [("the runtime", self.reference)]
        if from_weights or self.settings.check == "torch":
            others.append(("torch", self.torch_reference))
        for name, reference in others:
            with self.stage(f"compare with {name} at batch 1, 3 and 8"):
                ask = partial(reference, with_attention=with_attention)
                found = checks.values(ask, answer, self.images, kind, name)
                self.passed(*found)
        if kind != "fp32":
            self.check_precision(lambda pixels: answer(pixels)["logits"])

    def check_precision(self, logits: Callable[[Array], Array]) -> None:
        images = self.pictures or precision.noise(self.config)
        with self.stage(f"compare with fp32 on {len(images.pixels)} images"):
            check, self.report.comparison = precision.compare(
                lambda pixels: self.reference(pixels)["logits"],
                logits,
                images,
                self.settings.precision,
                self.settings.max_drop,
            )
        self.passed(check)
        figures = self.report.comparison.items()
        self.say("  " + ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures))

    def check_quantised(self, graph: onnx.ModelProto, steps: int) -> None:
        if self.settings.precision == "int8":
            found, wanted = precision.count(graph), steps * precision.products(self.integration)
            self.passed(checks.expect("8-bit matrix products", found == wanted, found, wanted))

    def check_depths(self, session: Any, settable: bool = True) -> None:
        """Class and depth of images against the runtime: by the bundle's own threshold, a lower one, and a budget.

        Where threshold and budget are constants of the graph and not `settable`, by the bundle's own alone.
        """
        own, steps = self.config.exit.threshold, self.integration.steps
        adaptive = exits.calibrated(self.config) and self.config.exit.rule != "fixed"
        cases = (
            [(own, steps), (own - abs(own) / 2, steps), (own, max(1, steps // 2))] if adaptive else [(np.inf, steps)]
        )[: None if settable else 1]
        for batch in checks.BATCHES:
            for threshold, budget in cases:
                pixels = self.images(batch)
                feed = {
                    "pixel_values": pixels,
                    "threshold": np.array(threshold, np.float32),
                    "max_steps": np.array(budget),
                }
                found = dict(zip(("logits", "steps", "exit_reason"), session.run(None, feed)))
                check = checks.depths(self._runtime_depths(pixels, threshold, budget), found, batch)
            self.passed(check)

    def _runtime_depths(self, pixels: Array, threshold: float, budget: int) -> dict[str, Array]:
        """How the runtime ends the same images; `sure`: no score was within rounding of a threshold."""
        fixed = not np.isfinite(threshold)
        asked: dict[str, Any] = {"adaptive": False} if fixed else {"threshold": threshold}
        depth = exits.resolve(self.config, max_steps=budget, **asked)
        graphs = self.graphs
        slots = Slots(graphs, len(pixels))
        slots.measured = exits.Measured.of(self.config)
        slots.admit(pixels, [Job(row, depth, trace=True) for row in range(len(pixels))])
        ended: dict[int, Any] = {}
        while slots.active:
            ended |= {outcome.job.key: outcome for outcome in slots.step()}
        outcomes = [ended[row] for row in range(len(pixels))]
        near = 1e-3 * max(abs(depth.threshold), 1e-6) if not fixed else 0.0
        sure = [
            all(
                (
                    fixed
                    or (
                        abs(s.score - depth.threshold) > near
                        and (np.isinf(depth.lyapunov) or abs(s.lyapunov_times / depth.lyapunov - 1) > 1e-3)
                    )
                )
                and _clear_size(s, depth)
                for s in outcome.trace
            )
            for outcome in outcomes
        ]
        return {
            "logits": np.stack([outcome.logits for outcome in outcomes]),
            "steps": np.array([outcome.steps for outcome in outcomes]),
            "exit_reason": np.array([int(outcome.reason) for outcome in outcomes]),
            "sure": np.array(sure),
        }


def _clear_size(step: Step, depth: exits.Depth) -> bool:
    """Whether rounding could not have given the step another size: no whole number of steps is just allowed."""
    if not depth.tolerance or not step.error > 0:
        return True
    allowed = step.step_size * (depth.tolerance / step.error) ** 0.5 / depth.step_size
    return abs(allowed - round(allowed)) > 1e-3 * allowed


def _integration(config: Config, settings: Settings, sizes: bool) -> Integration:
    """As asked for; `sizes`: the format can hold steps that choose their size."""
    own = config.integration
    for name, known in (("solver", SOLVERS), ("splitting", SPLITTINGS)):
        given = getattr(settings, name)
        if given is not None and given not in known:
            raise UsageError(nearest(name, given, known))
    wanted = own.by(settings.solver, settings.splitting, settings.tolerance if sizes else 0.0)
    return dataclasses.replace(
        wanted,
        horizon=own.horizon if settings.horizon is None else settings.horizon,
        steps=own.steps if settings.steps is None else settings.steps,
    )


def export(source: str | None, settings: Settings, say: Callable[[str], None] = lambda text: None) -> ExportReport:
    """Make what `settings` ask for of the bundle `source`; a failed check leaves nothing behind."""
    began = time.perf_counter()
    job = ExportJob(source, settings, say)
    install.refuse_existing(job)
    scratch = install.scratch_folder(job)
    try:
        made = job.entry.make(job, scratch)
        for name, target in made.items():
            install.move(scratch / name, target, scratch)
            job.report.files[str(target)] = install.size(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    job.report.seconds["total"] = round(time.perf_counter() - began, 3)
    return job.report
