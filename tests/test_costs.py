"""Parameters and multiply-adds, against real models and torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from odevit_serve import costs
from odevit_serve.config import STEMS, Architecture, Config, Integration, Preprocessing, TeacherFacts
from odevit_serve.solvers import SOLVERS, SPLITTINGS, splits
from odevit_serve.train.model import ODEViT


def make(**changes: object) -> ODEViT:
    shape = Architecture(16, 4, 24, 3, 2.0, 5, 2, **changes)  # type: ignore[arg-type]
    return ODEViT(Config(shape, Integration(3.0, 3), Preprocessing((3, 16, 16)))).eval()


def test_parameters_and_macs_are_those_counted_by_hand() -> None:
    stems = ({"stem": "convolutions"}, {"stem": "convolutions", "stem_width": 5}, {"stem": "deep", "stem_width": 6})
    for changes in ({}, {"convolution": 3}, {"attention": "l2"}, *stems):
        model = make(**changes)
        counted = costs.parameters(model.config.architecture)
        model.freeze_copied()
        model.patch.requires_grad_(False)  # a stack of convolutions is trained, but is no part of psi
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == counted["psi"]
        assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == counted["rest"]


def test_a_deep_stem_is_the_one_described() -> None:
    """One look at the whole picture, a pair of convolutions for each halving, and a kernel of 1."""
    assert Architecture(32, 4, 192, stem="deep", stem_width=128).convolutions() == [
        (3, 32, 3, 1, 32),
        (32, 64, 3, 2, 16),
        (64, 64, 3, 1, 16),
        (64, 128, 3, 2, 8),
        (128, 128, 3, 1, 8),
        (128, 192, 1, 1, 8),
    ]


@pytest.mark.parametrize("stem", STEMS)
def test_macs_match_torchs_own_counter(stem: str) -> None:
    model = make(convolution=3, stem=stem)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 16, 16))
    assert counter.get_total_flops() == 2 * model.config.integration.macs(model.config.architecture) - (
        2 * 2 * 24 * 5  # torch answers once, at the end; the runtime does after every one of the 3 steps
    )


@pytest.mark.parametrize(
    ("solver", "splitting"), [(name, other) for name in SOLVERS for other in SPLITTINGS if splits(name, other)]
)
def test_a_step_costs_its_evaluations(solver: str, splitting: str) -> None:
    model = make()
    shape, own = model.config.architecture, Integration(3.0, 3, solver, splitting)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 16, 16), solver=solver, splitting=splitting)
    after_each = 2 * 24 * 5  # the runtime answers after every step, torch after the last one
    assert counter.get_total_flops() == 2 * (costs.macs(shape, own) - after_each)
    assert costs.macs(shape, own, 1.5) == pytest.approx((costs.macs(shape, own, 1) + costs.macs(shape, own, 2)) / 2)


def test_a_teacher_costs_what_timm_says() -> None:
    import timm

    shape, teacher = Architecture(32, 4, 48, 3, classes=7), TeacherFacts("random", layers=3, width=48, heads=3)
    vit = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=48, depth=3, num_heads=3, num_classes=7
    ).eval()  # fmt: skip
    assert costs.teacher_parameters(teacher, shape) == sum(value.numel() for value in vit.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        vit(torch.randn(1, 3, 32, 32))
    assert counter.get_total_flops() == 2 * costs.teacher_macs(teacher, shape)
