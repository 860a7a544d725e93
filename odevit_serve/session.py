"""onnxruntime sessions: opening graphs, choosing devices, reading what a file says about itself."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import bundle
from .bundle import METADATA_KEY, Config
from .errors import UsageError, UserError

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
PROVIDERS = {"cpu": [CPU], "cuda": [CUDA, CPU], "tensorrt": [TENSORRT, CUDA, CPU]}
DEVICES = ("cpu", "cuda", "tensorrt", "auto")
# How long a session's idle threads look for work before they sleep: past the pause between two steps, so that nobody
# has to be woken for the next, and no longer, so that they do not keep a core from the other sessions' threads.
SPIN_MICROSECONDS = "300"
STEP_OUTPUTS = ("next_state", "logits", "margin", "speed", "cls_speed")


def runtime() -> Any:
    """The onnxruntime module, or a sentence about what is wrong with its installation."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"onnxruntime cannot be imported ({error}): pip install onnxruntime") from None
    if not hasattr(onnxruntime, "InferenceSession"):  # what removing one of two wheels leaves behind
        raise UserError(
            "the onnxruntime package is incomplete, as it is after one of two onnxruntime wheels was removed: "
            "pip install --force-reinstall onnxruntime"
        )
    return onnxruntime


def clash(folder: Path | None = None) -> str | None:
    """A sentence when several onnxruntime wheels share one folder: the last one has overwritten the others."""
    if folder is None:
        folder = Path(runtime().__file__).parents[1]
    names = sorted(
        entry.split("-")[0].replace("_", "-")
        for entry in os.listdir(folder)
        if entry.startswith("onnxruntime") and entry.endswith(".dist-info") and "extensions" not in entry
    )
    if len(names) < 2:
        return None
    return (
        f"{' and '.join(names)} are both installed and overwrite each other's files: "
        f"pip uninstall -y {' '.join(names)}, then install the one you need"
    )


_told: set[str] = set()
_absent: set[str] = set()  # providers that did not come up; asking again would take as long and end the same


def _warn_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _why_not(ort: Any, provider: str) -> str:
    """Why a provider did not come up; the loader names the library it misses."""
    if provider not in ort.get_available_providers():
        return clash() or f"this onnxruntime has no {provider} (pip install onnxruntime-gpu in place of onnxruntime)"
    library = {CUDA: "cuda", TENSORRT: "tensorrt"}[provider]
    path = Path(ort.__file__).parent / "capi" / f"libonnxruntime_providers_{library}.so"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        reason = str(error)
        if ": undefined symbol" not in reason:  # that one is how the library looks outside of onnxruntime
            return reason.replace(f"{path.parent}/", "")
    return clash() or "the provider could not be set up: no usable GPU or driver"


def open_session(source: Path | bytes, device: str = "cpu", threads: int | None = None) -> onnxruntime.InferenceSession:
    """A session on the device asked for. `auto` falls back to the CPU with one warning; a named device is a demand."""
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, not {threads}")
    ort = runtime()
    wanted = "cuda" if device == "auto" else device
    provider = PROVIDERS[wanted][0]
    session = None
    if provider in ort.get_available_providers() and provider not in _absent:
        session = _create(ort, source, PROVIDERS[wanted], threads)
        if session.get_providers()[0] != provider:  # what it runs on, not what the wheel claims to have
            _absent.add(provider)
    if session is None or provider in _absent:
        if device != "auto":
            raise UserError(f"device {device!r} cannot be had: {_why_not(ort, provider)}")
        _warn_once(f"running on the CPU: {_why_not(ort, provider)}")
    both = clash()
    if both:
        _warn_once(both)
    return session or _create(ort, source, [CPU], threads)


def _create(ort: Any, source: Path | bytes, providers: list[str], threads: int | None) -> Any:
    """A session; one on the CPU where the providers asked for cannot be set up."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures are told in our own words
    if threads is not None:
        options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
    name = "the graph" if isinstance(source, bytes) else str(source)
    if isinstance(source, Path) and not source.is_file():
        raise UserError(f"{source} does not exist" if not source.exists() else f"{source} is not a file")
    content = source if isinstance(source, bytes) else str(source)
    ort.set_default_logger_severity(4)
    try:
        # Without onnxruntime's own fallback, which prints to stdout.
        return ort.InferenceSession(content, options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's own classes share no other base
        if providers != [CPU]:
            return _create(ort, source, [CPU], threads)
        raise UserError(f"{name} is no readable ONNX file: {_first_line(error)}") from None
    finally:
        ort.set_default_logger_severity(2)


def _first_line(error: Exception) -> str:
    """What onnxruntime says, less its error numbers and the places in its own source."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from .* failed:", "", text)
    return re.sub(r"^/onnxruntime_src.*\) ", "", text).strip()[:300]


