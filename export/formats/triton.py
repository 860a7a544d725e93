"""`triton`: a model repository that Triton Inference Server can be started on."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import Config
from ...errors import MissingExtra, UserError
from . import onnx_unrolled
from .format import DEPTH, PRECISION, Format

if TYPE_CHECKING:
    from ..checks import Check
    from ..job import ExportJob

LABELS, CONFIG = "labels.txt", "config.pbtxt"


def config_text(config: Config, name: str, batch: tuple[int, int, int], with_attention: bool = False) -> str:
    """config.pbtxt: one input, logits with labels, and requests gathered into batches for half a millisecond."""
    shape = config.architecture
    _, usual, most = batch
    preferred = ", ".join(str(size) for size in sorted({usual, most}))
    outputs = [f'{{ name: "logits" data_type: TYPE_FP32 dims: [ {shape.classes} ] label_filename: "{LABELS}" }}']
    if with_attention:
        outputs.append(f'{{ name: "cls_attention" data_type: TYPE_FP32 dims: [ {shape.heads}, {shape.patches} ] }}')
    image = f"{shape.channels}, {shape.image_size}, {shape.image_size}"
    joined = ",\n  ".join(outputs)
    return f"""name: {json.dumps(name)}
backend: "onnxruntime"
max_batch_size: {most}
input [
  {{ name: "pixel_values" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ {image} ] }}
]
output [
  {joined}
]
dynamic_batching {{
  preferred_batch_size: [ {preferred} ]
  max_queue_delay_microseconds: 500
}}
"""


def check_config(text: str) -> Check:
    """The text parsed by the schema that Triton publishes in its client package."""
    from ..checks import Check

    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError:
        raise MissingExtra("triton") from None
    message: Any = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise UserError(f"check failed, nothing was written: Triton's schema refuses config.pbtxt: {error}") from None
    return Check("config.pbtxt", "valid", "Triton's schema")


def lay_out(folder: Path, config: Config, name: str, batch: tuple[int, int, int], with_attention: bool) -> Check:
    """Write all but the graph, which goes to `1/model.onnx`."""
    (folder / "1").mkdir(parents=True)
    text = config_text(config, name, batch, with_attention)
    check = check_config(text)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    labels = config.labels or tuple(str(i) for i in range(config.architecture.classes))
    (folder / LABELS).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    return check


def make(job: ExportJob, scratch: Path) -> dict[str, Path]:
    name = job.target.name
    job.passed(lay_out(scratch / name, job.config, name, job.batch, job.settings.with_attention))
    onnx_unrolled.write(job, scratch / name / "1" / "model.onnx")
    job.report.next = f"tritonserver --model-repository {shlex.quote(str(job.target.parent))}"
    return {name: job.target}


FORMAT = Format(
    "triton",
    "Triton Inference Server",
    "fixed, unrolled",
    "triton/{name}/: config.pbtxt, labels.txt, 1/model.onnx",
    (*DEPTH, *PRECISION, "with-attention", "batch"),
    target=lambda job: Path("triton") / job.name,
    make=make,
    extras=("triton",),
)
