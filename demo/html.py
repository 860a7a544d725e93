"""The words and small drawings around an answer, as HTML."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from html import escape

import numpy as np
from PIL import Image

from .. import costs
from ..config import Config
from ..errors import UserError
from ..model_card import accuracy_at
from ..runtime import exits
from ..runtime.drawing import HEAT
from ..runtime.dynamics import Floats
from ..runtime.exits import ExitReason
from ..runtime.model import BundleModel
from .trajectory import Choice, Inspection

MAP_SIDE = 448


def sentence(run: Inspection) -> str:
    """Why it stopped where it did."""
    place = f"step {run.steps} of {run.depth.steps}"
    if run.reason is ExitReason.HORIZON:
        return f"Integrated to the horizon, {place}."
    words, _, why = run.sentence.partition(": ")
    return f"{words[:1].upper()}{words[1:]} at {place}: {why}."


def accuracy(config: Config, choice: Choice) -> str:
    """What was measured of another number of steps or solver than the bundle's own, where anything was."""
    own = config.integration
    asked = replace(own, steps=choice.steps or own.steps, solver=choice.solver or own.solver)
    words = "" if asked == own else accuracy_at(config, asked)[0]
    return f" {words[:1].upper()}{words[1:]}." if words else ""


def guarantee(model: BundleModel, choice: Choice) -> str:
    """What is proven at these settings, or that nothing is."""
    config = model.config
    try:
        depth = model.integrated(choice.solver).depth(**choice.asked)
    except UserError as error:
        return f"**Not possible.** {error}"
    proof = config.exit.calibration
    if depth.rule.name == "fixed" and depth.max_steps == depth.steps:
        return "**Full depth.** No image exits early, so there is nothing to guarantee."
    if depth.guaranteed and proof is not None:
        other = (
            "differs from the full-depth answer"
            if proof.target == "agreement"
            else "is wrong where full depth is right"
        )
        return (
            f"**Guaranteed:** with confidence {1 - proof.delta:.0%}, the early answer {other} on at most "
            f"{proof.epsilon:.1%} of images like the {proof.images:,} it was tested on."
        )
    words = "**No guarantee at this setting.**"
    if proof is not None:
        words += (
            f" It was calibrated for {config.exit.rule} at {config.exit.threshold:.4g}, "
            f"{proof.setting.integration} and no limit on depth."
        )
    elif not exits.calibrated(config):
        words += " This bundle has not been calibrated."
    return words


def gauge(run: Inspection) -> str:
    """One cell a step, filled as far as the image went."""
    cells = "".join(f'<i class="{"on" if n < run.steps else "off"}"></i>' for n in range(run.depth.steps))
    text = f"{run.steps} of {run.depth.steps} steps"
    return f'<div class="gauge" role="img" aria-label="Depth used: {text}">{cells}</div>'


def _times(value: float, against: float) -> str:
    """`value` compared with `against`, in words."""
    if against <= 0:
        return ""
    share = value / against
    if abs(share - 1) < 0.005:
        return "the same"
    return f"{1 - share:.0%} less" if share < 1 else f"{share:.2f} times as much"


def _amount(macs: float) -> str:
    return f"{macs / 1e9:.2f} G" if macs >= 1e9 else f"{macs / 1e6:.1f} M"


