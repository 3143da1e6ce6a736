"""Losses whose target comes first: of those that are symmetric the model's output is found all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.functions.losses import SYMMETRIC

X, Y = torch.randn(6, 3), torch.randn(6, 2)
ASKED = (extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.KFLR())


def values(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], recorded: bool) -> list[Tensor]:
    if recorded:
        with packprop.record():
            value = loss(model(X), Y)
    else:
        value = loss(model(X), Y)
    with packprop.backpack(*ASKED):
        value.backward()
    return [tensor for p in model.parameters() for tensor in (p.grad_batch, p.diag_ggn_exact, *p.kflr)]


WAYS: dict[str, Callable[..., Callable[[Tensor, Tensor], Tensor]]] = {
    "in order": lambda function: lambda f, y: function(y, f),
    "by name": lambda function: lambda f, y: function(input=y, target=f),
    "half by name": lambda function: lambda f, y: function(y, target=f, reduction="sum"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("function", [F.mse_loss, F.smooth_l1_loss, F.huber_loss], ids=lambda f: f.__name__)
def test_both_orders_are_one_loss(function: Callable[..., Tensor], recorded: bool, way: str) -> None:
    model = packprop.extend(nn.Linear(3, 2))
    options = {"reduction": "sum"} if way == "half by name" else {}
    expected = values(model, lambda f, y: function(f, y, **options), recorded)
    for found, wanted in zip(values(model, WAYS[way](function), recorded), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", SYMMETRIC, ids=lambda f: f.__name__)
def test_data_and_groups(function: Callable[..., Tensor]) -> None:
    model, pairs = nn.Linear(3, 2), torch.tensor([0, 0, 1, 1, 2, 2])
    batch = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    one, other = (
        packprop.compute(model, loss, batch, extensions.BatchGrad(), progress=False)["grad_batch"]["weight"]
        for loss in (function, lambda f, y: function(y, f))
    )
    torch.testing.assert_close(other, one)
    with packprop.record(documents=pairs):
        value = function(Y, model(X))
    with packprop.backpack(extensions.BatchGrad()):
        value.backward()
    torch.testing.assert_close(model.weight.grad_batch, one.unflatten(0, (3, 2)).sum(1))


def test_a_target_that_is_trained_stays_one() -> None:
    model = packprop.extend(nn.Linear(3, 2))
    with packprop.backpack(extensions.BatchGrad()):
        F.mse_loss(model(X), model(X + 1)).backward()
    rows = [
        torch.autograd.grad(F.mse_loss(model(X[n : n + 1]), model(X[n : n + 1] + 1)) / 6, model.weight)[0]
        for n in range(6)
    ]
    torch.testing.assert_close(model.weight.grad_batch, torch.stack(rows))
