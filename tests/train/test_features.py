"""The head on frozen features is the regularised logistic regression that it says it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from odevit_serve.train.features import STRENGTHS, _regress, balanced, class_mean, fit_head, refit


def cloud(seed: int, count: int = 60, classes: int = 3, width: int = 5) -> tuple[torch.Tensor, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % classes)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return torch.from_numpy(centres[labels] + random.normal(size=(count, width))).float(), labels


@pytest.mark.parametrize("strength", STRENGTHS)
def test_the_optimum_is_scipys(strength: float) -> None:
    x, labels = cloud(0)
    weights = np.random.default_rng(1).uniform(0.5, 2, len(x))

    def loss(flat: np.ndarray) -> float:
        weight, bias = flat[:15].reshape(3, 5), flat[15:]
        logits = x.numpy() @ weight.T + bias
        logits = logits - np.logaddexp.reduce(logits, 1, keepdims=True)
        fit = -(weights * logits[np.arange(len(x)), labels]).mean()
        return float(fit + (weight**2).sum() / (2 * strength * len(x)))

    weight, bias = _regress(
        x, torch.from_numpy(labels), torch.from_numpy(weights).float(), torch.zeros(3, 5), torch.zeros(3), strength, 200
    )
    best = minimize(loss, np.zeros(18))
    assert loss(np.concatenate([weight.flatten(), bias])) == pytest.approx(best.fun, abs=1e-4)


@settings(max_examples=10, deadline=None)
@given(scale=st.floats(0.01, 100), shift=st.floats(-50, 50), seed=st.integers(0, 100))
def test_the_units_of_the_features_do_not_matter(scale: float, shift: float, seed: int) -> None:
    (x, labels), (judged, truth) = cloud(seed), cloud(seed + 1)
    one = fit_head(x, labels, judged, truth, 3)
    two = fit_head(scale * x + shift, labels, scale * judged + shift, truth, 3)
    agree = one.answers(judged) == two.answers(scale * judged + shift)
    assert agree.mean() > 0.95  # but for pictures on a boundary
    assert one.accuracy == class_mean(one.answers(judged), truth)
    assert one.accuracy > 0.5


def test_a_class_a_hundred_times_smaller_is_not_forgotten() -> None:
    random = np.random.default_rng(0)
    labels = np.array([0] * 400 + [1] * 4)
    x = torch.from_numpy(random.normal(size=(404, 4)) + 2.0 * labels[:, None]).float()
    truth = np.arange(200) % 2
    judged = torch.from_numpy(random.normal(size=(200, 4)) + 2.0 * truth[:, None]).float()
    head = fit_head(x, labels, judged, truth, 2)
    assert (head.answers(judged)[truth == 1] == 1).mean() > 0.8


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_balanced_weights_give_every_class_the_same_share(values: list[int]) -> None:
    labels = np.array(values)
    weights = balanced(labels, 5)
    assert weights.mean() == pytest.approx(1.0)
    shares = [weights[labels == c].sum() for c in np.unique(labels)]
    np.testing.assert_allclose(shares, shares[0])


def test_refit_is_the_head_at_the_strength_that_was_chosen() -> None:
    generator = torch.Generator().manual_seed(5)
    labels = np.arange(60) % 3
    x = torch.randn(60, 6, generator=generator) + 2 * torch.nn.functional.one_hot(torch.from_numpy(labels), 6)
    head = fit_head(x[:40], labels[:40], x[40:], labels[40:], 3)
    again = refit(head, x[:40], labels[:40], most=200)
    torch.testing.assert_close(again.weight, head.weight, atol=2e-3, rtol=0)
    more = refit(head, x, labels)
    assert (more.answers(x[40:]) == labels[40:]).mean() >= (head.answers(x[40:]) == labels[40:]).mean()
    assert not torch.allclose(more.weight, head.weight, atol=2e-3)
