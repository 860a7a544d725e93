"""`parts`: the three graphs of a bundle, from its weights. The one format that needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ... import bundle
from .format import PRECISION, Format

if TYPE_CHECKING:
    import onnx

    from ..job import ExportJob

NAMES = (bundle.STEM, bundle.STEP, bundle.ATTENTION)


def write(job: ExportJob, scratch: Path) -> dict[str, onnx.ModelProto]:
    """Stem, step and attention, written to `scratch` and checked along a whole trajectory.

    In fp32 they are traced from the weights; at lower precision they are made of the bundle's own.
    """
    from ...runtime.graph_files import read
    from ...runtime.graphs import stem_graph, step_graph

    if job.settings.precision == "fp32":
        from ..pieces import make as traced

        with job.stage("trace stem, step and attention"):
            graphs = traced(job.torch_model)
    else:
        with job.stage("put stem and step together"):
            graphs = {
                bundle.STEM: stem_graph(job.parts, job.integration),
                bundle.STEP: step_graph(job.parts, job.integration),
                bundle.ATTENTION: read(job.folder / bundle.ATTENTION),
            }
    for name, graph in graphs.items():
        job.save(graph, scratch / name, format="parts", part=name.removesuffix(".onnx"))
    job.check_quantised(graphs[bundle.STEP], 1)
    sessions = {name: job.open(scratch / name) for name in graphs}
    job.check_answers(lambda pixels: job.run_parts(sessions, pixels), with_attention=True)
    return graphs


def make(job: ExportJob, scratch: Path) -> dict[str, Path]:
    names = list(write(job, scratch))
    if job.target != job.folder:
        (scratch / bundle.CONFIG).write_text(job.config.to_json(), encoding="utf-8")
        names.append(bundle.CONFIG)
    job.report.next = f"odevit-serve predict --model {job.quoted} image.jpg"
    return {name: job.target / name for name in names}


FORMAT = Format(
    "parts",
    "the engine of `predict` and `serve`",
    "per image, decided by the runtime",
    "stem.onnx, step.onnx, attention.onnx in the bundle",
    PRECISION,
    target=lambda job: job.folder,
    make=make,
    extras=("export",),
    in_bundle=NAMES,
)
