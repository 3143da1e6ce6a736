"""Normalisations with a bias and no weight: PyTorch's second derivative is wrong there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError


class Shifted(nn.Module):
    """A layer, and a normalisation with a bias."""

    def __init__(self, last: nn.Module, weight: Tensor | None = None) -> None:
        super().__init__()
        self.inner, self.last, self.weight = nn.Linear(5, 5), last, weight
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.layer_norm(self.inner(x), (5,), self.weight, self.bias))


LAST = {"linear": nn.Identity(), "elementwise": nn.Tanh(), "any": nn.Softmax(-1)}


def problem(last: str, weight: Tensor | None = None) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model = packprop.extend(Shifted(LAST[last], weight).double())
    return model, packprop.extend(nn.MSELoss(reduction="sum")), *torch.randn(2, 3, 5).double()


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize(
    "make",
    [
        extensions.DiagHessian,
        extensions.BatchDiagHessian,
        extensions.DiagHessianMC,
        extensions.HMP,
        extensions.GGNMP,
    ],
)
def test_right_or_refused(make: Any, last: str) -> None:
    """Finite differences of the loss decide."""
    model, loss, x, y = problem(last)
    asked = make()
    try:
        with packprop.backpack(asked):
            loss(model(x), y).backward()
        value = getattr(model.bias, asked.savefield)
        if callable(value):
            value = value(torch.eye(5).double()).diagonal()
    except PackpropError as error:
        assert "bias and no weight" in str(error)  # noqa: PT017  # one of two right ways
        return
    assert make in (extensions.DiagHessian, extensions.BatchDiagHessian)
    bias, step = model.bias.detach(), 1e-4

    def at(shift: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, {"bias": bias + step * shift}, x), y)

    with torch.no_grad():
        curves = [(at(unit) - 2 * at(0 * unit) + at(-unit)) / step**2 for unit in torch.eye(5).double()]
    summed = value if value.shape == bias.shape else value.sum(0)
    torch.testing.assert_close(summed, torch.stack(curves), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_not_trained_is_a_weight() -> None:
    """Products are those of the Hessian."""
    model, loss, x, y = problem("any", torch.full((5,), 2.0).double())
    asked = extensions.HMP()
    with packprop.backpack(asked):
        loss(model(x), y).backward()
    hessian = torch.autograd.functional.hessian(
        lambda bias: loss(torch.func.functional_call(model, {"bias": bias}, x), y), model.bias.detach()
    )
    torch.testing.assert_close(getattr(model.bias, asked.savefield)(torch.eye(5).double()), hessian)
