"""Losses that are no sum of one term for each sample, and losses whose samples are on another axis."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.functions.losses.read import LOSS_NODES
from packprop.engine.samples import locating as located
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.graph.one_by_one import double
from tests.references.running import assert_near
from tests.selection import one_in


def barlow_twins(z: Tensor, other: Tensor) -> Tensor:
    a, b = ((t - t.mean(0)) / t.std(0) for t in (z, other))
    correlation = a.T @ b / len(z)
    return (correlation - torch.eye(z.shape[1]).to(z)).square().sum()


def nt_xent(z: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.5 - 9 * torch.eye(len(z)).to(z), labels)


MIXING_LOSSES = [
    pytest.param(lambda z, y: barlow_twins(z, z * 0.9 + 0.1 * y), id="barlow-twins"),
    pytest.param(lambda z, y: nt_xent(z, y[:, 0].argsort()), id="nt-xent"),
    pytest.param(lambda z, y: ((z - z.mean(0)) / z.std(0) - y).square().mean(), id="normalised"),
    pytest.param(lambda z, y: (z.square().sum(1).softmax(0) * y[:, 0]).sum(), id="softmax-over-samples"),
]


class Own(nn.Module):
    """A loss of one's own."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.function(z, y)


@one_in(2)
@pytest.mark.parametrize("how", ["extended", "plain", "recorded"])
@pytest.mark.parametrize("asked", [extensions.BatchGrad, extensions.Variance, extensions.BatchL2Grad])
@pytest.mark.parametrize("function", MIXING_LOSSES)
def test_a_loss_that_mixes_samples(
    function: Callable[[Tensor, Tensor], Tensor], asked: Callable[[], extensions.Extension], how: str
) -> None:
    """Rows would add up to the gradient, and belong to no sample."""
    model = packprop.extend(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))))
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    if how == "recorded":
        with packprop.record():
            loss = function(model(x), y)
    else:
        loss = (packprop.extend(Own(function)) if how == "extended" else function)(model(x), y)
    with pytest.raises(PackpropError, match="sample"), packprop.backpack(asked()):
        loss.backward()
    assert not any(hasattr(p, asked().savefield) for p in model.parameters())


@pytest.mark.parametrize("how", ["extended", "plain"])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda z, y: (z - y).square().mean(), id="square"),
        pytest.param(lambda z, y: (z - y).abs().sum(), id="absolute"),
        pytest.param(lambda z, y: -(z.log_softmax(1) * y.softmax(1)).sum() / len(z), id="cross-entropy"),
        pytest.param(lambda z, y: (z - y).norm(dim=1).mean(), id="distance"),
        pytest.param(lambda z, y: (z * y).sum(), id="linear"),
    ],
)
def test_a_loss_of_ones_own_is_accepted_and_looked_at_once(
    function: Callable[[Tensor, Tensor], Tensor], how: str
) -> None:
    model = packprop.extend(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))))
    loss_function = packprop.extend(Own(function)) if how == "extended" else function
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    for _ in range(3):
        with packprop.backpack(extensions.BatchGrad()):
            loss_function(model(x), y).backward()
    gradients = torch.autograd.grad(function(model(x), y), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert_near(parameter.grad_batch.sum(0), gradient, "rows")
    assert len(located._KNOWN[model].locations) == 1


@one_in(2)
@pytest.mark.parametrize("how", ["extended", "recorded", "plain", "in-the-model", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_samples_of_ctc(reduction: str, how: str, batch_first: bool) -> None:
    """The axis of time comes first: there are as many rows as samples, also if the model does not mix time."""
    times, samples = 6, 3
    axes = (0, 1) if batch_first else (0, 0)
    model = double(
        Apply(
            lambda m, x: m.b(torch.tanh(m.a(x))).transpose(*axes).log_softmax(2),
            a=nn.Linear(2, 4),
            b=nn.Linear(4, 5),
        )
    )
    x = torch.randn(samples, times, 2).double() if batch_first else torch.randn(times, samples, 2).double()
    targets, lengths = torch.randint(1, 5, (samples, 2)), torch.full((samples,), 2)
    whole = torch.full((samples,), times)
    if how == "in-the-model":
        outer = Apply(
            lambda m, x: F.ctc_loss(m.inner(x), targets, whole, lengths, reduction=reduction), inner=model
        )
        loss = packprop.extend(outer)(x)
    elif how == "torch":  # the loss is not seen to be called
        code = 1 if reduction == "mean" else 2
        outer = Apply(lambda m, x: torch.ctc_loss(m.inner(x), targets, whole, lengths, 0, code), inner=model)
        loss = packprop.extend(outer)(x)
    elif how == "extended":
        loss = packprop.extend(nn.CTCLoss(reduction=reduction))(
            packprop.extend(model)(x), targets, whole, lengths
        )
    else:
        packprop.extend(model)
        with packprop.record() if how == "recorded" else nullcontext():
            out = model(x)
            loss = F.ctc_loss(out, targets, whole, lengths, reduction=reduction)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    with packprop.disable():
        terms = F.ctc_loss(model(x), targets, whole, lengths, reduction="none")
        if reduction == "mean":
            terms = terms / lengths / samples
    rows = [torch.autograd.grad(term, list(model.parameters()), retain_graph=True) for term in terms]
    for parameter, expected in zip(model.parameters(), zip(*rows, strict=True), strict=True):
        assert_near(parameter.grad_batch, torch.stack(expected), "rows")


def test_a_loss_whose_axis_of_samples_nothing_tells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of cuDNN's CTC keeps no input: rows of time are no samples, and are not taken for any."""
    monkeypatch.delitem(LOSS_NODES, "CtcLoss")
    model = packprop.extend(double(nn.Sequential(nn.Linear(2, 5), nn.LogSoftmax(2))))
    lengths = torch.full((3,), 6), torch.full((3,), 2)
    loss = F.ctc_loss(model(torch.randn(6, 3, 2).double()), torch.randint(1, 5, (3, 2)), *lengths)
    with pytest.raises(PackpropError, match="CtcLoss"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
