"""The checkpoint of a run: all that a killed one needs to go on as if it had never stopped."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UserError
from ..files import atomic


@dataclass
class Progress:
    """Where a run stands; all of it goes into the checkpoint."""

    epoch: int = 0
    batch: int = 0  # batches done in this epoch
    step: int = 0  # batches done in all
    best: float = -math.inf
    lines: int = 0  # of metrics.jsonl that belong to this state
    sums: dict[str, float] = field(default_factory=dict)  # of the loss terms in this epoch
    below_bound: int = 0  # epochs in a row with the losses below the bound
    seconds: float = 0.0  # of training so far


PLACE = ("last_epoch", "_step_count", "_last_lr")  # of a schedule: its length is the recipe's, which may have grown


def save(path: Path, state: Progress, net: nn.Module, average: Any, steppers: list[Any], rates: list[Any]) -> None:
    contents = {
        "progress": vars(state),
        "net": net.state_dict(),
        "average": average.state_dict() if average else {},
        "optimizers": [o.state_dict() for o in steppers],
        "schedules": [{k: r.state_dict()[k] for k in PLACE} for r in rates],
    }
    with atomic(path) as scratch:
        torch.save(contents, scratch)


def restore(path: Path, net: nn.Module, average: Any, steppers: list[Any], rates: list[Any]) -> Progress:
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        net.load_state_dict(contents["net"])
        if average:
            average.load_state_dict(contents["average"])
        for stepper, source in zip(steppers, contents["optimizers"]):
            asked = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in stepper.param_groups]
            stepper.load_state_dict(source)
            for group, settings in zip(stepper.param_groups, asked):
                group.update(settings)  # rates and decay are the recipe's, too
        for rate, source in zip(rates, contents["schedules"]):
            rate.load_state_dict({**rate.state_dict(), **{k: source[k] for k in PLACE}})
        return Progress(**contents["progress"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or ["it is empty"])[0]
        raise UserError(f"{path} cannot be resumed from ({reason[:200]})") from None
