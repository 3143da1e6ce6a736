"""Losses of one's own that couple samples by kinks, or by functions that PyTorch cannot differentiate twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
ONES, OTHERS = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])


def batch_hard(s: Tensor) -> Tensor:
    distances, same = torch.cdist(s, s), LABELS[:, None] == LABELS
    return torch.relu((distances * same).amax(1) - (distances + 1e3 * same).amin(1) + 1).mean()


COUPLING: dict[str, Callable[[Tensor], Tensor]] = {
    "batch-hard triplets": batch_hard,
    "pairwise hinge": lambda s: torch.relu(1 - s[:3, None] + s[None, 3:]).mean(),
    "margin ranking": lambda s: F.margin_ranking_loss(s[ONES, 0], s[OTHERS, 0], torch.ones(3)),
    "total variation": lambda s: (s[1:] - s[:-1]).abs().sum(),
    "mean deviation": lambda s: (s - s.mean(0)).abs().mean(),
    "larger of two": lambda s: torch.maximum(s[ONES], s[OTHERS]).sum(),
    "all distances": lambda s: F.pdist(s).sum(),
    "sums of differences": lambda s: torch.cdist(s, s, p=1.0).sum(),
    "neighbours": lambda s: F.l1_loss(s, s.roll(1, 0)),
    "deviation of two": lambda s: s[:2].sum(1).std() + s[2:].sum(),
    "largest sample": lambda s: torch.linalg.vector_norm(s.square().sum(1), torch.inf),
    "absolute sums": lambda s: torch.linalg.vector_norm(s.sum(0), 1),
    "absolute differences": lambda s: F.pairwise_distance(s, s.roll(1, 0), p=1.0).sum(),
    "distances of scores": lambda s: F.pairwise_distance(s[:, :1], s[:, :1].roll(1, 0)).sum(),
    "distance of halves": lambda s: torch.dist(s[:3], s[3:], 1),
    "all absolute differences": lambda s: F.pdist(s, 1.0).sum(),
    "largest differences": lambda s: torch.cdist(s, s, p=torch.inf).sum(),
    "smallest and largest": lambda s: sum(s.aminmax(dim=0)).sum(),
}

APART: dict[str, Callable[[Tensor], Tensor]] = {
    "hinge": lambda s: torch.relu(1 - s).mean(),
    "largest class": lambda s: s.amax(1).sum(),
    "pieces": lambda s: torch.where(s.abs() < 1, s.square(), s.abs()).sum(),
    "similarity": lambda s: (1 - F.cosine_similarity(s, torch.ones_like(s))).clamp(min=0).sum(),
    "nearest centre": lambda s: torch.cdist(s, torch.eye(4).double()).amin(1).sum(),
    "distances inside": lambda s: torch.cdist(s[..., None], s[..., None]).sum(),
    "all entries": lambda s: s.flatten().abs().sum(),
    "triplets inside": lambda s: F.triplet_margin_loss(s[:, :1], s[:, 1:2], s[:, 2:3]),
    "sum of norms": lambda s: torch.linalg.vector_norm(s.square().sum(1), 1),
    "absolute entries of all": lambda s: torch.linalg.vector_norm(s, 1),
    "distance from a constant": lambda s: torch.dist(s, torch.ones_like(s), 1),
    "absolute entries": lambda s: torch.linalg.vector_norm(s, 1, dim=1).sum(),
    "largest and smallest entry": lambda s: sum(s.aminmax(dim=1)).sum(),
}


def rows(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients of single samples, and the derivative of the loss in their own outputs pulled back."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 4).double(), torch.randn(6, 3).double()
    out = layer(x)
    (slope,) = torch.autograd.grad(loss(out), out)
    packprop.extend(layer)
    with packprop.backpack(extensions.BatchGrad()):
        loss(layer(x)).backward()
    return layer.weight.grad_batch, slope[:, :, None] * x[:, None]


@pytest.mark.parametrize("name", COUPLING)
def test_losses_that_couple_samples_are_refused(name: str) -> None:
    with pytest.raises(PackpropError, match="mixes the samples"):
        rows(COUPLING[name])


@pytest.mark.parametrize("name", COUPLING)
def test_they_are_refused_beside_a_loss_that_was_reduced(name: str) -> None:
    with pytest.raises(PackpropError, match="mixes the samples"):
        rows(lambda s: F.cross_entropy(s, LABELS) + COUPLING[name](s))


@pytest.mark.parametrize("name", APART)
def test_kinks_of_each_sample_are_fine(name: str) -> None:
    torch.testing.assert_close(*rows(APART[name]))
    torch.testing.assert_close(*rows(lambda s: F.cross_entropy(s, LABELS) + APART[name](s)))


@pytest.mark.parametrize("pairs", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("coupled", [1, None])
def test_pairs_of_any_number(pairs: int, coupled: int | None) -> None:
    """However many there are, and also if only one of them is compared."""
    torch.manual_seed(0)
    layer, x = packprop.extend(nn.Linear(3, 4).double()), torch.randn(2 * pairs, 3).double()
    ones, others = layer(x).sum(1).chunk(2)
    loss = -F.logsigmoid(ones - others)[:coupled].sum() + ones.sum()
    with pytest.raises(PackpropError, match="mixes the samples"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
