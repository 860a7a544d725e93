"""`onnx-adaptive`: one file that decides per image when to stop, in plain ONNX.

A Loop advances the rows that are still active. After every step their answers are written to the rows of the batch
they belong to; the rows that exit are then dropped from the state, so that the next step costs only what is left.
The rule is that of `odevit_serve.runtime.exits`: the very function, run on values of the graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...config import Config
from ...errors import UserError
from ...runtime.dynamics import TINY
from ...runtime.exits import RULES, ExitReason, Measured, Rule
from .format import DEPTH, PRECISION, Format

if TYPE_CHECKING:
    import onnx

    from ...runtime.graph_builder import Builder, Value
    from ...runtime.graphs import Parts
    from ..job import ExportJob

READ = (
    "margin",
    "gain",
    "exponent",
    "speed",
)  # numbers a row that a rule can read, beside logits, travel and step size


def adaptive_graph(parts: Parts, config: Config, compact: bool = True) -> onnx.ModelProto:
    """The adaptive graph for the integration and the exit policy of `config`.

    TensorRT wants the shapes a loop carries to stay the same; without `compact` they do, at the cost of computing rows
    that have exited until the last one has.
    """
    from ...runtime.graphs import stem_graph, step_graph
    from ..onnx import assemble

    rule = RULES.get(config.exit.rule)
    if rule is None or not (rule.exports or rule.name == "fixed"):
        known = ", ".join(own.name for own in RULES.values() if own.exports)
        raise UserError(
            f"the rule {config.exit.rule!r} cannot be written into a graph: "
            f"calibrate for one of {known}, or export onnx"
        )
    own = config.integration
    pieces = {"Stem": stem_graph(parts, own), "Step": step_graph(parts, own), "Score": score_graph(rule, config)}
    return assemble(text(config, parts.rows(own), compact), pieces, tables(config))


class GraphReadings:
    """What `exits.Readings` gives a rule, as values of a graph under construction."""

    def __init__(self, builder: Builder, values: dict[str, Value]):
        self.builder = builder
        self.margin, self.gain, self.exponent, self.speed = (values[name] for name in READ)
        self.logits, self.travel, self.step_size = values["logits"], values["travel"], values["step_size"]

    @property
    def confidence(self) -> Value:
        shape = [self.builder.batch, "classes"]
        probabilities = self.builder.node("Softmax", self.logits, axis=-1, shape=shape)[0]
        axis = self.builder.constant(np.array([-1], np.int64))
        return self.builder.node("ReduceMax", probabilities, axis, keepdims=0, shape=[self.builder.batch])[0]


def score_graph(rule: Rule, config: Config) -> onnx.ModelProto:
    """The score of a rule as a graph: the rule's own function, run on values."""
    from ...runtime.graph_builder import Builder

    builder = Builder()
    values = {name: builder.input(name, ["batch"]) for name in READ}
    values["logits"] = builder.input("logits", ["batch", config.architecture.classes])
    each = ["batch"] if config.integration.tolerance else []  # images are at one time, or each at its own
    values |= {name: builder.input(name, each) for name in ("travel", "step_size")}
    never = rule.name == "fixed"
    readings: Any = GraphReadings(builder, values)
    score = values["margin"] * 0.0 if never else rule.score(readings)
    return builder.model({"score": score}, {"score": ["batch"]})  # type: ignore[dict-item]


def tables(config: Config) -> dict[str, np.ndarray[Any, Any]]:
    """The numbers that the graph looks up, and its two optional inputs with their defaults."""
    own, policy, measured = config.integration, config.exit, Measured.of(config)
    rule = RULES[policy.rule]
    runs = rule.name != "fixed" and (measured is not None or not rule.needs_travel)
    travel = np.ones(own.steps + 1) if measured is None else measured.table(own.steps)
    single = {
        "travel": np.maximum(travel[1:], TINY),
        "threshold": np.array(policy.threshold if runs else np.inf),
        "step_size": np.array([own.step_size]),
        **({"tolerance": np.array([own.tolerance])} if own.tolerance else {}),
        ("step_size_now" if own.tolerance else "size_now"): np.array(own.step_size),
        "nothing": np.array(0.0),
        "infinity": np.array(np.inf),
        "lyapunov": np.array(np.inf if policy.lyapunov is None or not runs else policy.lyapunov),
    }
    whole = {
        "max_steps": np.array(own.steps),
        "steps_in_all": np.array(own.steps),
        "zero": np.array(0),
        "one": np.array(1),
        "ones": np.array([1]),
        "classes": np.array([config.architecture.classes]),
        "early": np.array(int(ExitReason.EARLY)),
        "lyapunov_time": np.array(int(ExitReason.LYAPUNOV)),
        "budget": np.array(int(ExitReason.BUDGET)),
        "horizon": np.array(int(ExitReason.HORIZON)),
    }
    return {name: value.astype(np.float32) for name, value in single.items()} | {
        name: value.astype(np.int64) for name, value in whole.items()
    }


