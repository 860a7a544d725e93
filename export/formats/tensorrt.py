"""TensorRT in one place: building an engine from an ONNX model, and running one.

One builder serves `tensorrt` (10 and 11) and `tensorrt_rtx`. RTX builds for a GPU generation that is named, so it needs
no GPU to build; full TensorRT builds for the GPU it finds. Running an engine needs a GPU; that part is still to be
verified on one.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import MissingExtra, UsageError, UserError, nearest
from . import onnx_adaptive, onnx_unrolled, parts
from .format import DEPTH, PRECISION, Format

if TYPE_CHECKING:
    from ..job import ExportJob

GENERATIONS = {"ampere": "SM80", "ampere-rtx": "SM86", "ada": "SM89", "blackwell-rtx": "SM120"}
MODULES = ("tensorrt_rtx", "tensorrt")
Array = np.ndarray[Any, Any]


def no_cuda() -> str | None:
    """Why CUDA cannot be used here, or None when it can.

    Asked of the driver itself, before TensorRT is touched: its runtime can crash the process where there is no driver.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"there is no NVIDIA driver ({name} cannot be loaded)"
    if code := driver.cuInit(0):
        return f"the NVIDIA driver does not start (error {code})"
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver sees no GPU"
    return None


def find_module() -> Any:
    """`tensorrt_rtx` where it is installed, else `tensorrt`; the latter needs a GPU to build for."""
    for name in MODULES:
        if importlib.util.find_spec(name) is not None:
            if name == "tensorrt" and (reason := no_cuda()):
                raise UserError(
                    f"tensorrt builds for the GPU of this machine, and {reason}: install tensorrt-rtx instead"
                )
            return importlib.import_module(name)
    raise MissingExtra("tensorrt-rtx")


def parse_batch(text: str) -> tuple[int, int, int]:
    """`1,8,64`: the smallest, the usual and the largest batch."""
    try:
        low, usual, high = (int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--batch takes three numbers like 1,8,64 (smallest, usual, largest), not {text!r}") from None
    if not 1 <= low <= usual <= high:
        raise UsageError(f"--batch takes three increasing numbers of at least 1, not {text!r}")
    return low, usual, high


def capability(trt: Any, generation: str) -> Any:
    """The compute capability of a generation by its name (`ada`) or number (`SM89`)."""
    number = GENERATIONS.get(generation.lower(), generation.upper())
    known = {name for name in dir(trt.ComputeCapability) if name.startswith("SM")}
    if number not in known:
        raise UsageError(nearest("GPU generation", generation, [*GENERATIONS, *sorted(known)]))
    return getattr(trt.ComputeCapability, number)


def build(trt: Any, model: bytes, batch: tuple[int, int, int], generation: str | None = None) -> bytes:
    """The serialised engine of an ONNX model. `trt` is the module; what TensorRT refuses is told in its own words."""
    log = _log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(_flags(trt))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model):
        raise UserError(f"{trt.__name__} refuses the graph: {_refusal(parser)}")
    config = builder.create_builder_config()
    if generation is not None and hasattr(trt, "ComputeCapability"):
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability(trt, generation), 0)
    config.add_optimization_profile(_profile(builder, network, batch))
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise UserError(f"{trt.__name__} cannot build an engine: {log.said or 'it does not say why'}")
    return bytes(engine)


def _flags(trt: Any) -> int:
    """Types as they stand in the graph: asked for in 10, and the only way from 11 on."""
    major = int(trt.__version__.split(".")[0])
    strongly = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 1 << int(strongly) if trt.__name__ == "tensorrt" and major == 10 and strongly is not None else 0


def _log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        """Keeps the last error for our own message, and prints nothing."""

        said = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.Logger.ERROR, trt.Logger.INTERNAL_ERROR) and not self.said:
                self.said = " ".join(message.split())[:300]

    return Log()


