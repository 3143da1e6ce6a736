"""Losses of one's own that couple samples by kinks, or by functions that PyTorch cannot differentiate twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.functions.losses import description
from packprop.errors import PackpropError
from packprop.functions import Loss
from tests.versions import AMINMAX_HAS_DERIVATIVE

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
ONES, OTHERS = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])


def batch_hard(s: Tensor) -> Tensor:
    distances, same = torch.cdist(s, s), LABELS[:, None] == LABELS
    return torch.relu((distances * same).amax(1) - (distances + 1e3 * same).amin(1) + 1).mean()


class LogSumExp(torch.autograd.Function):
    """A function over all samples, whose gradient was made in its forward pass."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        ctx.save_for_backward(s.softmax(0))
        return s.logsumexp(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slopes,) = ctx.saved_tensors
        return slopes * gradient


class Halved(torch.autograd.Function):
    """The same, of each sample: half its squares."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        ctx.save_for_backward(s.clone())
        return s.square().sum(1) / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slopes,) = ctx.saved_tensors
        return slopes * gradient[:, None]


def hinge_in_place(s: Tensor) -> Tensor:
    differences = (s[:3] - s[3:]) * 1
    differences[:, 0].relu_()
    return differences.sum()


def largest_of_a_class(s: Tensor) -> Tensor:
    index = LABELS[:, None].expand(-1, s.shape[1])
    return torch.full((3, s.shape[1]), -9.0).to(s).scatter_reduce(0, index, s, "amax").sum()


def mean_of_a_class(s: Tensor) -> Tensor:
    losses = s.square().sum(1)
    return losses.new_zeros(3).scatter_reduce(0, LABELS, losses, "mean").mean()


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
    "largest of a class": largest_of_a_class,
    "slopes": lambda s: F.prelu(s[:, None, 0] - s[None, :, 0], s.new_full((1,), 0.2)).sum(),
    "median": lambda s: s.nanmedian(0).values.sum(),
    "remainders": lambda s: torch.remainder(s, s.roll(1, 0)).sum(),
    "hinge in place": hinge_in_place,
    "linear beyond a bound": lambda s: F.hardswish(9e3 * (s[:3] - s[3:])).sum(),
    "a gradient made before": lambda s: LogSumExp.apply(s).sum(),
    "behind cumulated exponentials": lambda s: s.logcumsumexp(1).max(),
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
    "squared norm": lambda s: s.norm() ** 2,
    "squared norm of a few": lambda s: F.softshrink(s, 1.0).norm() ** 2,
    "squared norm of numbers": lambda s: s[:, 0].norm() ** 2,
    "squared distance": lambda s: torch.dist(s, torch.ones_like(s)) ** 2 / 6,
    "products of its own": lambda s: torch.diag(s[:, :2] @ s[:, 2:].T).sum(),
    "means of classes": mean_of_a_class,
    "sums without NaN": lambda s: s.square().nansum() + (s - 1).square().nanmean(),
    "sums by class": lambda s: s.new_zeros(3).index_put((LABELS,), s.square().sum(1), accumulate=True).mean(),
    "complex numbers": lambda s: (torch.fft.fft(s) * torch.fft.fft(s).conj()).sum().real,
    "deviation of equal numbers": lambda s: (s - 9 * (LABELS == 1)[:, None]).relu().std(1).sum(),
    "a guard": lambda s: torch.nan_to_num(s.square().sum()),
    "a gradient made before": lambda s: Halved.apply(s).sum(),
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


if not AMINMAX_HAS_DERIVATIVE:
    del COUPLING["smallest and largest"], APART["largest and smallest entry"]


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


class Summed(torch.autograd.Function):
    """Half the sum of squared distances, as one number; its gradient was made in its forward pass."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(s - targets)
        return (s - targets).square().sum() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradient, None


class FusedLoss(nn.Module):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return Summed.apply(input, target)


def test_a_sum_that_only_its_author_knows() -> None:
    """The error says what makes it known."""
    targets, fused = torch.ones(6, 4).double(), packprop.extend(FusedLoss())
    with pytest.raises(PackpropError, match="function of your own") as caught:
        rows(lambda s: fused(s, targets))
    assert "register_loss" in caught.value.instead
    try:

        @packprop.register_loss(FusedLoss)
        def _(input: Tensor, target: Tensor) -> Loss:
            return Loss(class_axis=None, weight=1.0, divisor=1.0, root=None)

        torch.testing.assert_close(*rows(lambda s: fused(s, targets)))
    finally:
        del description.LOSSES[FusedLoss]


BATCH = torch.arange(64) % 4

SMALL_SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean confidence": lambda s: (s.softmax(1).mean(0) ** 2).sum(),
    "entropy of the mean": lambda s: (s.softmax(1).mean(0) * s.softmax(1).mean(0).log()).sum(),
    "root of the mean": lambda s: s.square().mean().sqrt(),
    "all pairs": lambda s: F.softplus(s[:, None, 0] - s[None, :, 0]).mean(),
}
"""Losses in which each sample depends little on each other one."""