def text(config: Config, rows: int, compact: bool = True) -> str:
    shape = config.architecture
    image, answers = f"{shape.channels}, {shape.image_size}, {shape.image_size}", f"batch, {shape.classes}"
    kind = "int64" if compact else "bool"  # the rows that are left, or a mark for each row of the batch
    before, after = ("active", "left") if compact else ("batch", "batch")
    state = f"{rows}, {shape.width}"
    sized = config.integration.tolerance > 0
    starts, comes, goes = _carried(sized, before, after)
    return f"""
    adaptive (float[batch, {image}] pixel_values, int64 max_steps, float threshold)
        => (float[{answers}] logits, int64[batch] steps, int64[batch] exit_reason) {{
        state_0 = piece.Stem (pixel_values)
        batch_size = Shape <start = 0, end = 1> (pixel_values)
        limit = Min (max_steps, steps_in_all)
        adapts = Less (threshold, infinity)
        has_bound = Less (lyapunov, infinity)
        limited = And (adapts, has_bound)
        unlimited = Not (limited)
        {_all_rows(compact)}
        passed_0 = ConstantOfShape (batch_size)
        answer_shape = Concat <axis = 0> (batch_size, classes)
        logits_0 = ConstantOfShape (answer_shape)
        steps_0 = ConstantOfShape <value = int64[1] {{0}}> (batch_size)
        state_end, rows_end, passed_end, {"before_end, position_end, " * sized}logits, steps, exit_reason = Loop (
            steps_in_all, start, state_0, rows_0, passed_0, {starts}logits_0, steps_0, steps_0
        ) <body = body (
            int64 index, bool go, float[{before}, {state}] state, {kind}[{before}] rows, float[{before}] passed,
            {comes}float[{answers}] logits_in, int64[batch] steps_in, int64[batch] reason_in
        ) => (
            bool go_on, float[{after}, {state}] state_out, {kind}[{after}] rows_out, float[{after}] passed_out,
            {goes}float[{answers}] logits_out, int64[batch] steps_out, int64[batch] reason_out
        ) {{
            size = Shape (rows)
            number = Add (index, one)
            numbers = Expand (number, size)
            {SIZED if sized else UNIFORM}
            {EARLY}
            {BOUND if compact else ALWAYS_BOUND}
            {DECISION}
            {COMPACTION if compact else MASKING}
            {(SIZED_COMPACTION if compact else SIZED_MASKING) if sized else ""}
        }}>
    }}"""


def _carried(sized: bool, before: str, after: str) -> tuple[str, str, str]:
    """What the loop carries of steps that choose their size: the size of the last, and where on the grid it ended."""
    if not sized:
        return "", "", ""
    return (
        "passed_0, steps_0, ",
        f"float[{before}] before, int64[{before}] position, ",
        f"float[{after}] before_out, int64[{after}] position_out, ",
    )


def _all_rows(compact: bool) -> str:
    if compact:
        return "count = Squeeze (batch_size) rows_0 = Range (zero, count, one) start = Greater (count, zero)"
    return "rows_0 = ConstantOfShape <value = bool[1] {1}> (batch_size) start = Greater (steps_in_all, zero)"


# A step, and of each row or of all: its size, the travel that is left, and whether it is the last.
UNIFORM = """
            next_state, answer, margin, gain, exponent, speed, cls_speed = piece.Step (state, step_size)
            travel_now = Gather (travel, index)
            is_whole = GreaterOrEqual (number, steps_in_all)
            out_of_steps = GreaterOrEqual (number, limit)"""

SIZED = """
            step_sizes = Expand (step_size, size)
            steps_left = Sub (steps_in_all, position)
            steps_left_real = Cast <to = 1> (steps_left)
            time_left = Mul (steps_left_real, step_size_now)
            tolerances = Expand (tolerance, size)
            next_state, answer, margin, gain, exponent, speed, cls_speed, size_now, change = piece.Step (
                state, step_sizes, before, time_left, tolerances
            )
            share = Div (size_now, step_size_now)
            covered_real = Round (share)
            covered = Cast <to = 7> (covered_real)
            position_now = Add (position, covered)
            place = Sub (position_now, one)
            travel_now = Gather (travel, place)
            is_whole = GreaterOrEqual (position_now, steps_in_all)
            is_spent = GreaterOrEqual (number, limit)
            out_of_steps = Or (is_spent, is_whole)"""

