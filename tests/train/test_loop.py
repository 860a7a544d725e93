"""The loop's own parts: schedules, optimisers, averages, metrics. Whole runs are in test_run.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from odevit_serve.errors import UserError
from odevit_serve.train.checkpoint import Progress, restore, save
from odevit_serve.train.loop import (
    MetricsLog,
    Objective,
    Plan,
    _ema,
    _weigh,
    optimizers,
    scheduler,
)


class Toy(Objective):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.weights = {"a": 2.0, "b": 0.5}

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.dim() == 2]


def rates(schedule: str, steps: int = 100, **settings: float) -> list[float]:
    plan = Plan(1, 1, 0.1, schedule=schedule, **settings)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    planned = scheduler(optimizer, plan, steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        planned.step()
    return seen


def test_schedules_warm_up_and_come_down() -> None:
    one = rates("onecycle", warmup=0.2)
    assert max(one) == pytest.approx(0.1, rel=1e-3)
    assert one.index(max(one)) == pytest.approx(19, abs=1)
    assert one[-1] < 0.001
    restarts = rates("cosine-restarts", warmup=0.1, restarts=3)
    peaks = [i for i in range(1, 99) if restarts[i] > 0.99 * 0.1 and restarts[i - 1] < restarts[i]]
    assert len(peaks) >= 3
    assert rates("constant", warmup=0.1)[10:] == [0.1] * 90


@pytest.mark.parametrize("schedule", ["onecycle", "cosine-restarts", "constant"])
def test_a_run_resumed_with_more_epochs_follows_the_longer_schedule(schedule: str, tmp_path: Path) -> None:
    plan, seen = Plan(1, 1, 0.1, schedule=schedule), []
    for length, peak in ((100, 0.3), (200, 0.1)):  # and its learning rate, which is lower
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), peak)
        planned = scheduler(optimizer, plan, length)
        if length == 200:
            restore(tmp_path / "last.pt", net, None, [optimizer], [planned])
        for _ in range(60):
            optimizer.step()
            planned.step()
            seen.append(optimizer.param_groups[0]["lr"])
        save(tmp_path / "last.pt", Progress(), net, None, [optimizer], [planned])
    assert seen[60:] == pytest.approx(rates(schedule, 200)[61:121])


def test_every_trainable_parameter_has_one_optimiser() -> None:
    for name in ("adamw", "muon"):
        toy = Toy()
        toy.net[1].bias.requires_grad_(False)
        owned = [
            p for o in optimizers(toy, Plan(1, 1, 0.1, optimizer=name)) for g in o.param_groups for p in g["params"]
        ]
        assert sorted(map(id, owned)) == sorted(id(p) for p in toy.net.parameters() if p.requires_grad)


def test_the_average_forgets_its_start_in_a_short_run() -> None:
    net = nn.Linear(1, 1, bias=False)
    average = AveragedModel(net, multi_avg_fn=_ema(0.999))
    with torch.no_grad():
        net.weight.fill_(100.0)
        average.update_parameters(net)
        net.weight.fill_(1.0)
    for _ in range(60):
        average.update_parameters(net)
    assert average.module.weight.item() < 2.0  # a constant 0.999 would stand at 94


def test_terms_are_weighed_and_one_that_is_not_finite_is_named() -> None:
    toy = Toy()
    assert _weigh({"a": torch.tensor(1.0), "b": torch.tensor(4.0)}, toy.weights, Progress()).item() == 4.0
    with pytest.raises(UserError, match="the b loss became inf at step 8"):
        _weigh({"a": torch.tensor(1.0), "b": torch.tensor(float("inf"))}, toy.weights, Progress(step=7))


def test_metrics_of_a_resumed_run_go_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, 0, active=True)
    for step in range(5):
        first.write(step, {"loss": float(step)})
    again = MetricsLog(tmp_path, 3, active=True)
    again.write(3, {"loss": 30.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [0.0, 1.0, 2.0, 30.0]
    assert again.lines == 4
