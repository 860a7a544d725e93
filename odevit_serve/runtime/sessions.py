"""onnxruntime sessions: opening graphs, choosing devices, reading what a file says about itself."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import bundle
from ..bundle import ESTIMATE_INPUTS, ESTIMATE_OUTPUTS, METADATA_KEY, STEP_OUTPUTS
from ..config import Config, Integration, Setting
from ..errors import UsageError, UserError
from . import trust
from .exits import Depth, resolve
from .options import RequestOptions

if TYPE_CHECKING:
    import onnxruntime

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
PROVIDERS = {"cpu": [CPU], "cuda": [CUDA, CPU], "tensorrt": [TENSORRT, CUDA, CPU]}
DEVICES = ("cpu", "cuda", "tensorrt", "auto")
# How long a session's idle threads look for work before they sleep: past the pause between two steps, so that nobody
# has to be woken for the next, and no longer, so that they do not keep a core from the other sessions' threads.
SPIN_MICROSECONDS = "300"


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


def open_session(
    source: Path | bytes, device: str = "cpu", threads: int | None = None, trusted: bool = True
) -> onnxruntime.InferenceSession:
    """A session on the device asked for. `auto` falls back to the CPU with one warning; a named device is a demand.

    A file that is not `trusted` is looked through before, and bounded in memory.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, not {threads}")
    ort = runtime()
    bounded = isinstance(source, Path) and source.is_file() and not trusted and not trust.is_ours(source)
    if bounded:
        trust.check(source)  # type: ignore[arg-type]
    wanted = "cuda" if device == "auto" else device
    provider = PROVIDERS[wanted][0]
    session = None
    if provider in ort.get_available_providers() and provider not in _absent:
        session = _create(ort, source, PROVIDERS[wanted], threads, bounded)
        if session.get_providers()[0] != provider:  # what it runs on, not what the wheel claims to have
            _absent.add(provider)
    if session is None or provider in _absent:
        if device != "auto":
            raise UserError(f"device {device!r} is not available: {_why_not(ort, provider)}")
        _warn_once(f"running on the CPU: {_why_not(ort, provider)}")
    both = clash()
    if both:
        _warn_once(both)
    return session or _create(ort, source, [CPU], threads, bounded)


def _create(ort: Any, source: Path | bytes, providers: list[str], threads: int | None, bounded: bool) -> Any:
    """A session; one on the CPU where the providers asked for cannot be set up."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures are told in our own words
    if threads is not None:
        options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
    if bounded:
        trust.bound(ort, options)
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
            return _create(ort, source, [CPU], threads, bounded)
        raise UserError(f"{name} is not a readable ONNX file: {_first_line(error)}") from None
    finally:
        ort.set_default_logger_severity(2)


def _first_line(error: Exception) -> str:
    """What onnxruntime says, less its error numbers and the places in its own source."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from .* failed:", "", text)
    return re.sub(r"^/onnxruntime_src.*\) ", "", text).strip()[:300]


def cannot_run(name: str | Path, error: Exception) -> UserError:
    """A graph that opens, and fails on its way: it is damaged, or asks for more memory than it is given."""
    return UserError(f"{name} cannot be run: {_first_line(error)}")


class Sessions(NamedTuple):
    """The two graphs that an image goes through."""

    stem: Any
    step: Any


def metadata(session: Any, path: Path) -> dict[str, str]:
    try:
        return session.get_modelmeta().custom_metadata_map  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged: its metadata is not text") from None


def _signature(values: list[Any]) -> dict[str, list[Any]]:
    return {value.name: list(value.shape) for value in values}


