"""Starting from a smaller bundle: nothing that it knew is lost."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import tiny_model

from odevit_serve.errors import UsageError
from odevit_serve.train.model import ODEViT
from odevit_serve.train.warm_start import missed, start_from, with_norms


def other_shape(**changes: object) -> ODEViT:
    config = tiny_model().config
    shape = dataclasses.replace(config.architecture, **changes)
    spec = dataclasses.replace(config.preprocessing, input_size=(3, shape.image_size, shape.image_size))
    torch.manual_seed(1)
    return ODEViT(config.replace(architecture=shape, preprocessing=spec)).eval()


@pytest.mark.parametrize("ratio", [2.0, 3.0, 4.5])
def test_a_wider_mlp_answers_as_before(ratio: float) -> None:
    old, new = tiny_model(), other_shape(mlp_ratio=ratio)
    pixels = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert not torch.allclose(new(pixels), old(pixels), atol=1e-2)
        assert start_from(new, old)
        torch.testing.assert_close(new(pixels), old(pixels), atol=1e-4, rtol=1e-4)


def stack(width: int, seed: int = 1) -> ODEViT:
    torch.manual_seed(seed)
    return other_shape(stem="convolutions", stem_width=width)


def test_a_wider_stem_answers_as_before() -> None:
    old, new = stack(8), stack(12, 2)
    with torch.no_grad():
        for layer in old.patch:
            if isinstance(layer, torch.nn.Conv2d):
                layer.bias.normal_()
        pixels = torch.randn(4, 3, 16, 16)
        assert start_from(new, old)
        torch.testing.assert_close(new(pixels), old(pixels), atol=1e-4, rtol=1e-4)
    new(pixels).square().sum().backward()
    last = [layer for layer in new.patch if isinstance(layer, torch.nn.Conv2d)][-1]
    assert last.weight.grad[:, 8:].abs().max() > 0  # the new channels can get a say


def test_a_narrower_stem_has_to_learn() -> None:
    assert not start_from(stack(8), stack(12))


def test_norms_change_nothing_at_first() -> None:
    model = stack(8)
    pixels = [torch.randn(16, 3, 16, 16) * 2 + 1 for _ in range(4)]
    normed = with_norms(model.patch, pixels)
    assert sum(isinstance(layer, torch.nn.BatchNorm2d) for layer in normed) == len(
        [layer for layer in model.patch if isinstance(layer, torch.nn.Conv2d)]
    )
    with torch.no_grad():
        torch.testing.assert_close(normed.eval()(pixels[0]), model.patch(pixels[0]), atol=1e-4, rtol=1e-4)
        whole = torch.cat(pixels)  # in training, the statistics of this very batch are undone
        torch.testing.assert_close(normed.train()(whole), model.patch(whole), atol=1e-2, rtol=1e-2)


@torch.no_grad()
def test_pictures_of_another_size_keep_all_but_the_grid() -> None:
    old, new = stack(8), other_shape(stem="convolutions", stem_width=8, image_size=32)
    old.position[:, 1:] = torch.arange(old.config.architecture.width)
    assert start_from(new, old)  # the stem is the same, for larger pictures
    torch.testing.assert_close(new.position[:, 0], old.position[:, 0])
    torch.testing.assert_close(new.position[:, 1:], old.position[:, 1:2].expand(-1, 64, -1))
    torch.testing.assert_close(new.patch.state_dict(), old.patch.state_dict())
    torch.testing.assert_close(new.psi.state_dict(), old.psi.state_dict())


def test_new_units_can_learn() -> None:
    old, new = tiny_model(), other_shape(mlp_ratio=3.0)
    start_from(new, old)
    new(torch.randn(4, 3, 16, 16)).square().sum().backward()
    gradient = new.psi.mlp.down.weight.grad
    assert gradient is not None
    assert gradient[:, old.psi.mlp.up.out_features :].abs().max() > 0


def test_all_but_a_new_stem_is_copied() -> None:
    old, new = tiny_model(), other_shape(stem="convolutions")
    fresh = {k: v.clone() for k, v in new.patch.state_dict().items()}
    assert not start_from(new, old)
    for name, weight in new.state_dict().items():
        expected = fresh[name.removeprefix("patch.")] if name.startswith("patch.") else old.state_dict()[name]
        torch.testing.assert_close(weight, expected, msg=name)


def test_an_mlp_of_fewer_units_is_refused() -> None:
    with pytest.raises(UsageError, match="random cannot become the recipe's model"):
        start_from(other_shape(mlp_ratio=1.0), tiny_model())


def test_a_convolution_that_is_new_begins_as_the_identity() -> None:
    old, new = tiny_model(convolution=0), other_shape(convolution=3)
    assert start_from(new, old)
    pixels = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(new(pixels), old(pixels), atol=1e-4, rtol=1e-4)


def test_missed_by_hand() -> None:
    expected = torch.randn(64, 8, 4, 4) * 3 + 5
    assert missed(expected, expected) == 0
    middle = expected.mean((0, 2, 3), keepdim=True)
    torch.testing.assert_close(missed(middle.expand_as(expected), expected), torch.tensor(1.0))
    half = middle + (expected - middle) / 2
    torch.testing.assert_close(missed(half, expected), torch.tensor(0.25))
    assert missed(expected + 3, expected) == pytest.approx(1.0, rel=0.1)


def test_another_patch_size_learns_on_its_own_grid() -> None:
    old, new = stack(8), other_shape(patch_size=8)
    assert not start_from(new, old)
    torch.testing.assert_close(new.psi.mlp.up.weight, old.psi.mlp.up.weight)
    pixels = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        share = missed(new.patch(pixels), old.patch(pixels))
    assert share.isfinite()
    even = torch.ones(1, 3, 4, 4) * torch.arange(3.0).view(1, 3, 1, 1) + torch.randn(1, 3, 1, 1)
    varied = torch.cat([even, even + 1])
    assert (
        missed(varied[..., :2, :2], varied) < 1e-6
    )  # what does not change from place to place is the same on any grid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 48}, "random has width 24, the recipe's model 48, .* set architecture.width=24"),
        ({"heads": 2}, "has heads 3, the recipe's model 2"),
        ({"registers": 0}, "has registers 2, the recipe's model 0"),
        ({"attention": "l2"}, "has attention dot, the recipe's model l2"),
        ({"convolution": 0}, "has a convolution of 3 inside F, the recipe's model none"),
        ({"convolution": 5}, "has a convolution of 3 inside F, the recipe's model 5"),
    ],
)
def test_what_cannot_be_adapted_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        start_from(other_shape(**changes), tiny_model())


def test_rows_of_the_head_follow_the_names_of_the_classes() -> None:
    old = tiny_model()
    config = old.config.replace(labels=("eel", "owl", "ant"), architecture=dataclasses.replace(
        old.config.architecture, classes=3))  # fmt: skip
    new = ODEViT(config)
    fresh = new.head.weight[1].clone()
    assert start_from(new, old)
    torch.testing.assert_close(new.head.weight[[0, 2]], old.head.weight[[4, 0]])
    torch.testing.assert_close(new.head.weight[1], fresh)
