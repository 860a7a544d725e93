"""Muon: orthogonal updates, and the same steps as torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from odevit_serve.train.muon import Muon, orthogonal


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [(24, 24), (48, 24), (24, 48)])
def test_singular_values_end_near_one_and_the_directions_stay(shape: tuple[int, int], half: bool) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix, half=half)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    mixed = u.mT @ found @ v.mT  # diagonal: the iteration changes singular values alone
    torch.testing.assert_close(mixed, torch.diag(mixed.diagonal()), atol=0.03 if half else 1e-4, rtol=0)


def test_steps_are_those_of_torchs_own() -> None:
    generator = torch.Generator().manual_seed(1)
    ours = [nn.Parameter(torch.randn(s, generator=generator)) for s in ((16, 16), (32, 16), (16, 32))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    mine = Muon(ours, 0.02, weight_decay=0.05)
    reference = torch.optim.Muon(theirs, 0.02, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    start = [p.detach().clone() for p in ours]
    for _ in range(4):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, before in zip(ours, theirs, start):
        moved = (a - before).norm()
        assert moved > 0.01
        assert (a - b).norm() < 0.02 * moved  # torch rounds to bfloat16 on the way


def test_a_kernel_is_stepped_as_the_matrix_with_a_row_for_each_output() -> None:
    generator = torch.Generator().manual_seed(2)
    kernel = nn.Parameter(torch.randn(8, 4, 3, 3, generator=generator))
    matrix = nn.Parameter(kernel.detach().flatten(1).clone())
    kernel.grad = torch.randn(kernel.shape, generator=generator)
    matrix.grad = kernel.grad.flatten(1).clone()
    Muon([kernel], 0.02).step()
    Muon([matrix], 0.02).step()
    torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach())