def answer(run: Inspection) -> str:
    """Answer, depth and cost."""
    bars = "".join(
        f'<div class="top"><span class="name" title="{escape(label)}">{escape(label)}</span>'
        f'<span class="track"><i style="width:{100 * p:.1f}%"></i></span>'
        f'<span class="share">{p:.1%}</span></div>'
        for label, p in run.top()
    )
    other = ""
    if run.full_label != run.label:
        other = f'<p class="differs">At full depth the answer is <b>{escape(run.full_label)}</b>.</p>'
    if run.lowered_to is not None:
        other += f'<p class="differs">The engine is busy and allowed {run.lowered_to} steps.</p>'
    used, full = run.macs(), run.macs(run.depth.steps)
    # Of full depth itself, the two times differ by chance alone.
    whole = run.seconds if run.steps == run.depth.steps else run.full_seconds
    took = _times(run.seconds, whole)
    rows = [("full depth", took, f"({1000 * whole:.1f} ms)", _times(used, full), f"({_amount(full)})")]
    teacher = run.config.teacher
    if teacher is not None:
        macs = costs.teacher_macs(teacher, run.config.architecture)
        short = teacher.name.rpartition(":")[2].split(".")[0]
        name = f'teacher <span title="{escape(teacher.name)}">{escape(short)}</span>'
        took, of = "not measured", ""
        if teacher.time is not None:  # as the bundle has it: the teacher itself is not here
            would = teacher.time * whole
            took, of = _times(run.seconds, would), f"(about {1000 * would:.1f} ms)"
        rows.append((name, took, of, _times(used, macs), f"({_amount(macs)})"))
    body = "".join(
        f"<tr><th>{name}</th><td>{time} <span>{of}</span></td><td>{less} <span>{macs}</span></td></tr>"
        for name, time, of, less, macs in rows
    )
    mark = '<p class="unsure">Unsure: the probability is below the tested threshold.</p>' if run.unsure else ""
    return (
        f'<div class="answer"><h2 id="answer-label">{escape(run.label)}</h2>{mark}{bars}{other}'
        f'<p class="depth"><b class="count">{run.steps}<small>/{run.depth.steps}</small></b> '
        f"{escape(sentence(run))}</p>{gauge(run)}"
        f'<table class="costs"><thead><tr><th>cost, against</th><th>time <span>{1000 * run.seconds:.1f} ms</span></th>'
        f"<th>multiply-adds <span>{_amount(used)}</span></th></tr></thead><tbody>{body}</tbody></table></div>"
    )


def message(text: str) -> str:
    return f'<div class="wrong" role="alert">{escape(text)}</div>'


def attention(run: Inspection, step: int, head: str, opacity: float) -> str:
    """The map at one moment, laid over the picture; the strongest patch shows in full colour."""
    maps = run.trajectory.maps
    step = min(max(int(step), 0), len(maps) - 1)
    number = 0 if head == "mean" else int(head.removeprefix("head "))
    chosen: Floats = maps.mean(1) if number == 0 else maps[:, min(number, maps.shape[1]) - 1]
    low, high = float(chosen[step].min()), float(chosen[step].max())
    level = (chosen[step] - low) / (high - low) if high > low else np.zeros_like(chosen[step])
    side = (MAP_SIDE, MAP_SIDE)
    smooth = np.asarray(Image.fromarray(level.astype(np.float32)).resize(side, Image.Resampling.BICUBIC))
    smooth = np.clip(smooth, 0, 1)
    stops = np.linspace(0, 1, len(HEAT))
    color = np.stack([np.interp(smooth, stops, HEAT[:, i]) for i in range(3)], -1)
    base = np.asarray(run.picture.resize(side, Image.Resampling.BICUBIC), float)
    strength = (opacity * (0.4 + 0.6 * smooth))[..., None]
    mixed = np.rint(base * (1 - strength) + color * strength).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(mixed).save(buffer, "JPEG", quality=88)
    row, column = np.unravel_index(int(chosen[step].argmax()), chosen[step].shape)
    where = f"{_third(row, len(level), 'top', 'bottom')} {_third(column, len(level), 'left', 'right')}".replace(
        "middle middle", "middle"
    )
    which = "Mean attention" if number == 0 else f"Attention of head {number}"
    text = f"{which} of CLS after step {step} of {len(maps) - 1}, strongest at the {where}"
    data = base64.b64encode(buffer.getvalue()).decode()
    when = "start" if step == 0 else f"step {step}, time {run.trajectory.times[step]:.3g}"
    mark = " (exit)" if step == run.steps else ""
    return (
        f'<figure class="map"><img src="data:image/jpeg;base64,{data}" alt="{escape(text)}" data-step="{step}">'
        f"<figcaption>{escape(when)}{mark}: strongest at the {escape(where)}, "
        f"from {low:.2%} to {high:.2%} of the attention a patch</figcaption></figure>"
    )


def _third(place: int | np.integer, size: int, first: str, last: str) -> str:
    return (first, "middle", last)[min(2, int(3 * place / size))]
