"""Nodes that packprop calls for all samples at once: a call that was right by chance says nothing of others."""

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


BEFORE = {
    "zeros": lambda x, scale: (x, 0 * scale),
    "samples without weight": lambda x, scale: (x, scale * (torch.arange(9) == 1)),
    "infinity": lambda x, scale: (x.where(x.argmax() != torch.arange(27).view(9, 3), torch.inf), scale),
    "equal samples": lambda x, scale: (x[:1].expand(9, 3).contiguous(), scale),
}


@pytest.mark.filterwarnings("ignore::packprop.PackpropWarning")
@pytest.mark.parametrize("name", BEFORE)
def test_an_earlier_pass_in_which_a_wrong_rule_is_right(name: str) -> None:
    _VECTORISED.clear()
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(3).double()), torch.randn(9, 3).double()
    given, scale = BEFORE[name](x, torch.ones(9).double())
    with packprop.backpack(extensions.BatchGrad()):
        each = F.mse_loss(torch.cdist(given, weight[None]), torch.zeros(9, 1).double(), reduction="none")
        (scale @ each).sum().backward()
    torch.testing.assert_close(*rows(weight, x))