SIZED_COMPACTION = """
            before_out = Compress <axis = 0> (size_now, stays)
            position_out = Compress <axis = 0> (position_now, stays)"""

SIZED_MASKING = """
            before_out = Identity (size_now)
            position_out = Min (position_now, steps_in_all)"""

# `exits` and `reason` of each row after this step, as `exits.decide` has them.
EARLY = """
            score = piece.Score (margin, gain, exponent, speed, answer, travel_now, size_now)
            is_early = GreaterOrEqual (score, threshold)"""

# The limit on Lyapunov times decides only where the rule has not. Elsewhere the exponent, which costs up to a tenth of
# a step, is not computed: `assemble` moves its nodes into the branch.
BOUND = """
            lowest = ReduceMin <keepdims = 0> (score)
            all_early = GreaterOrEqual (lowest, threshold)
            is_decided = Or (all_early, unlimited)
            passed_now, is_past = If (is_decided) <
                then_branch = decided () => (float[active] passed_then, bool[active] past_then) {
                    passed_then = Identity (passed)
                    past_then = Less (passed, nothing)
                },
                else_branch = undecided () => (float[active] passed_else, bool[active] past_else) {
                    growing = Max (exponent, nothing)
                    grown = Mul (growing, size_now)
                    passed_else = Add (passed, grown)
                    past_else = GreaterOrEqual (passed_else, lyapunov)
                }
            >"""

# The same for all rows at every step.
ALWAYS_BOUND = """
            growing = Max (exponent, nothing)
            grown = Mul (growing, size_now)
            passed_now = Add (passed, grown)
            reached = GreaterOrEqual (passed_now, lyapunov)
            is_past = And (reached, limited)"""

DECISION = """
            not_by_rule = Where (is_past, lyapunov_time, budget)
            before_end = Where (is_early, early, not_by_rule)
            reason = Where (is_whole, horizon, before_end)
            by_rule = Or (is_early, is_past)
            exits = Or (by_rule, out_of_steps)
            stays = Not (exits)"""

# Answers go to the rows of the batch they belong to; only the rows that stay are carried on.
COMPACTION = """
            where = Unsqueeze (rows, ones)
            logits_out = ScatterND (logits_in, where, answer)
            steps_out = ScatterND (steps_in, where, numbers)
            reason_out = ScatterND (reason_in, where, reason)
            state_out = Compress <axis = 0> (next_state, stays)
            rows_out = Compress <axis = 0> (rows, stays)
            passed_out = Compress <axis = 0> (passed_now, stays)
            remaining = Size (rows_out)
            go_on = Greater (remaining, zero)"""

# All rows are carried on until the last has exited; the answers of those that have are kept.
MASKING = """
            column = Unsqueeze (rows, ones)
            logits_out = Where (column, answer, logits_in)
            steps_out = Where (rows, numbers, steps_in)
            reason_out = Where (rows, reason, reason_in)
            state_out = Identity (next_state)
            rows_out = And (rows, stays)
            passed_out = Identity (passed_now)
            marks = Cast <to = 7> (rows_out)
            remaining = ReduceMax <keepdims = 0> (marks)
            go_on = Greater (remaining, zero)"""


def write(job: ExportJob, path: Path, compact: bool = True) -> onnx.ModelProto:
    """The adaptive graph, written to `path` and checked."""
    with job.stage("put one step and its loop together"):
        graph = adaptive_graph(job.parts, job.config, compact)
    job.save(graph, path, format="onnx-adaptive")
    job.check_quantised(graph, 1)
    job.check_size([path], 1)
    session = job.open(path)
    if job.settings.precision == "fp32":
        with job.stage("compare depths at batch 1, 3 and 8"):
            job.check_depths(session)
    if job.settings.precision != "fp32" or job.settings.check == "torch":  # depths alone say nothing of the values
        whole = {"threshold": np.array(np.inf, np.float32)}
        job.check_answers(lambda pixels: {"logits": session.run(["logits"], {"pixel_values": pixels, **whole})[0]})
    return graph


def make(job: ExportJob, scratch: Path) -> dict[str, Path]:
    write(job, scratch / "model.onnx")
    job.report.next = f"odevit-serve predict --model {job.quoted} image.jpg"
    return {"model.onnx": job.target}


FORMAT = Format(
    "onnx-adaptive",
    "embedding with early exit inside the graph",
    "per image; rows that have exited are not computed",
    "{name}-{steps}steps-adaptive.onnx",
    (*DEPTH, "tolerance", *PRECISION),
    target=lambda job: Path(f"{job.stem}-adaptive.onnx"),
    make=make,
    suffix=lambda job: ".onnx",
)
