"""Functions and losses that can be differentiated once only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.curvature import products
from packprop.errors import PackpropError
from tests.cases.models.functions import Cube
from tests.references.running import assert_near


class Cubic(nn.MSELoss):
    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return Cube.apply(f - y).abs().mean()


@pytest.mark.parametrize(
    "make", [extensions.DiagHessian, extensions.BatchDiagHessian, extensions.DiagHessianMC, extensions.HMP]
)
def test_functions_that_are_differentiable_once_are_named(make: Any) -> None:
    """PyTorch itself leaves the second derivative out: zeros would be a wrong answer."""
    model = packprop.extend(Between())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with pytest.raises(PackpropError, match="CubeBackward") as caught:
        with packprop.backpack(make()):
            packprop.extend(nn.MSELoss())(model(x), y).backward()
        model.below.weight.hmp(torch.ones_like(model.below.weight))
    assert "once_differentiable" in caught.value.why
    assert "below.weight" in caught.value.where
    found = packprop.coverage(model, (x, y)).parameters
    assert found["below.weight"].hessian == "refused"
    assert found["above.weight"].hessian == "swept"


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(Cube.apply(self.below(x)))


def test_products_with_functions_that_are_differentiable_once() -> None:
    model = packprop.extend(Between())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with packprop.backpack(extensions.GGNMP(), extensions.DiagGGNExact()):
        packprop.extend(nn.MSELoss())(model(x), y).backward()
    assert model.below.weight.diag_ggn_exact.any()
    head = model.above.weight
    assert_near(
        head.ggnmp(torch.eye(6).view(6, 2, 3)).flatten(1).diagonal(), head.diag_ggn_exact.flatten(), "", 1e-5
    )
    with pytest.raises(PackpropError, match="CubeBackward"):
        model.below.weight.ggnmp(torch.ones(3, 3))
    weights = [model.below.weight]
    with packprop.disable():
        output = model(x)
        loss = F.mse_loss(output, y)
    for multiply in (
        lambda: products.hvp(loss, weights, weights),
        lambda: products.jvp(output, weights, weights),
        lambda: products.ggnvp((output, loss), weights, weights),
    ):
        with pytest.raises(PackpropError, match="CubeBackward"):
            multiply()


@pytest.mark.parametrize("make", [extensions.DiagGGNExact, extensions.GGNMP])
def test_losses_that_are_differentiable_once_are_named(make: Any) -> None:
    model = packprop.extend(nn.Linear(3, 2))
    loss = packprop.extend(Cubic())(model(torch.randn(4, 3)), torch.randn(4, 2))
    with pytest.raises(PackpropError, match="CubeBackward in the loss"), packprop.backpack(make()):
        loss.backward()


class InPlace(torch.autograd.Function):
    """A product with a weight, whose backward pass writes into a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mm(gradient, weight.T, out=torch.empty_like(x)), x.T @ gradient


@pytest.mark.parametrize("asked", [extensions.DiagHessian, extensions.HMP, None])
def test_a_backward_function_that_writes_into_a_tensor_has_no_second_derivative(asked: Any) -> None:
    model, weight = packprop.extend(nn.Linear(3, 3)), nn.Parameter(torch.randn(3, 3))
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(PackpropError, match=r"twice.*out=") as caught:
        if asked is None:
            loss = nn.functional.mse_loss(InPlace.apply(model(x).tanh(), weight), y)
            products.hvp(loss, [model.weight], [torch.ones_like(model.weight)])
        with packprop.backpack(asked()):
            loss = packprop.extend(nn.MSELoss())(InPlace.apply(model(x).tanh(), weight), y)
            loss.backward()
        model.weight.hmp(torch.ones_like(model.weight))
    assert "functions of torch" in caught.value.instead
