"""`onnx`: a fixed number of steps, one after the other, all reading the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .format import DEPTH, PRECISION, Format

if TYPE_CHECKING:
    import onnx

    from ..job import ExportJob


def write(job: ExportJob, path: Path) -> onnx.ModelProto:
    """The unrolled graph, written to `path` and checked."""
    from ...runtime.graphs import unrolled_graph

    maps, steps = job.settings.with_attention, job.integration.steps
    with job.stage(f"put {steps} steps together"):
        graph = unrolled_graph(job.parts, job.integration, maps)
    job.save(graph, path, format="onnx")
    job.check_quantised(graph, steps)
    job.check_size([path], steps)
    session = job.open(path)
    names = [output.name for output in session.get_outputs()]
    job.check_answers(lambda pixels: dict(zip(names, session.run(names, {"pixel_values": pixels}))), maps)
    return graph


def make(job: ExportJob, scratch: Path) -> dict[str, Path]:
    write(job, scratch / "model.onnx")
    job.report.next = f"odevit-serve predict --model {job.quoted} image.jpg"
    return {"model.onnx": job.target}


FORMAT = Format(
    "onnx",
    "embedding anywhere",
    "fixed, unrolled; weights stored once",
    "{name}-{steps}steps.onnx",
    (*DEPTH, *PRECISION, "with-attention"),
    target=lambda job: Path(f"{job.stem}.onnx"),
    make=make,
    suffix=lambda job: ".onnx",
)
