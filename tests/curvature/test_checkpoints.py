"""Products with curvature matrices through checkpoints, with attention inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions, operators, products
from packprop.compat import hessianfree
from packprop.errors import PackpropError


class Attention(nn.Module):
    """A head of attention inside a checkpoint, or outside of one."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.qkv, self.last, self.reentrant = nn.Linear(4, 12), nn.Linear(4, 2), reentrant

    def block(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value).squeeze(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.block(x)).mean(1)
        return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant)).mean(1)


def problem(reentrant: bool | None) -> tuple[Attention, list[nn.Parameter], Tensor, Tensor]:
    torch.manual_seed(0)
    model = Attention(reentrant).double()
    x, y = torch.randn(3, 5, 4).double(), torch.randn(3, 2).double()
    return model, list(model.parameters()), x.requires_grad_(), y


def every_product(reentrant: bool | None) -> list[Tensor]:
    model, parameters, x, y = problem(reentrant)
    vectors = [torch.linspace(-1, 1, each.numel()).double().view_as(each) for each in parameters]
    flat = torch.cat([vector.flatten() for vector in vectors])

    def evaluate() -> tuple[Tensor, Tensor]:
        outputs = model(x)
        return outputs, F.mse_loss(outputs, y)

    return [
        *products.hvp(lambda: evaluate()[1], parameters, vectors),
        *products.ggnvp(evaluate, parameters, vectors),
        operators.hessian(lambda: evaluate()[1], parameters) @ flat,
        operators.ggn(evaluate, parameters) @ flat,
    ]


def test_functions_of_no_arguments() -> None:
    """What a checkpoint runs again takes the kernels that the forward pass took."""
    for found, known in zip(every_product(False), every_product(None), strict=True):
        torch.testing.assert_close(found, known)


@pytest.mark.parametrize("again", [True, False], ids=["inside", "outside"])
def test_a_loss_that_is_there_already(again: bool) -> None:
    """Inside the context of the forward pass it is right, outside an error says what to do."""
    model, parameters, x, y = problem(False)
    ones = [torch.ones_like(each) for each in parameters]
    with sdpa_kernel(SDPBackend.MATH):
        loss = F.mse_loss(model(x), y)
        if again:
            found = products.hvp(loss, parameters, ones)
    if not again:
        with pytest.raises(PackpropError, match="sdpa_kernel"):
            products.hvp(loss, parameters, ones)
        return
    plain, same, x, y = problem(None)
    for one, other in zip(found, products.hvp(lambda: F.mse_loss(plain(x), y), same, ones), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("call", ["hvp", "ggnvp", "jvp", "operator", "compat", "vjp"])
def test_reentrant_checkpoints_are_refused(call: str) -> None:
    """PyTorch differentiates them by ``backward()`` alone."""
    model, parameters, x, y = problem(True)
    ones = [torch.ones_like(each) for each in parameters]

    def evaluate() -> tuple[Tensor, Tensor]:
        outputs = model(x)
        return outputs, F.mse_loss(outputs, y)

    calls: dict[str, Callable[[], Any]] = {
        "hvp": lambda: products.hvp(lambda: evaluate()[1], parameters, ones),
        "ggnvp": lambda: products.ggnvp(evaluate, parameters, ones),
        "jvp": lambda: products.jvp(evaluate()[0], parameters, ones),
        "vjp": lambda: products.vjp(evaluate()[0], parameters, torch.ones_like(y)),
        "operator": lambda: operators.hessian(lambda: evaluate()[1], parameters),
        "compat": lambda: hessianfree.hessian_vector_product(evaluate()[1], parameters, ones),
    }
    with pytest.raises(PackpropError, match="use_reentrant=False"):
        calls[call]()


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
def test_blocks_inside_and_outside_of_the_context(make: Any) -> None:
    model, parameters, x, y = problem(False)
    packprop.extend(model)
    loss, asked = packprop.extend(nn.MSELoss()), make()
    with sdpa_kernel(SDPBackend.MATH):
        with packprop.backpack(asked):
            loss(model(x), y).backward()
        for each in parameters:
            assert getattr(each, asked.savefield)(torch.ones_like(each)).isfinite().all()
        with packprop.backpack(asked):
            loss(model(x), y).backward()
    product = getattr(model.qkv.weight, asked.savefield)
    with pytest.raises(PackpropError, match="sdpa_kernel"):
        product(torch.ones_like(model.qkv.weight))
