"""A checkpoint gives back all that was put in, and a damaged one is a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from odevit_serve.errors import UserError
from odevit_serve.train.checkpoint import Progress, restore, save


def stepped(seed: int, steps: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    return net, optimizer, rate


def test_what_is_restored_goes_on_as_what_was_saved(tmp_path: Path) -> None:
    net, optimizer, rate = stepped(0, 5)
    state = Progress(epoch=2, batch=3, step=5, best=0.5, lines=7, sums={"loss": 1.5})
    save(tmp_path / "last.pt", state, net, None, [optimizer], [rate])
    other, its, its_rate = stepped(1, 0)
    assert restore(tmp_path / "last.pt", other, None, [its], [its_rate]) == state
    pixels = torch.ones(1, 3)
    for network, stepper, schedule in ((net, optimizer, rate), (other, its, its_rate)):
        network(pixels).sum().backward()
        stepper.step()
        schedule.step()
    for a, b in zip(net.parameters(), other.parameters()):
        assert torch.equal(a, b)  # the moments and the rate were restored, too
    assert rate.get_last_lr() == its_rate.get_last_lr()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    path, (net, optimizer, rate) = tmp_path / "last.pt", stepped(0, 1)
    save(path, Progress(), net, None, [optimizer], [rate])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    with pytest.raises(UserError, match=r"last\.pt cannot be resumed from"):
        restore(path, net, None, [optimizer], [rate])
