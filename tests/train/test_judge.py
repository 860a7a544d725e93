"""How good a network is, on answers that are written by hand."""

from __future__ import annotations

import math

import torch

from odevit_serve.train.judge import judge


def test_ranks_loss_agreement_and_certainty_of_each_image() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0]] * 4)
    labels = torch.tensor([0, 2, 4, 5])
    teachers = torch.nn.functional.one_hot(torch.tensor([0, 0, 1, 0]), 6).float()
    found = judge(logits, labels, teachers)
    assert found[:, :3].tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]]
    total = sum(math.exp(value) for value in (3, 2, 1, 0, -1, -2))
    torch.testing.assert_close(found[:, 3], math.log(total) - logits[0, labels])
    assert found[:, 4].tolist() == [1, 1, 0, 1]
    torch.testing.assert_close(found[:, 5], torch.full((4,), math.exp(3) / total))


def test_fewer_classes_than_five() -> None:
    found = judge(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), torch.tensor([[0.0, 1.0]]))
    assert found[0, :3].tolist() == [0, 1, 1]
