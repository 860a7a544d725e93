"""What an ONNX file from somebody else may do: it is checked before onnxruntime opens it.

Refused are data outside of the file's folder, operators that are not onnxruntime's own, references to compiled code,
and loops whose number of iterations is not a constant of the file. Memory is bounded while it runs (`bound`). What no
check can tell, such as how long a step takes, is up to whoever passes `trust`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import MODELS
from ..errors import UserError

if TYPE_CHECKING:
    import onnx

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
COMPILED = "EPContext"  # an operator that names a file of compiled code
MOST_ROUNDS = 10_000
MEMORY = 4 * 2**30  # bytes that all graphs of a process which are not trusted hold at once; half of the machine at most
_bounded = False


def is_ours(path: Path) -> bool:
    """Whether the file came with this package."""
    return MODELS.resolve() in path.resolve().parents


def check(path: Path) -> None:
    """Refuse a file that reaches beyond itself, in one sentence."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors, and those of the file system
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a readable ONNX file: {reason[:200]}") from None
    why = _reason(model, path)
    if why:
        raise UserError(f"{path} {why}: if you know where it comes from, pass --trust (in Python, trust=True)")


def _reason(model: onnx.ModelProto, path: Path) -> str | None:
    own = {(function.domain, function.name) for function in model.functions}
    for tensor in _tensors(model):
        if tensor.data_location == tensor.EXTERNAL:
            location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
            if not _inside(location, path):
                return f"refers to data outside of its folder ({location[:100]!r})"
    constants = _constants(model)
    for node in _nodes(model):
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        if (node.domain, node.op_type) not in own and node.domain not in DOMAINS:
            return f"has an operator that is not onnxruntime's own ({name[:100]!r})"
        if node.op_type == COMPILED:
            return "refers to compiled code"
        if node.op_type == "Loop" and not 0 <= constants.get(node.input[0] if node.input else "", -1) <= MOST_ROUNDS:
            return "has a loop without a fixed number of iterations"
    return None


def _inside(location: str, path: Path) -> bool:
    """Whether a file is beside the model. The Hub's cache has links for both; they lead to one folder."""
    if not location or "\0" in location or os.path.isabs(location) or ".." in Path(location.replace("\\", "/")).parts:
        return False
    target = (path.parent / location).resolve()
    return any(folder in target.parents for folder in (path.parent.resolve(), path.resolve().parent))


def _graphs(model: onnx.ModelProto) -> Iterator[Any]:
    """All graphs and functions, those inside of nodes as well."""
    waiting: list[Any] = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [attribute.g] if attribute.HasField("g") else []
                waiting += attribute.graphs


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in _graphs(model):
        yield from graph.node


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in _graphs(model):
        yield from getattr(graph, "initializer", ())
        for sparse in getattr(graph, "sparse_initializer", ()):
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)


def _constants(model: onnx.ModelProto) -> dict[str, float]:
    """Whole numbers that the file holds, by name; one that is given twice counts as none."""
    import onnx

    found: dict[str, float] = {}
    for graph in _graphs(model):
        pairs = [(tensor.name, tensor) for tensor in getattr(graph, "initializer", ())]
        for node in graph.node:
            if node.op_type == "Constant" and not node.domain:
                pairs += [(node.output[0], a.t) for a in node.attribute if a.name == "value" and node.output]
        for name, tensor in pairs:
            single = tensor.data_type == onnx.TensorProto.INT64 and math.prod(tensor.dims) == 1
            if single and tensor.data_location != tensor.EXTERNAL and name not in found:
                found[name] = int(onnx.numpy_helper.to_array(tensor).reshape(-1)[0])
            else:
                found[name] = math.nan
    inputs = {value.name for value in model.graph.input}  # an initializer that is an input too can be set by a caller
    return {name: value for name, value in found.items() if name not in inputs}


def bound(runtime: Any, options: Any) -> None:
    """Have a session take its memory from one bounded pool of the process. Past the bound a run fails."""
    global _bounded
    if not _bounded:
        info = runtime.OrtMemoryInfo("Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)
        runtime.create_and_register_allocator(info, runtime.OrtArenaCfg({"max_mem": _memory()}))
        _bounded = True
    options.add_session_config_entry("session.use_env_allocators", "1")


def _memory() -> int:
    try:
        return min(MEMORY, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return MEMORY