def _signature(values: list[Any]) -> dict[str, list[Any]]:
    return {value.name: list(value.shape) for value in values}


class Graphs:
    """The three graphs of a bundle, checked against its configuration."""

    def __init__(self, folder: Path, config: Config, device: str = "cpu", threads: int | None = None):
        self.folder, self.config, self.device, self.threads = folder, config, device, threads
        self.stem = self._open(bundle.STEM)
        self.step = self._open(bundle.STEP)
        shape = config.architecture
        self._expect(self.stem, bundle.STEM, "inputs", {"pixel_values": list(config.preprocessing.input_size)})
        state = _signature(self.stem.get_outputs()).get("state", [])[1:]
        if len(state) != 2 or not all(isinstance(size, int) for size in state):
            raise UserError(f"{folder / bundle.STEM}: output state has shape {state}, not [tokens, width]")
        if state[1] != shape.width or state[0] % shape.tokens:
            raise UserError(
                f"{folder / bundle.STEM}: state has {state[0]} tokens of width {state[1]}, "
                f"{bundle.CONFIG} says {shape.tokens} of {shape.width}"
            )
        self.state_shape: tuple[int, int] = (state[0], state[1])
        self._expect(self.step, bundle.STEP, "inputs", {"state": state, "step_size": []})
        outputs = {"next_state": state, "logits": [shape.classes], "margin": [], "speed": [], "cls_speed": []}
        self._expect(self.step, bundle.STEP, "outputs", outputs)

    def _open(self, name: str) -> onnxruntime.InferenceSession:
        path = self.folder / name
        if not path.is_file():
            raise UserError(f"{self.folder} has no {name}: run odevit-serve export --format parts on it")
        return open_session(path, self.device, self.threads)

    def _expect(self, session: Any, name: str, side: str, wanted: dict[str, list[Any]]) -> None:
        found = _signature(session.get_inputs() if side == "inputs" else session.get_outputs())
        for key, shape in wanted.items():
            if key not in found:
                raise UserError(f"{self.folder / name} is no ODE-ViT {name}: its {side} are {', '.join(found)}")
            if any(isinstance(a, int) and a != b for a, b in zip(found[key][1:], shape)) or (
                len(found[key]) != len(shape) + 1
            ):
                raise UserError(f"{self.folder / name}: {key} has shape {found[key][1:]}, {bundle.CONFIG} says {shape}")

    @cached_property
    def attention(self) -> onnxruntime.InferenceSession:
        """Opened when a map is first asked for."""
        return self._open(bundle.ATTENTION)

    def maps(self, states: np.ndarray) -> np.ndarray:
        """How much CLS looks at each patch in the states [B,S*,D]: [B,heads,patches]."""
        return self.attention.run(["cls_attention"], {"state": states})[0]  # type: ignore[no-any-return]


def read_metadata(path: Path) -> Config:
    """The configuration that an exported .onnx carries."""
    text = properties(path).get(METADATA_KEY)
    if text is None:
        raise UserError(f"{path} is no ODE-ViT exported by odevit-serve: it carries no {METADATA_KEY!r} metadata")
    return Config.from_json(text, str(path))


def properties(path: Path) -> dict[str, str]:
    """The metadata of an ONNX file, read from its outermost message without loading any weight."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise UserError(f"{path} is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                entries = [bytes(data[a:b]) for number, a, b in _fields(data, 0, len(data)) if number == 14]
        pairs = []
        for entry in entries:
            parts = {number: entry[a:b].decode() for number, a, b in _fields(entry, 0, len(entry))}
            pairs.append((parts.get(1, ""), parts.get(2, "")))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path} does not exist or is not a file") from None
    except (ValueError, IndexError, OverflowError, UnicodeDecodeError):
        raise UserError(f"{path} is no readable ONNX file: it is damaged or cut short") from None
    return dict(pairs)


def _fields(data: Any, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The length-delimited fields of a protobuf message: number, start and end of the content."""
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            length, at = _varint(data, at)
            if at + length > end:
                raise ValueError("a field ends past the file")
            yield key >> 3, at, at + length
            at += length
        else:
            raise ValueError(f"unknown wire type {kind}")
    if at != end:
        raise ValueError("a field ends past the file")


def _varint(data: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
