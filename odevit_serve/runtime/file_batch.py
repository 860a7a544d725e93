"""A single exported file: its graph takes all steps, so what is admitted goes in together and comes out together.

Budget and threshold are inputs of the whole batch, so a step runs the images that share those of the oldest one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..config import Config, Setting
from ..errors import UsageError, UserError
from . import exits
from .exits import REASONS, Depth, ExitReason
from .jobs import Job, Outcome
from .options import RequestOptions
from .results import Attention, Result, conclude, label_names
from .sessions import cannot_run

if TYPE_CHECKING:
    import onnxruntime


class _Waiting(NamedTuple):
    job: Job
    pixels: np.ndarray
    since: float


@dataclass(frozen=True)
class _FileOutcome(Outcome):
    attention: Attention | None = None


def setting_of(config: Config, session: onnxruntime.InferenceSession) -> Setting:
    """What a file's graph computes by; an export carries the digests of the parts that it was made of."""
    own, found = config.integration, session.get_modelmeta().custom_metadata_map
    return own.setting(found.get("precision", "fp32"), found.get("stem", ""), found.get("step", ""))


class FileBatch:
    """The `Compute` of a single file. One thread at a time may use it."""

    anytime = False  # nothing comes out of the graph before its end

    def __init__(
        self,
        name: str,
        config: Config,
        session: onnxruntime.InferenceSession,
        capacity: int = 32,
        clock: Callable[[], float] = time.monotonic,
        beside: onnxruntime.InferenceSession | None = None,
    ):
        if capacity < 1:
            raise UsageError(f"capacity must be at least 1, not {capacity}")
        self.name, self.config, self.session, self.capacity, self.clock = name, config, session, capacity, clock
        self.alone, self._beside = True, beside or session
        self.labels = label_names(config)
        inputs = [value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())]
        self._outputs = [value.name for value in session.get_outputs()]
        if "pixel_values" not in inputs or "logits" not in self._outputs:
            found = f"it takes {', '.join(inputs)} and gives {', '.join(self._outputs)}"
            raise UserError(f"{name} is not an ODE-ViT: {found}")
        self.adaptive = "steps" in self._outputs  # images exit inside the graph
        self.least_steps = 1 if "max_steps" in inputs else config.integration.steps
        self._has_threshold = "threshold" in inputs
        self.setting = setting_of(config, session)
        self._waiting: list[_Waiting] = []

    @property
    def active(self) -> int:
        return len(self._waiting)

    @property
    def free(self) -> int:
        return self.capacity - self.active

    def depth(self, options: RequestOptions) -> Depth:
        """The depth of an image; what is fixed in the graph is refused."""
        name, own = self.name, self.config.integration.steps
        if options.trace or options.states:
            raise UsageError(f"{name} is a single file: a trace needs the bundle it came from")
        if options.attention and "cls_attention" not in self._outputs:
            raise UsageError(f"{name} was exported without attention maps: give the bundle it came from")
        given, built = (options.solver, options.splitting), self.config.integration
        if any(asked not in (None, kept) for asked, kept in zip(given, (built.solver, built.splitting))):
            raise UsageError(
                f"{name} was exported with the solver {built.solver}: another solver needs the bundle it came from"
            )
        if options.tolerance not in (None, built.tolerance):
            raise UsageError(
                f"{name} was exported with the tolerance {built.tolerance:g}, not {options.tolerance:g}: give the "
                "bundle it came from"
            )
        if options.steps not in (None, own):
            raise UsageError(f"{name} takes {own} steps, fixed when it was exported, not {options.steps}")
        if options.max_steps is not None and options.max_steps < self.least_steps:
            raise UsageError(f"{name} has a fixed depth of {own} steps, so max_steps cannot be {options.max_steps}")
        if not self.adaptive:
            for key in ("rule", "threshold"):
                if getattr(options, key) is not None:
                    raise UsageError(f"{name} has a fixed depth of {own} steps, so {key} cannot be set")
            return exits.resolve(self.config, self.setting, adaptive=False)
        if not options.adaptive:
            raise UsageError(f"{name} exits inside the graph: export --format onnx for a fixed depth")
        built_in = self.config.exit.rule
        if options.rule not in (None, built_in):
            raise UsageError(f"{name} has the rule {built_in!r} built in, not {options.rule!r}")
        if options.threshold is not None and not self._has_threshold:
            raise UsageError(f"{name} has its threshold built in, so it cannot be set")
        return exits.resolve(self.config, self.setting, max_steps=options.max_steps, threshold=options.threshold)

    def admit(self, pixels: np.ndarray, jobs: Sequence[Job]) -> None:
        if len(jobs) > self.free:
            raise UsageError(f"{len(jobs)} images for {self.free} free slots")
        wanted = (len(jobs), *self.config.preprocessing.input_size)
        if pixels.shape != wanted:
            raise UsageError(f"pixels of shape {list(pixels.shape)}, not {list(wanted)}")
        began = self.clock()
        self._waiting += [_Waiting(job, values, began) for job, values in zip(jobs, pixels)]

    def resume(self, parked: np.ndarray, job: Job) -> None:
        """The graph shows no state to go on from: the image is run again."""
        self.admit(parked[None], [job])

    def step(self) -> list[Outcome]:
        """Run the graph on the oldest image and all others with the same budget and threshold."""
        if not self._waiting:
            return []
        feeds = self._feeds(self._waiting[0].job.depth)
        chosen = [entry for entry in self._waiting if self._feeds(entry.job.depth) == feeds]
        # They are let go of after the run: when that raises, `clear` still gives their jobs back.
        outputs = self._run(np.stack([entry.pixels for entry in chosen]), feeds, [entry.job for entry in chosen])
        taken = {id(entry) for entry in chosen}
        self._waiting = [entry for entry in self._waiting if id(entry) not in taken]
        now = self.clock()
        return [self._outcome(row, entry, outputs, now) for row, entry in enumerate(chosen)]

    def _feeds(self, depth: Depth) -> dict[str, float]:
        """The optional inputs of the graph; those that are left out have the values it was exported with."""
        feeds: dict[str, float] = {}
        if depth.max_steps < depth.steps:
            feeds["max_steps"] = depth.max_steps
        if self._has_threshold and depth.threshold != self.config.exit.threshold and depth.rule.name != "fixed":
            feeds["threshold"] = depth.threshold
        return feeds

    def _run(self, pixels: np.ndarray, feeds: dict[str, float], jobs: Sequence[Job]) -> dict[str, np.ndarray]:
        inputs = {"pixel_values": np.ascontiguousarray(pixels, np.float32)}
        for key, value in feeds.items():
            inputs[key] = np.array(value, np.int64 if key == "max_steps" else np.float32)
        wanted = [name for name in ("logits", "steps", "exit_reason") if name in self._outputs]
        if any(job.keep for job in jobs):
            wanted.append("cls_attention")
        session = self.session if self.alone else self._beside
        try:
            outputs = dict(zip(wanted, session.run(wanted, inputs)))
            shape = (len(jobs), self.config.architecture.classes)
            if outputs["logits"].shape != shape:
                raise ValueError(f"its logits have the shape {list(outputs['logits'].shape)}, not {list(shape)}")
        except Exception as error:  # onnxruntime's own classes share no other base
            raise cannot_run(self.name, error) from None
        return outputs

    def _outcome(self, row: int, entry: _Waiting, outputs: dict[str, np.ndarray], now: float) -> Outcome:
        full = self.config.integration.steps
        steps = int(outputs["steps"][row]) if "steps" in outputs else full
        reason = REASONS[int(outputs["exit_reason"][row])] if "exit_reason" in outputs else ExitReason.HORIZON
        attention = None
        if entry.job.keep:
            grid = self.config.architecture.grid
            attention = Attention(full, outputs["cls_attention"][row].reshape(-1, grid, grid))
        return _FileOutcome(
            entry.job,
            steps,
            reason,
            outputs["logits"][row],
            math.nan,
            math.nan,
            math.nan,
            now - entry.since,
            parked=entry.pixels if entry.job.park else None,
            attention=attention,
        )

    def cancel(self, key: Any) -> bool:
        for row, entry in enumerate(self._waiting):
            if entry.job.key == key:
                del self._waiting[row]
                return True
        return False

    def clear(self) -> tuple[Job, ...]:
        jobs = tuple(entry.job for entry in self._waiting)
        self._waiting = []
        return jobs

    def finish(self, outcome: Outcome, source: str = "", read_seconds: float = 0.0) -> Result:
        maps = self.maps(outcome)
        return conclude(self.labels, outcome, source, read_seconds, maps[0] if maps else None, self.config.confidence)

    def maps(self, outcome: Outcome) -> tuple[Attention, ...]:
        attention = outcome.attention if isinstance(outcome, _FileOutcome) else None
        return () if attention is None else (attention,)
