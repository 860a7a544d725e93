"""One export from beginning to end: load, trace, check, and only then leave a file behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from .. import __version__, bundle
from ..bundle import Config, Integration
from ..errors import UsageError, UserError
from ..train.model import ODEViT
from . import checks, formats, precision, tensorrt, triton
from .adaptive import adaptive
from .checks import Check
from .graph import Folded
from .onnx import OPSET, write_metadata
from .pieces import STEP_OUTPUTS, Pieces
from .unrolled import unrolled

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
    precision: str = "fp32"
    calibration: str | None = None
    max_drop: float = 0.5
    with_attention: bool = False
    batch: str = "1,8,64"
    gpu: str = "ada"
    source: str = "unrolled"
    output: str | None = None
    overwrite: bool = False

    def given(self) -> dict[str, object]:
        """The options that differ from their defaults, by the names they have on the command line."""
        fields = {f.name: (f.default, getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {k.replace("_", "-"): v for k, (default, v) in fields.items() if v != default and k != "format"}


@dataclass
class Report:
    """What was made and what was checked."""

    format: str
    model: str
    precision: str
    integration: Integration
    macs: int
    files: dict[str, int] = field(default_factory=dict)  # path -> bytes
    checks: list[Check] = field(default_factory=list)
    comparison: dict[str, float | str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    load_seconds: float | None = None
    next: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


class Job:
    """An export under way. Formats call it for the graphs, the checks and the progress lines they share."""

    def __init__(self, source: str | None, settings: Settings, say: Callable[[str], None]):
        self.settings, self.say = settings, say
        self.entry = formats.find(settings.format)
        formats.check_options(self.entry, settings.given())
        if settings.precision not in precision.PRECISIONS:
            raise UsageError(formats.nearest("precision", settings.precision, precision.PRECISIONS))
        if settings.source not in SOURCES:
            raise UsageError(formats.nearest("source", settings.source, SOURCES))
        if settings.max_drop < 0:
            raise UsageError(f"--max-drop must be 0 or more points, not {settings.max_drop}")
        self.batch = tensorrt.parse_batch(settings.batch)
        self.folder = bundle.find(source)
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is exported already: give the bundle it was made from")
        own = bundle.read_config(self.folder)
        self.integration = _integration(own, settings)
        self.config = own.replace(integration=self.integration, provenance=self._provenance(own))
        self.name = re.sub(r"[^\w.-]+", "-", own.name) or "model"
        self.report = Report(
            settings.format,
            own.name,
            settings.precision,
            self.integration,
            int(self.integration.macs(own.architecture)),
        )
        self.target = self._target()
        self._calibrated_for(own)

    def _provenance(self, own: Config) -> dict[str, Any]:
        """The command without what is private to this machine: where the bundle, the images and the output lie."""
        words = ["odevit-serve", "export", own.name, "--format", self.settings.format]
        for option, value in self.settings.given().items():
            if option not in ("output", "overwrite", "calibration"):
                words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
        export = {"command": " ".join(words), "version": __version__, "precision": self.settings.precision}
        return {**own.provenance, "export": export}

    def _calibrated_for(self, own: Config) -> None:
        if own.exit.travel and self.integration != own.integration and self.settings.format == "onnx-adaptive":
            self.say(
                f"note: the exit guarantee was calibrated for {_describe(own.integration)}; "
                f"for {_describe(self.integration)} the rule runs without one"
            )

    def _target(self) -> Path:
        """Where the result goes: a file, or a folder for what consists of several."""
        settings = self.settings
        if settings.output:
            return _fitting(Path(settings.output), settings)
        if settings.format == "parts":
            return self.folder
        suffix = "" if settings.precision == "fp32" else f"-{settings.precision}"
        stem = f"{self.name}-{self.integration.steps}steps{suffix}"
        if settings.format == "triton":
            return Path("triton") / self.name
        if settings.format == "tensorrt":
            return Path(stem if settings.source == "parts" else f"{stem}-{settings.source}.engine")
        return Path(f"{stem}-adaptive.onnx" if settings.format == "onnx-adaptive" else f"{stem}.onnx")

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.report.seconds[text] = round(time.perf_counter() - began, 3)
        self.say(f"  {text:<44} {self.report.seconds[text]:7.1f} s")

    def passed(self, *done: Check) -> None:
        self.report.checks.extend(done)

    def load(self) -> None:
        """Weights, images, and the pieces at the precision asked for."""
        kind = self.settings.precision
        with self.stage("load the bundle"):
            self.model = ODEViT.from_pretrained(self.folder)
            self.pictures = precision.pictures(self.config, self.folder, self.settings.calibration)
        folded = Folded(self.model, self.integration, half=kind == "fp16", quantisable=kind == "int8")
        self.pieces = Pieces(folded)
        if kind == "int8":
            images = precision.needed(self.pictures)
            some = images.pixels[: precision.WATCHED]
            with self.stage(f"measure activations on {len(some)} images"):
                seen = precision.ranges(folded, some)
            symmetric = self.settings.format == "tensorrt"
            self.pieces.quantise = partial(precision.quantise, seen=seen, symmetric=symmetric)

    def images(self, batch: int) -> Array:
        found = self.pictures or precision.noise(self.config, max(checks.BATCHES))
        return found.pixels[np.arange(batch) % len(found.pixels)]

    @torch.no_grad()
    def torch_answer(self, pixels: Array, with_attention: bool = False) -> dict[str, Array]:
        own, x = self.integration, self.model.stem(torch.from_numpy(pixels))
        for point in self.model.trajectory(x, own.steps, own.horizon, own.solver, own.splitting):
            x = point.state
        answer = {"logits": self.model.answer(x).numpy()}
        if with_attention:
            answer["cls_attention"] = self.model.cls_attention(x).numpy()
        return answer

    def save(self, graph: onnx.ModelProto, path: Path, **plain: object) -> None:
        """Write a graph with its metadata to a scratch file, and check the file by itself."""
        write_metadata(graph, self.config, precision=self.settings.precision, **plain)
        onnx.save(graph, path)
        written = onnx.load(path)
        self.passed(*checks.structure(written, OPSET), checks.privacy(written))

    def open(self, path: Path) -> Any:
        with self.stage(f"open {path.name} in onnxruntime"):
            session, seconds = checks.load(path)
        self.report.load_seconds = (self.report.load_seconds or 0.0) + seconds
        return session

    def check_size(self, paths: list[Path], steps: int, extra: float = 0.0) -> None:
        kind = self.settings.precision
        found = sum(path.stat().st_size for path in paths)
        self.passed(checks.size(found, self.config, kind, checks.evaluations(self.config, steps), extra))

    def check_answers(self, answer: Callable[[Array], Mapping[str, Array]], with_attention: bool = False) -> None:
        """Values against torch; at lower precision also the answers on images."""
        kind = self.settings.precision
        with self.stage("compare with torch at batch 1, 3 and 8"):
            expected = partial(self.torch_answer, with_attention=with_attention)
            self.passed(*checks.values(expected, answer, self.images, kind))
        if kind != "fp32":
            self.check_precision(lambda pixels: answer(pixels)["logits"])

    def check_precision(self, logits: Callable[[Array], Array]) -> None:
        images = self.pictures or precision.noise(self.config)
        with self.stage(f"compare with fp32 on {len(images.pixels)} images"):
            check, self.report.comparison = precision.compare(
                lambda pixels: self.torch_answer(pixels)["logits"],
                logits,
                images,
                self.settings.precision,
                self.settings.max_drop,
            )
        self.passed(check)
        self.say(
            "  "
            + ", ".join(
                f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in self.report.comparison.items()
            )
        )

    def check_quantised(self, graph: onnx.ModelProto, steps: int) -> None:
        if self.settings.precision == "int8":
            found, wanted = precision.count(graph), steps * precision.quantised(self.pieces.folded)
            self.passed(checks.expect("8-bit matrix products", found == wanted, found, wanted))

    @property
    def attention_bytes(self) -> float:
        """A projection kept as floats beside its 8-bit form, for attention maps."""
        width = self.config.architecture.width
        return 12.0 * width * width if self.settings.precision == "int8" else 0.0

    def unrolled(self, path: Path) -> onnx.ModelProto:
        """The unrolled graph, written to `path` and checked."""
        maps, steps = self.settings.with_attention, self.integration.steps
        with self.stage(f"trace {steps} steps"):
            graph = unrolled(self.pieces, maps)
        self.save(graph, path, format="onnx")
        self.check_quantised(graph, steps)
        self.check_size([path], steps, self.attention_bytes if maps else 0.0)
        session = self.open(path)
        names = [output.name for output in session.get_outputs()]
        self.check_answers(lambda pixels: dict(zip(names, session.run(names, {"pixel_values": pixels}))), maps)
        return graph

    def adaptive(self, path: Path, compact: bool = True) -> onnx.ModelProto:
        """The adaptive graph, written to `path` and checked."""
        with self.stage("trace one step and its loop"):
            graph = adaptive(self.pieces, self.config, compact)
        self.save(graph, path, format="onnx-adaptive")
        self.check_quantised(graph, 1)
        self.check_size([path], 1)
        session = self.open(path)
        if self.settings.precision == "fp32":
            with self.stage("compare depths at batch 1, 3 and 8"):
                self.passed(*(self._depths(session, batch) for batch in checks.BATCHES))
        else:
            whole = {"kappa": np.array(np.inf, np.float32)}
            self.check_answers(lambda pixels: {"logits": session.run(["logits"], {"pixel_values": pixels, **whole})[0]})
        return graph

    def _depths(self, session: Any, batch: int) -> Check:
        """By the bundle's own rule, by a loose one, and with a budget."""
        pixels, kappa, steps = self.images(batch), self.config.exit.threshold, self.integration.steps
        for threshold, budget in ((kappa, steps), (kappa / 4, steps), (kappa, max(1, steps // 2))):
            feed = {"pixel_values": pixels, "kappa": np.array(threshold, np.float32), "max_steps": np.array(budget)}
            found = dict(zip(("logits", "steps", "exit_reason"), session.run(None, feed)))
            wanted = checks.reference_depths(self.model, self.config, pixels, budget, threshold)
            check = checks.depths(wanted, found, batch)
        return check

    def parts(self, scratch: Path) -> dict[str, onnx.ModelProto]:
        """Stem, step and attention, written to `scratch` and checked along a whole trajectory."""
        with self.stage("trace stem, step and attention"):
            graphs = self.pieces.parts()
        for name, graph in graphs.items():
            self.save(graph, scratch / name, format="parts", part=name.removesuffix(".onnx"))
        self.check_quantised(graphs[bundle.STEP], 1)
        width = self.config.architecture.width
        projection = 3 * width * width * checks.WEIGHT_BYTES["fp16" if self.settings.precision == "fp16" else "fp32"]
        self.check_size([scratch / name for name in graphs], 1, projection)
        sessions = {name: self.open(scratch / name) for name in graphs}
        self.check_answers(partial(self._run_parts, sessions), with_attention=True)
        return graphs

    def _run_parts(self, sessions: Mapping[str, Any], pixels: Array) -> dict[str, Array]:
        state = sessions[bundle.STEM].run(None, {"pixel_values": pixels})[0]
        size = np.full(len(pixels), self.integration.step_size, np.float32)
        for _ in range(self.integration.steps):
            values = sessions[bundle.STEP].run(None, {"state": state, "step_size": size})
            found = dict(zip(STEP_OUTPUTS, values))
            state = found["next_state"]
        maps = sessions[bundle.ATTENTION].run(None, {"state": state})[0]
        return {"logits": found["logits"], "cls_attention": maps}


def _integration(config: Config, settings: Settings) -> Integration:
    own = config.integration
    for name, known in (("solver", bundle.SOLVERS), ("splitting", bundle.SPLITTINGS)):
        given = getattr(settings, name)
        if given is not None and given not in known:
            raise UsageError(formats.nearest(name, given, known))
    return Integration(
        own.horizon if settings.horizon is None else settings.horizon,
        own.steps if settings.steps is None else settings.steps,
        settings.solver or own.solver,
        settings.splitting or own.splitting,
    )


def _fitting(output: Path, settings: Settings) -> Path:
    """The output asked for, if its name says what it will be: other tools go by that."""
    single = settings.format == "tensorrt" and settings.source != "parts"
    wanted = ".onnx" if settings.format.startswith("onnx") else ".engine" if single else None
    if wanted and output.suffix != wanted:
        raise UsageError(f"--output {output} must end in {wanted} for the format {settings.format}")
    if wanted is None and output.is_file():
        raise UsageError(f"--output {output} is a file, and the format {settings.format} makes a folder")
    return output


def _describe(own: Integration) -> str:
    return f"{own.steps} steps of {own.solver} ({own.splitting}) over horizon {own.horizon:g}"


def _word(path: Path) -> str:
    return shlex.quote(str(path))


def make_onnx(job: Job, scratch: Path) -> dict[str, Path]:
    job.unrolled(scratch / "model.onnx")
    job.report.next = f"odevit-serve predict --model {_word(job.target)} image.jpg"
    return {"model.onnx": job.target}


def make_adaptive(job: Job, scratch: Path) -> dict[str, Path]:
    job.adaptive(scratch / "model.onnx")
    job.report.next = f"odevit-serve predict --model {_word(job.target)} image.jpg"
    return {"model.onnx": job.target}


def make_parts(job: Job, scratch: Path) -> dict[str, Path]:
    names = list(job.parts(scratch))
    if job.target != job.folder:
        (scratch / bundle.CONFIG).write_text(job.config.to_json(), encoding="utf-8")
        names.append(bundle.CONFIG)
    job.report.next = f"odevit-serve predict --model {_word(job.target)} image.jpg"
    return {name: job.target / name for name in names}


def make_triton(job: Job, scratch: Path) -> dict[str, Path]:
    name = job.target.name
    job.passed(triton.lay_out(scratch / name, job.config, name, job.batch, job.settings.with_attention))
    job.unrolled(scratch / name / "1" / "model.onnx")
    job.report.next = f"tritonserver --model-repository {_word(job.target.parent)}"
    return {name: job.target}


def make_tensorrt(job: Job, scratch: Path) -> dict[str, Path]:
    trt = tensorrt.find_module()
    if hasattr(trt, "ComputeCapability"):
        tensorrt.capability(trt, job.settings.gpu)  # a wrong name is told before any work
    (scratch / "onnx").mkdir()
    if job.settings.source == "parts":
        graphs = job.parts(scratch / "onnx")
        targets = {name.replace(".onnx", ".engine"): job.target / name.replace(".onnx", ".engine") for name in graphs}
    else:
        path = scratch / "onnx" / "model.onnx"
        graph = job.unrolled(path) if job.settings.source == "unrolled" else job.adaptive(path, compact=False)
        graphs, targets = {"model.onnx": graph}, {"model.engine": job.target}
    for name, graph in graphs.items():
        with job.stage(f"build {name.removesuffix('.onnx')} for {job.settings.gpu} by {trt.__name__}"):
            engine = tensorrt.build(trt, graph.SerializeToString(), job.batch, job.settings.gpu)
        (scratch / name.replace(".onnx", ".engine")).write_bytes(engine)
    (scratch / bundle.CONFIG).write_text(job.config.to_json(), encoding="utf-8")
    beside = job.target / bundle.CONFIG if job.settings.source == "parts" else job.target.with_suffix(".json")
    job.report.next = (
        f"on a machine with that GPU: python -m odevit_serve.export.tensorrt {_word(next(iter(targets.values())))}"
    )
    return {**targets, bundle.CONFIG: beside}


MAKERS: dict[str, Callable[[Job, Path], dict[str, Path]]] = {
    "onnx": make_onnx,
    "onnx-adaptive": make_adaptive,
    "parts": make_parts,
    "tensorrt": make_tensorrt,
    "triton": make_triton,
}


def export(source: str | None, settings: Settings, say: Callable[[str], None] = lambda text: None) -> Report:
    """Make what `settings` ask for of the bundle `source`; a failed check leaves nothing behind."""
    began = time.perf_counter()
    job = Job(source, settings, say)
    refuse_existing(job)
    try:
        beside = job.target if settings.format == "parts" and job.target.is_dir() else job.target.parent
        beside.mkdir(parents=True, exist_ok=True)  # on the same disk, or a move would not be one step
        scratch = Path(tempfile.mkdtemp(prefix=".odevit-serve-", dir=beside))
    except OSError as error:
        raise UserError(f"cannot write beside {job.target}: {error.strerror}") from None
    try:
        job.load()
        made = MAKERS[settings.format](job, scratch)
        for name, target in made.items():
            install(scratch / name, target, scratch)
            job.report.files[str(target)] = _bytes(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    job.report.seconds["total"] = round(time.perf_counter() - began, 3)
    return job.report


def refuse_existing(job: Job) -> None:
    if job.settings.overwrite:
        return
    parts = job.settings.format == "parts"
    there = [job.target / name for name in (bundle.STEM, bundle.STEP, bundle.ATTENTION)] if parts else [job.target]
    for path in there:
        if path.exists():
            raise UsageError(f"{path} exists: add --overwrite to replace it, or choose another with --output")


def install(made: Path, target: Path, scratch: Path) -> None:
    """Move a finished file or folder into place, in one step each."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():  # a folder cannot be replaced by a rename: the old one steps aside first
            os.rename(target, scratch / f"old-{target.name}")
        os.replace(made, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None


def _bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size