class Graphs:
    """The three graphs of a bundle, checked against its configuration and its weights.

    For another solver or splitting than the bundle's own, and for steps whose size is chosen for each image, stem and
    step are put together here from copies of their pieces, which needs the `onnx` package.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        device: str = "cpu",
        threads: int | None = None,
        trusted: bool = True,
        solver: str | None = None,
        splitting: str | None = None,
        tolerance: float | None = None,
    ):
        self.folder, self.device, self.threads, self.trusted = folder, device, threads, trusted
        wanted = config.integration.by(solver, splitting, tolerance)
        self.own, self.config = config, config.replace(integration=wanted)
        self.estimates = wanted.tolerance > 0  # steps choose their size
        self._arranged: Setting | None = None
        self.sessions = self.open(threads)
        self.stem, self.step = self.sessions
        self.setting = self._arranged or self._setting(wanted)
        shape = config.architecture
        self._expect(self.stem, bundle.STEM, "inputs", {"pixel_values": list(config.preprocessing.input_size)})
        state = _signature(self.stem.get_outputs()).get("state", [])[1:]
        if len(state) != 2 or not all(isinstance(size, int) for size in state):
            raise UserError(f"{folder / bundle.STEM}: output state has shape {state}, not [tokens, width]")
        rest = state[0] % shape.tokens - self.estimates * (state[0] < 2 * shape.tokens)
        if state[1] != shape.width or rest:
            raise UserError(
                f"{folder / bundle.STEM}: state has {state[0]} tokens of width {state[1]}, "
                f"{bundle.CONFIG} says {shape.tokens} of {shape.width}"
            )
        self.state_shape: tuple[int, int] = (state[0], state[1])
        more = (ESTIMATE_INPUTS, ESTIMATE_OUTPUTS) if self.estimates else ((), ())
        numbers: dict[str, list[Any]] = {name: [] for name in ("step_size", *more[0])}
        self._expect(self.step, bundle.STEP, "inputs", {"state": state, **numbers})
        wide = {"next_state": state, "logits": [shape.classes]}
        outputs = (*STEP_OUTPUTS, *more[1])
        self._expect(self.step, bundle.STEP, "outputs", {name: wide.get(name, []) for name in outputs})

    def depth(self, options: RequestOptions) -> Depth:
        """How deep an image with these options goes; the solver is that of these graphs."""
        own = self.config.integration
        if (options.solver or own.solver, options.splitting or own.splitting) != (own.solver, own.splitting):
            raise UsageError(
                f"these slots step by {own.solver} ({own.splitting}): another solver needs graphs of its own"
            )
        if options.tolerance and not self.estimates:
            raise UsageError("these slots take every step of the grid: a tolerance needs graphs of its own")
        asked = options.depth | {"tolerance": own.tolerance if options.tolerance is None else options.tolerance}
        return resolve(self.own, self.setting, **asked)

    def open(self, threads: int | None) -> Sessions:
        """Stem and step on so many threads."""
        if self.config.integration == self.own.integration and not self.estimates:
            return Sessions(self._open(bundle.STEM, threads), self._open(bundle.STEP, threads))
        return self._arrange(self.own, self.config.integration, threads)

    def _arrange(self, config: Config, wanted: Integration, threads: int | None) -> Sessions:
        from .graphs import Parts, stem_graph, step_graph

        if not self.trusted and not trust.is_ours(self.folder / bundle.STEP):
            for name in (bundle.STEM, bundle.STEP):
                trust.check(self.folder / name)
        parts = Parts.of(self.folder, config)
        graphs = (stem_graph(parts, wanted), step_graph(parts, wanted))
        self._check_weights(bundle.STEP, parts.weights_digest)
        self._arranged = wanted.setting(parts.precision, parts.digests["stem"], parts.digests["step"])
        return Sessions(*(open_session(graph.SerializeToString(), self.device, threads) for graph in graphs))

    def _setting(self, own: Integration) -> Setting:
        """What these graphs compute by; their own digests say whether a proof was made for them."""
        stem = metadata(self.stem, self.folder / bundle.STEM)
        step = metadata(self.step, self.folder / bundle.STEP)
        for name, found in ((bundle.STEM, stem), (bundle.STEP, step)):
            self._check_weights(name, found.get("weights", ""))
        return own.setting(step.get("precision", "fp32"), stem.get("graph", ""), step.get("graph", ""))

    def _check_weights(self, name: str, made_from: str) -> None:
        """A graph of other weights than those beside it would answer for a model that is no longer there."""
        path = self.folder / bundle.WEIGHTS
        if made_from and path.is_file() and bundle.digest(path) != made_from:
            raise UserError(
                f"{self.folder / name} was made from other weights than those in {bundle.WEIGHTS}: "
                f"{bundle.remake(self.folder)}"
            )

    def _open(self, name: str, threads: int | None) -> onnxruntime.InferenceSession:
        path = self.folder / name
        if not path.is_file():
            raise UserError(f"{self.folder} has no {name}: {bundle.remake(self.folder)}")
        return open_session(path, self.device, threads, self.trusted)

    def _expect(self, session: Any, name: str, side: str, wanted: dict[str, list[Any]]) -> None:
        found = _signature(session.get_inputs() if side == "inputs" else session.get_outputs())
        for key, shape in wanted.items():
            if key not in found:
                raise UserError(
                    f"{self.folder / name} is not an ODE-ViT {name} of this version: its {side} are {', '.join(found)}"
                    f", without {key}: {bundle.remake(self.folder)}"
                )
            if any(isinstance(a, int) and a != b for a, b in zip(found[key][1:], shape)) or (
                len(found[key]) != len(shape) + 1
            ):
                raise UserError(f"{self.folder / name}: {key} has shape {found[key][1:]}, {bundle.CONFIG} says {shape}")

    @cached_property
    def attention(self) -> onnxruntime.InferenceSession:
        """Opened when a map is first asked for."""
        session = self._open(bundle.ATTENTION, self.threads)
        self._check_weights(bundle.ATTENTION, metadata(session, self.folder / bundle.ATTENTION).get("weights", ""))
        return session

    def maps(self, states: np.ndarray) -> np.ndarray:
        """How much CLS looks at each patch in the states [B,S*,D]: [B,heads,patches]."""
        session, shape = self.attention, self.config.architecture
        tokens = np.ascontiguousarray(states[:, : shape.tokens])
        try:
            found: np.ndarray = session.run(["cls_attention"], {"state": tokens})[0]
            if found.shape != (len(states), shape.heads, shape.patches):
                raise ValueError(f"its maps have the shape {list(found.shape)}")
        except Exception as error:  # onnxruntime's own classes share no other base
            raise cannot_run(self.folder / bundle.ATTENTION, error) from None
        return found


def configuration(metadata: Mapping[str, str], path: Path) -> Config:
    """The configuration that an exported .onnx carries."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise UserError(f"{path} is not an ODE-ViT exported by odevit-serve: it has no {METADATA_KEY!r} metadata")
    return Config.from_json(text, str(path))


def read_metadata(path: Path) -> Config:
    """The configuration of an exported .onnx, without opening a session."""
    return configuration(properties(path), path)


def properties(path: Path) -> dict[str, str]:
    """The metadata of an ONNX file, without loading it into a session."""
    from . import graph_files

    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file")
    return graph_files.properties(graph_files.read(path))
