"""`onnx-adaptive`: one file that decides per image when to stop, in plain ONNX.

A Loop advances the rows that are still active. After every step their answers are written to the rows of the batch
they belong to; the rows that exit are then dropped from the state, so that the next step costs only what is left.
The rule is that of `odevit_serve.exits`, on numbers tabulated for each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ..bundle import Config
from ..dynamics import TINY
from ..errors import UserError
from ..exits import ExitReason, Measured
from .graph import Folded
from .onnx import assemble
from .pieces import Pieces

Array = np.ndarray[Any, Any]


def adaptive(pieces: Pieces, config: Config, compact: bool = True) -> onnx.ModelProto:
    """The adaptive graph of a model with the exit policy of `config`.

    TensorRT wants the shapes a loop carries to stay the same; without `compact` they do, at the cost of computing rows
    that have exited until the last one has.
    """
    if config.exit.rule != "contraction":
        raise UserError(
            f"onnx-adaptive decides by the rule contraction, and this bundle was calibrated for {config.exit.rule}: "
            "calibrate it for contraction, or export onnx"
        )
    parts = {"Stem": pieces.stem(), "Step": pieces.step()}
    return assemble(text(pieces.folded, config, compact), parts, tables(config))


def tabulate(config: Config) -> tuple[Array, Array]:
    """Travel that is left after each step, and mean CLS speed of each; without calibration nothing ever contracts."""
    own, measured = config.integration, Measured.of(config)
    time = np.arange(1, own.steps + 1) * own.step_size
    if measured is None:
        return np.full(own.steps, np.inf), np.ones(own.steps)
    mean = np.interp(time, measured.times[1:], measured.cls_speed) if len(measured.cls_speed) else np.ones(own.steps)
    return np.interp(time, measured.times, measured.travel), np.maximum(mean, TINY)


def tables(config: Config) -> dict[str, Array]:
    """The numbers that the graph looks up, and its two optional inputs with their defaults."""
    own, policy = config.integration, config.exit
    travel, mean = tabulate(config)
    time = np.arange(1, own.steps + 1) * own.step_size
    limit = policy.lyapunov if policy.travel and policy.lyapunov is not None else np.inf
    single = {
        "travel": travel / mean,
        "time": time,
        "elapsed": np.maximum(time - own.step_size, TINY),  # the first step has growth 0, and exponent 0
        "kappa": np.array(policy.threshold),
        "step_size": np.array([own.step_size]),
        "tiny": np.array(TINY),
        "lyapunov": np.array(max(limit, TINY)),
    }
    whole = {
        "max_steps": np.array(own.steps),
        "steps_in_all": np.array(own.steps),
        "zero": np.array(0),
        "one": np.array(1),
        "ones": np.array([1]),
        "classes": np.array([config.architecture.classes]),
        "contracted": np.array(int(ExitReason.CONTRACTED)),
        "lyapunov_time": np.array(int(ExitReason.LYAPUNOV)),
        "budget": np.array(int(ExitReason.BUDGET)),
        "horizon": np.array(int(ExitReason.HORIZON)),
    }
    return {name: value.astype(np.float32) for name, value in single.items()} | {
        name: value.astype(np.int64) for name, value in whole.items()
    }


def text(folded: Folded, config: Config, compact: bool = True) -> str:
    shape = folded.shape
    image, answers = f"{shape.channels}, {shape.image_size}, {shape.image_size}", f"batch, {shape.classes}"
    kind = "int64" if compact else "bool"  # the rows that are left, or a mark for each row of the batch
    before, after = ("active", "left") if compact else ("batch", "batch")
    state = f"{folded.rows}, {shape.width}"
    return f"""
    adaptive (float[batch, {image}] pixel_values, int64 max_steps, float kappa)
        => (float[{answers}] logits, int64[batch] steps, int64[batch] exit_reason) {{
        state_0 = piece.Stem (pixel_values)
        batch_size = Shape <start = 0, end = 1> (pixel_values)
        limit = Min (max_steps, steps_in_all)
        {_all_rows(compact)}
        speed_0 = ConstantOfShape (batch_size)
        answer_shape = Concat <axis = 0> (batch_size, classes)
        logits_0 = ConstantOfShape (answer_shape)
        steps_0 = ConstantOfShape <value = int64[1] {{0}}> (batch_size)
        state_end, rows_end, speed_end, logits, steps, exit_reason = Loop (
            steps_in_all, start, state_0, rows_0, speed_0, logits_0, steps_0, steps_0
        ) <body = body (
            int64 index, bool go, float[{before}, {state}] state, {kind}[{before}] rows, float[{before}] first_speed,
            float[{answers}] logits_in, int64[batch] steps_in, int64[batch] reason_in
        ) => (
            bool go_on, float[{after}, {state}] state_out, {kind}[{after}] rows_out, float[{after}] first_speed_out,
            float[{answers}] logits_out, int64[batch] steps_out, int64[batch] reason_out
        ) {{
            size = Shape (rows)
            step_sizes = Expand (step_size, size)
            next_state, answer, margin, speed, cls_speed = piece.Step (state, step_sizes)
            number = Add (index, one)
            numbers = Expand (number, size)
            {_rule(scaled=bool(config.exit.travel and config.exit.cls_speed))}
            {_compaction() if compact else _masking()}
        }}>
    }}"""


def _all_rows(compact: bool) -> str:
    if compact:
        return "count = Squeeze (batch_size) rows_0 = Range (zero, count, one) start = Greater (count, zero)"
    return "rows_0 = ConstantOfShape <value = bool[1] {1}> (batch_size) start = Greater (steps_in_all, zero)"


def _rule(scaled: bool) -> str:
    """`exits` and `reason` of each row after this step."""
    return f"""
            left_to_travel = Gather (travel, index)
            reach = {"Mul (left_to_travel, cls_speed)" if scaled else "Expand (left_to_travel, size)"}
            at_least = Max (reach, tiny)
            score = Div (margin, at_least)
            is_contracted = GreaterOrEqual (score, kappa)

            is_first = Equal (index, zero)
            first = Where (is_first, speed, first_speed)
            from_speed = Max (first, tiny)
            to_speed = Max (speed, tiny)
            growth = Div (to_speed, from_speed)
            log_growth = Log (growth)
            elapsed_now = Gather (elapsed, index)
            exponent = Div (log_growth, elapsed_now)
            time_now = Gather (time, index)
            lyapunov_times = Mul (exponent, time_now)
            is_past = GreaterOrEqual (lyapunov_times, lyapunov)

            is_whole = GreaterOrEqual (number, steps_in_all)
            out_of_steps = GreaterOrEqual (number, limit)
            not_contracted = Where (is_past, lyapunov_time, budget)
            early = Where (is_contracted, contracted, not_contracted)
            reason = Where (is_whole, horizon, early)
            by_rule = Or (is_contracted, is_past)
            exits = Or (by_rule, out_of_steps)
            stays = Not (exits)"""


def _compaction() -> str:
    """Answers go to the rows of the batch they belong to; only the rows that stay are carried on."""
    return """
            where = Unsqueeze (rows, ones)
            logits_out = ScatterND (logits_in, where, answer)
            steps_out = ScatterND (steps_in, where, numbers)
            reason_out = ScatterND (reason_in, where, reason)
            state_out = Compress <axis = 0> (next_state, stays)
            rows_out = Compress <axis = 0> (rows, stays)
            first_speed_out = Compress <axis = 0> (first, stays)
            remaining = Size (rows_out)
            go_on = Greater (remaining, zero)"""


def _masking() -> str:
    """All rows are carried on until the last has exited; the answers of those that have are kept."""
    return """
            column = Unsqueeze (rows, ones)
            logits_out = Where (column, answer, logits_in)
            steps_out = Where (rows, numbers, steps_in)
            reason_out = Where (rows, reason, reason_in)
            state_out = Identity (next_state)
            rows_out = And (rows, stays)
            first_speed_out = Identity (first)
            marks = Cast <to = 7> (rows_out)
            remaining = ReduceMax <keepdims = 0> (marks)
            go_on = Greater (remaining, zero)"""
