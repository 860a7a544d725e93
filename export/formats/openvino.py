"""`openvino`: OpenVINO's own format (IR), an .xml with the graph and a .bin with the weights.

The graphs are the ONNX ones, converted. What is compared with the runtime is the file read back and compiled, in fp32:
left to itself, OpenVINO computes in bf16 on CPUs that have it, which is another model than the one that was measured.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import bundle
from ...errors import MissingExtra, UsageError, UserError
from . import onnx_adaptive, onnx_unrolled
from .format import DEPTH, PRECISION, Format

if TYPE_CHECKING:
    import onnx

    from ..job import ExportJob

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
Array = np.ndarray[Any, Any]


def library() -> Any:
    try:
        import openvino
    except ImportError:
        raise MissingExtra("openvino") from None
    return openvino


def convert(graph: onnx.ModelProto, source: Path, target: Path) -> None:
    """The graph in the ONNX file `source`, with its metadata, as `target`.xml and .bin."""
    ov = library()
    try:
        model = ov.Core().read_model(source)  # convert_model would report its use to the vendor
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"OpenVINO refuses the graph: {reason[:300]}") from None
    for entry in graph.metadata_props:
        model.set_rt_info(entry.value, entry.key)
    ov.save_model(model, target, compress_to_fp16=False)  # precision is that of the graph


def compiled(path: Path) -> Any:
    """The file on the CPU.

    In a thread that ends at once: OpenVINO gives the thread that compiles another stack for signals, and after the
    first of two models is gone, that of the second is memory which is gone, too. The next signal would end the process.
    """
    core = library().Core()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(core.compile_model, path, "CPU", F32).result()


class Compiled:
    """A file of this format on the CPU, called as a session of onnxruntime is."""

    def __init__(self, path: Path):
        self.model = compiled(path)
        self.names = [output.any_name for output in self.model.outputs]

    def run(self, names: Sequence[str] | None, feed: dict[str, Array]) -> list[Array]:
        known = {port.any_name for port in self.model.inputs}  # optional inputs of the graph are constants here
        found = self.model({name: value for name, value in feed.items() if name in known})
        return [found[name] for name in names or self.names]


def make(job: ExportJob, scratch: Path) -> dict[str, Path]:
    from .. import checks

    library()  # said before any work
    source = job.settings.source
    if source == "adaptive" and job.settings.precision != "fp32":
        raise UsageError(
            f"--source adaptive is fp32 in OpenVINO, not {job.settings.precision}: its threshold cannot be set, so the "
            "answers at full depth could not be compared"
        )
    beside = job.target.with_suffix(".bin")
    if source != "parts" and beside.exists() and not job.settings.overwrite:
        raise UsageError(f"{beside} exists: add --overwrite to replace it, or choose another with --output")
    (scratch / "onnx").mkdir()
    path = scratch / "onnx" / "model.onnx"
    if source == "parts":
        graphs = _parts(job, path.parent)
    else:
        graphs = {"model": onnx_unrolled.write(job, path) if source == "unrolled" else onnx_adaptive.write(job, path)}
    made = []
    for name, graph in graphs.items():
        with job.stage(f"convert {name} to OpenVINO's format"):
            convert(graph, path.with_name(f"{name}.onnx"), scratch / f"{name}.xml")
        made += [f"{name}.xml", f"{name}.bin"]
        text = (scratch / f"{name}.xml").read_text(encoding="utf-8")
        job.passed(checks.privacy(graph, [text]))
    if source != "parts":
        job.passed(checks.weights((scratch / "model.bin").stat().st_size, job.parts))
    _check(job, {name: Compiled(scratch / f"{name}.xml") for name in graphs})
    first = shlex.quote(str(job.target / "stem.xml" if source == "parts" else job.target))
    shape = ",".join(str(size) for size in job.config.preprocessing.input_size)
    job.report.next = f"benchmark_app -m {first} -infer_precision f32 -data_shape 'pixel_values[1,{shape}]'"
    if source == "parts":
        (scratch / bundle.CONFIG).write_text(job.config.to_json(), encoding="utf-8")
        return {name: job.target / name for name in (*made, bundle.CONFIG)}
    return {"model.bin": beside, "model.xml": job.target}


def _parts(job: ExportJob, folder: Path) -> dict[str, onnx.ModelProto]:
    """Stem, step and attention of the bundle, arranged for the solver asked for."""
    from ...runtime.graph_files import read
    from ...runtime.graphs import stem_graph, step_graph

    with job.stage("put stem and step together"):
        graphs = {
            "stem": stem_graph(job.parts, job.integration),
            "step": step_graph(job.parts, job.integration),
            "attention": read(job.folder / bundle.ATTENTION),
        }
    for name, graph in graphs.items():
        job.save(graph, folder / f"{name}.onnx", format="openvino", part=name)
    job.check_quantised(graphs["step"], 1)
    return graphs


def _check(job: ExportJob, compiled: dict[str, Compiled]) -> None:
    """The converted graphs against the runtime, as those that they were made of."""
    if job.settings.source == "parts":
        sessions = {f"{name}.onnx": session for name, session in compiled.items()}
        job.check_answers(lambda pixels: job.run_parts(sessions, pixels), with_attention=True)
        return
    session = compiled["model"]
    if job.settings.source == "adaptive":
        with job.stage("compare depths at batch 1, 3 and 8"):
            job.check_depths(session, settable=False)
        return
    names = session.names
    job.check_answers(
        lambda pixels: dict(zip(names, session.run(names, {"pixel_values": pixels}))), job.settings.with_attention
    )


def _target(job: ExportJob) -> Path:
    return Path(f"{job.stem}-openvino" if job.settings.source == "parts" else f"{job.stem}-{job.settings.source}.xml")


FORMAT = Format(
    "openvino",
    "Intel CPUs, GPUs and NPUs",
    "that of its source: unrolled, parts or adaptive",
    "{name}-{steps}steps-{source}.xml and .bin, or a folder of them",
    (*DEPTH, *PRECISION, "with-attention", "source"),
    target=_target,
    make=make,
    extras=("openvino",),
    suffix=lambda job: "" if job.settings.source == "parts" else ".xml",
)