@pytest.mark.parametrize("name", SMALL_SHARES)
@pytest.mark.parametrize("how", ["bfloat16", "autocast", "float16"])
def test_few_digits_hide_nothing(name: str, how: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    layer, x = packprop.extend(nn.Linear(3, 4).to(dtype)), torch.randn(64, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        s = layer(x)
        loss = F.cross_entropy(s, BATCH) + 0.1 * SMALL_SHARES[name](s)
    with pytest.raises(PackpropError, match="mixes the samples"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("name", [name for name in APART if "squared" not in name])
def test_few_digits_do_not_mix_anything(name: str) -> None:
    torch.manual_seed(0)
    layer, x = packprop.extend(nn.Linear(3, 4).bfloat16()), torch.randn(6, 3).bfloat16()
    try:
        loss = F.cross_entropy(s := layer(x), LABELS) + APART[name](s)
    except RuntimeError:
        pytest.skip("PyTorch does not compute this in bfloat16")
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert layer.weight.grad_batch.shape == (6, 4, 3)


@pytest.mark.parametrize(
    "of_values", [torch.sqrt, torch.square, torch.log], ids=lambda function: function.__name__
)
def test_functions_of_large_losses(of_values: Callable[[Tensor], Tensor]) -> None:
    """Slopes and curvature of a large number differ by its size, and both are small beside it."""
    torch.manual_seed(0)
    layer, x = packprop.extend(nn.Linear(3, 4)), torch.randn(6, 3)
    loss = of_values(F.mse_loss(layer(x), 2e5 + 5e4 * torch.randn(6, 4)))
    with pytest.raises(PackpropError, match="mixes the samples"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("samples", [25, 26])
def test_curvature_that_is_not_finite(samples: int) -> None:
    """Beyond 25 rows PyTorch computes distances by another function, which has none at zero."""
    torch.manual_seed(0)
    layer, x = packprop.extend(nn.Linear(3, 4)), torch.randn(samples, 3)
    distances = torch.cdist(s := layer(x), s)
    loss = (-distances).exp().sum().log() + distances.mean()
    with pytest.raises(PackpropError, match="mixes the samples"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_samples_of_huge_curvature_hide_nothing() -> None:
    torch.manual_seed(0)
    layer, x = packprop.extend(nn.Linear(3, 4)), torch.randn(6, 3)
    s = layer(x)
    targets = s.detach() + torch.tensor([0.0, 1, 1, 1, 1, 0])[:, None]  # two are fitted exactly
    loss = ((s - targets).square().sum(1) + 1e-8).log().mean() + 0.1 * (s.softmax(1).mean(0) ** 2).sum()
    with pytest.raises(PackpropError, match="mixes the samples"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_similarities_of_samples_that_are_zero() -> None:
    torch.manual_seed(0)
    layer, x = packprop.extend(nn.Linear(3, 4)), torch.randn(6, 3)
    s = layer(x) * torch.tensor([1.0, 1, 0, 0, 1, 1])[:, None]
    loss = F.cosine_similarity(s[:, None], s[None], dim=-1).square().mean()
    with pytest.raises(PackpropError, match="mixes the samples"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_a_kink_that_one_sample_reaches_is_one_that_others_may_reach() -> None:
    """What the first pass finds is kept for later ones."""
    layer = packprop.extend(nn.Linear(1, 1, bias=False).double())
    nn.init.ones_(layer.weight)
    x = torch.tensor([[2.0], [0.0], [0.0]]).double()
    loss = (torch.relu(layer(x) - 1).sum() - 0.5).abs()
    with pytest.raises(PackpropError, match="mixes the samples"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda s: F.relu(s - 1).mean(0).square().sum(),
    "clamp": lambda s: s.clamp(min=1).sum(0).square().sum(),
    "where": lambda s: torch.where(s > 1, s, 0.0).mean(0).square().sum(),
    "maximum": lambda s: torch.maximum(s, torch.ones_like(s)).mean(0).exp().sum(),
}
"""Losses whose small values keep samples apart that larger ones couple."""


@pytest.mark.parametrize("name", MASKED)
def test_samples_that_only_present_values_keep_apart(name: str) -> None:
    """What holds for the values of a first pass is not kept for later ones."""
    torch.manual_seed(0)
    layer = packprop.extend(nn.Linear(3, 4).double())
    for scale in (0.1, 0.1, 0.1, 3.0):
        s = layer(scale * torch.randn(6, 3).double())
        loss = F.cross_entropy(s, LABELS) + MASKED[name](s)
        if scale > 1:
            with (
                pytest.raises(PackpropError, match="mixes the samples"),
                packprop.backpack(extensions.BatchGrad()),
            ):
                loss.backward()
        else:
            with packprop.backpack(extensions.BatchGrad()):
                loss.backward()


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_margins_beside_another_loss(loss: Callable[..., Tensor]) -> None:
    targets = LABELS if loss is F.multi_margin_loss else F.one_hot(LABELS, 4)
    torch.testing.assert_close(*rows(lambda s: F.cross_entropy(s, LABELS) + loss(s, targets)))


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
