"""Frozen features and the linear head on them: multinomial logistic regression by L-BFGS, in seconds.

The same function fits the head of a student (the baseline that fine-tuning has to beat) and the probe of a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import ODEViT

STRENGTHS = (0.01, 0.1, 1.0)  # of the data against the prior, strongest prior first: each starts from the one before
LARGE = 2e9  # features x classes x images from which on one strength is fitted, not several


@dataclass(frozen=True)
class Head:
    """A linear head, and what it gives on the images it was chosen by."""

    weight: Tensor  # [C,D]
    bias: Tensor  # [C]
    accuracy: float  # mean over the classes that have such images
    strength: float  # of the data against the prior: the one of STRENGTHS that was best

    def copy_to(self, layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            layer.bias.copy_(self.bias)

    def answers(self, features: Tensor) -> np.ndarray:
        logits = features @ self.weight.T + self.bias
        return np.asarray(logits.argmax(1).numpy())


def encoder(model: ODEViT) -> Callable[[Tensor], Tensor]:
    """Pixels to what the head of a student reads: CLS at the end of the trajectory."""

    def encode(pixels: Tensor) -> Tensor:
        state = model.stem(pixels)
        for point in model.trajectory(state):
            state = point.state
        return state[:, 0]

    return encode


@torch.no_grad()
def features(encode: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> Tensor:
    """One row an image, on the CPU."""
    return torch.cat([encode(pixels).float().cpu() for pixels in batches])


def balanced(labels: np.ndarray, classes: int) -> np.ndarray:
    """Weights of mean 1 under which every class that is there counts the same."""
    counts = np.bincount(labels, minlength=classes)
    return len(labels) / (np.count_nonzero(counts) * counts[labels])  # type: ignore[no-any-return]


def class_mean(answers: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy, averaged over the classes: a large class does not hide a small one."""
    right = answers == labels
    return float(np.mean([right[labels == c].mean() for c in np.unique(labels)])) if len(labels) else 0.0


def fit_head(
    known: Tensor, labels: np.ndarray, judged: Tensor, judged_labels: np.ndarray, classes: int, most: int = 100
) -> Head:
    """The head for `known` features and labels that is best on the `judged` ones, over a few strengths of its prior.

    Features are standardised for the fit, and the head is for those as they are. Ties go to the smaller loss.
    """
    few = known.numel() * classes < LARGE
    best: tuple[tuple[float, float], Head] | None = None
    for head in _heads(known, labels, classes, STRENGTHS if few else STRENGTHS[1:2], most):
        logits = judged @ head.weight.T + head.bias
        score = class_mean(logits.argmax(1).numpy(), judged_labels)
        loss = float(F.cross_entropy(logits, torch.from_numpy(judged_labels))) if len(judged_labels) else 0.0
        if best is None or (score, -loss) > best[0]:
            best = (score, -loss), replace(head, accuracy=score)
    assert best is not None
    return best[1]


def refit(head: Head, known: Tensor, labels: np.ndarray, most: int = 100) -> Head:
    """The same head, at the strength that was chosen for it, for other features and labels: all there are, say."""
    return next(_heads(known, labels, len(head.bias), [head.strength], most))


def _heads(known: Tensor, labels: np.ndarray, classes: int, strengths: Sequence[float], most: int) -> Iterator[Head]:
    """A head at each strength of its prior, each fitted from the one before."""
    mean, std = known.mean(0), known.std(0).nan_to_num() + 1e-6
    x, y = (known - mean) / std, torch.from_numpy(labels)
    weights = torch.from_numpy(balanced(labels, classes)).float()
    weight, bias = torch.zeros(classes, x.shape[1]), torch.zeros(classes)
    for strength in strengths:
        weight, bias = _regress(x, y, weights, weight, bias, strength, most)
        own = weight / std
        yield Head(own, bias - own @ mean, 0.0, strength)


def _regress(
    x: Tensor, y: Tensor, weights: Tensor, weight: Tensor, bias: Tensor, strength: float, most: int
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy with a Gaussian prior on the weights, by L-BFGS from the given point."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=most, line_search_fn="strong_wolfe", tolerance_grad=1e-5)
    prior = 1 / (2 * strength * len(x))

    def loss() -> Tensor:
        optimizer.zero_grad()
        fit = (weights * F.cross_entropy(x @ weight.T + bias, y, reduction="none")).mean()
        total = fit + prior * weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[arg-type]
    return weight.detach(), bias.detach()