def _refusal(parser: Any) -> str:
    if not parser.num_errors:
        return "it does not say why"
    error = parser.get_error(parser.num_errors - 1)
    code = str(error.code()).rpartition(".")[2]
    return f"{code} at {error.node_operator() or 'a node'}: {' '.join(error.desc().split())[:200]}"


def _profile(builder: Any, network: Any, batch: tuple[int, int, int]) -> Any:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = tuple(tensor.shape)
        if -1 in shape:
            low, usual, high = (tuple(count if size == -1 else size for size in shape) for count in batch)
            profile.set_shape(tensor.name, low, usual, high)
    return profile


class TensorRTEngine:
    """A built engine on the GPU: `TensorRTEngine(path).run(pixel_values=images)`.

    It needs a GPU, and torch to hold its memory.
    """

    def __init__(self, path: Path):
        if reason := no_cuda():
            raise UserError(f"{path.name} needs an NVIDIA GPU to run: {reason}")
        trt = find_module()
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise UserError(f"{path} was built for another GPU generation or another version of {trt.__name__}")
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.inputs = [n for n in names if self._engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]
        self._numpy = {name: np.dtype(trt.nptype(self._engine.get_tensor_dtype(name))) for name in names}

    def run(self, **arrays: Array) -> Mapping[str, Array]:
        import torch

        held = {n: torch.from_numpy(np.ascontiguousarray(arrays[n], self._numpy[n])).cuda() for n in self.inputs}
        for name, tensor in held.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise UsageError(f"the engine has no profile for {name} of shape {list(tensor.shape)}")
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            held[name] = torch.from_numpy(np.empty(shape, self._numpy[name])).cuda()
        for name, tensor in held.items():
            self._context.set_tensor_address(name, tensor.data_ptr())
        stream = torch.cuda.current_stream()
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise UserError("the engine did not run")
        stream.synchronize()
        return {name: held[name].cpu().numpy() for name in self.outputs}


def make(job: ExportJob, scratch: Path) -> dict[str, Path]:
    from ... import bundle

    trt = find_module()
    if hasattr(trt, "ComputeCapability"):
        capability(trt, job.settings.gpu)  # a wrong name is told before any work
    (scratch / "onnx").mkdir()
    if job.settings.source == "parts":
        graphs = parts.write(job, scratch / "onnx")
        targets = {name.replace(".onnx", ".engine"): job.target / name.replace(".onnx", ".engine") for name in graphs}
    else:
        path = scratch / "onnx" / "model.onnx"
        unrolled = job.settings.source == "unrolled"
        graph = onnx_unrolled.write(job, path) if unrolled else onnx_adaptive.write(job, path, compact=False)
        graphs, targets = {"model.onnx": graph}, {"model.engine": job.target}
    for name, graph in graphs.items():
        with job.stage(f"build {name.removesuffix('.onnx')} for {job.settings.gpu} by {trt.__name__}"):
            engine = build(trt, graph.SerializeToString(), job.batch, job.settings.gpu)
        (scratch / name.replace(".onnx", ".engine")).write_bytes(engine)
    (scratch / bundle.CONFIG).write_text(job.config.to_json(), encoding="utf-8")
    beside = job.target / bundle.CONFIG if job.settings.source == "parts" else job.target.with_suffix(".json")
    first = shlex.quote(str(next(iter(targets.values()))))
    job.report.next = f"on a machine with that GPU: python -m odevit_serve.export.run_engine {first}"
    return {**targets, bundle.CONFIG: beside}


def _target(job: ExportJob) -> Path:
    return Path(job.stem if job.settings.source == "parts" else f"{job.stem}-{job.settings.source}.engine")


FORMAT = Format(
    "tensorrt",
    "NVIDIA GPUs",
    "that of its source: unrolled, parts or adaptive",
    "{name}-{steps}steps-{source}.engine, or a folder of engines",
    (*DEPTH, *PRECISION, "with-attention", "batch", "gpu", "source"),
    target=_target,
    make=make,
    extras=("tensorrt-rtx",),
    suffix=lambda job: "" if job.settings.source == "parts" else ".engine",
)
