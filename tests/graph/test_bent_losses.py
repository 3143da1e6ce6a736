"""What is made of a loss: sums over samples have terms, functions of such sums have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import assert_near
from tests.selection import one_in


def mean(f: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(f, y)


def each(f: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(f, y, reduction="none").sum(1)


def own(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().mean()


Loss = Callable[[Tensor, Tensor], Tensor]

BENT = [
    pytest.param(lambda f, y: mean(f, y) ** 2, "Pow", id="square"),
    pytest.param(lambda f, y: mean(f, y).sqrt(), "Sqrt", id="root"),
    pytest.param(lambda f, y: mean(f, y).log(), "Log", id="logarithm"),
    pytest.param(lambda f, y: mean(f, y).exp(), "Exp", id="exponential"),
    pytest.param(lambda f, y: (mean(f, y) - 0.1).abs() + 0.1, "Abs", id="flooding"),
    pytest.param(lambda f, y: mean(f, y) * F.l1_loss(f, y), "Mul", id="product"),
    pytest.param(lambda f, y: each(f, y).logsumexp(0), "Logsumexp", id="logsumexp"),
    pytest.param(lambda f, y: (each(f, y) * each(f, y).softmax(0)).sum(), "", id="softmax-weighted"),
    pytest.param(lambda f, y: each(f, y).std(), "Std", id="deviation"),
    pytest.param(lambda f, y: ((each(f, y) - each(f, y).mean()) ** 2).mean(), "Pow", id="variance"),
    pytest.param(lambda f, y: each(f, y).max(), "Max", id="maximum"),
    pytest.param(
        lambda f, y: F.cross_entropy(f, y.argmax(1), reduction="none").max() + mean(f, y),
        "Max",
        id="maximum-beside-another",
    ),
    pytest.param(lambda f, y: each(f, y).norm(), "Norm", id="norm"),
    pytest.param(lambda f, y: (each(f, y) / each(f, y).sum() * y[:, 0]).sum(), "Div", id="shares"),
    pytest.param(lambda f, y: mean(f, y) + f.mean() ** 2, "Pow", id="mean-beside-the-loss"),
    pytest.param(lambda f, y: own(f, y).sqrt(), "Sqrt", id="root-of-own"),
    pytest.param(lambda f, y: (own(f, y) - 0.1).abs(), "Abs", id="flooding-of-own"),
    pytest.param(lambda f, y: (f - y).square().sum(1).max(), "Max", id="maximum-of-own"),
]
STRAIGHT = [
    pytest.param(lambda f, y: 3 * mean(f, y), id="scaled"),
    pytest.param(lambda f, y: 2 * mean(f, y).detach() * mean(f, y), id="detached-factor"),
    pytest.param(lambda f, y: mean(f, y) + 2 * F.l1_loss(f, y), id="sum-of-two"),
    pytest.param(lambda f, y: (each(f, y) ** 2).mean(), id="each-squared"),
    pytest.param(lambda f, y: each(f, y).clamp(max=1).sum(), id="each-clamped"),
    pytest.param(lambda f, y: sum(r.clamp(max=1) ** 2 for r in each(f, y)), id="one-by-one"),
    pytest.param(lambda f, y: each(f, y)[each(f, y).topk(2).indices].mean(), id="largest-by-index"),
    pytest.param(lambda f, y: each(f, y)[:3].clamp(max=1).mean(), id="some"),
    pytest.param(lambda f, y: F.mse_loss(f, y, reduction="none").amax(1).mean(), id="largest-entry"),
    pytest.param(lambda f, y: mean(f, y) + 0.1 * f.square().mean(), id="penalty-beside-the-loss"),
    pytest.param(lambda f, y: (1 - f[:3] * y[:3]).relu().mean(), id="hinge-of-own"),
]


def pass_of(loss: Loss, *asked: extensions.Extension) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    with packprop.record():
        value = loss(model(x), y)
    with packprop.backpack(*asked):
        value.backward()
    return model, x, y


@one_in(3)
@pytest.mark.parametrize(
    "asked",
    [
        extensions.BatchGrad,
        extensions.BatchL2Grad,
        extensions.Variance,
        extensions.DiagGGNExact,
        extensions.BatchDiagHessian,
    ],
)
@pytest.mark.parametrize(("loss", "node"), BENT)
def test_rows_under_a_function_of_the_batch_s_loss_are_refused(
    loss: Loss, node: str, asked: Callable[[], extensions.Extension]
) -> None:
    """They would add up to the gradient, and belong to no sample."""
    with pytest.raises(PackpropError) as caught:
        pass_of(loss, asked())
    if asked is extensions.BatchGrad:
        assert node in caught.value.where
        assert "detach" in caught.value.instead


@pytest.mark.parametrize("loss", STRAIGHT)
def test_rows_are_those_of_each_sample_s_share(loss: Loss) -> None:
    """Functions of one sample's own loss, and factors that are not differentiated."""
    model, x, y = pass_of(loss, extensions.BatchGrad())
    parameters = list(model.parameters())
    with packprop.disable():
        f = model(x)
        (slope,) = torch.autograd.grad(loss(f, y), f, retain_graph=True)
    rows = [
        torch.autograd.grad(f, parameters, slope * (torch.arange(5)[:, None] == n), retain_graph=True)
        for n in range(5)
    ]
    for parameter, own_rows in zip(parameters, zip(*rows, strict=True), strict=True):
        assert_near(parameter.grad_batch, torch.stack(own_rows), "rows")


@one_in(2)
@pytest.mark.parametrize(("loss", "node"), BENT)
def test_the_hessian_of_the_whole_loss_needs_no_terms(loss: Loss, node: str) -> None:
    model, x, y = pass_of(loss, extensions.DiagHessian())
    with packprop.disable():
        gradients = torch.autograd.grad(loss(model(x), y), list(model.parameters()), create_graph=True)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0] for g in gradient.flatten()]
        diagonal = torch.stack([row.flatten()[j] for j, row in enumerate(rows)])
        assert_near(parameter.diag_h.flatten(), diagonal, "diagonal")
