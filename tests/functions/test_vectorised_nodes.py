"""Nodes that packprop calls for all samples at once: a call that was right says nothing of other shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.functions.node_calls import _VECTORISED


def rows(weight: nn.Parameter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-sample gradients of distances, by packprop and one by one."""

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(torch.cdist(x, weight[None]), torch.zeros(len(x), 1).double(), reduction="sum")

    with packprop.backpack(extensions.BatchGrad()):
        loss(x).backward()
    known = [torch.autograd.grad(loss(each), weight)[0] for each in x.split(1)]
    return weight.grad_batch, torch.stack(known)  # type: ignore[attr-defined]  # packprop's


@pytest.mark.parametrize("widths", [(1, 3), (3, 1), (1, 2, 4)])
def test_another_width_is_another_call(widths: tuple[int, ...]) -> None:
    """PyTorch's batching rule for the derivative of ``cdist`` is right for one feature alone."""
    _VECTORISED.clear()
    torch.manual_seed(0)
    for width in widths:
        weight = nn.Parameter(torch.randn(width).double())
        torch.testing.assert_close(*rows(weight, torch.randn(9, width).double()))


def test_zeros_prove_nothing() -> None:
    _VECTORISED.clear()
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(3).double()), torch.randn(9, 3).double()
    with packprop.backpack(extensions.BatchGrad()):
        (0 * F.mse_loss(torch.cdist(x, weight[None]), torch.zeros(9, 1).double())).backward()
    torch.testing.assert_close(*rows(weight, x))
