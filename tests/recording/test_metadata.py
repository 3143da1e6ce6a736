"""Tensors that are taken for their shape, type or device alone, where a region is run again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.selection import one_in


class Gated(nn.Module):
    """Parameters that are expanded in a checkpoint, by hand and with the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gate, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(1))

    def region(self, x: Tensor) -> Tensor:
        h, gate = torch.broadcast_tensors(torch.tanh(x), self.gate)
        shift = self.shift.type_as(x).expand(4)
        return F.group_norm(h * gate, 2, gate[0].detach(), shift)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return torch.utils.checkpoint.checkpoint(self.region, h, use_reentrant=False)


def test_expanded_parameters_in_a_checkpoint() -> None:
    """Rows are those of one sample at a time."""
    model, loss = packprop.extend(Gated().double()), packprop.extend(nn.MSELoss(reduction="sum"))
    x, y = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        rows = [torch.autograd.grad(loss(model(x[n : n + 1]), y[n : n + 1]), parameter)[0] for n in range(3)]
        torch.testing.assert_close(parameter.grad_batch, torch.stack(rows), msg=name)


class Shifted(nn.Module):
    """A shift between two layers."""

    def __init__(self, shift: Callable[[Shifted, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.shift, self.last = nn.Linear(3, 4), nn.Parameter(torch.rand(4)), nn.Linear(4, 2)
        self.shifted = shift

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.shifted(self, self.inner(x))))


def expanded(model: Shifted, h: Tensor) -> Tensor:
    """The shift, which takes the shape of the samples and none of their entries."""
    return h + model.shift.expand_as(h)


def run_again(model: Shifted, h: Tensor) -> Tensor:
    """In a checkpoint."""
    shifted: Tensor = torch.utils.checkpoint.checkpoint(expanded, model, h, use_reentrant=False)
    return shifted


@one_in(2)
@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize("shift", [expanded, run_again, lambda m, h: expanded(m, expanded(m, h).sin())])
def test_a_shape_leads_no_sweep_on(shift: Callable[[Shifted, Tensor], Tensor], samples: int) -> None:
    """What is expanded to the shape of the samples is reached, although nothing upstream of it is."""
    torch.manual_seed(0)
    model, loss = packprop.extend(Shifted(shift).double()), packprop.extend(nn.MSELoss(reduction="sum"))
    x, y = torch.randn(samples, 3).double(), torch.randn(samples, 2).double()
    jacobians = [
        torch.autograd.functional.jacobian(
            lambda value, sample=sample: torch.func.functional_call(model, {"shift": value}, (sample,)),
            model.shift.detach(),
        ).flatten(0, 1)
        for sample in x.split(1)
    ]
    expected = sum(2 * jacobian.square().sum(0) for jacobian in jacobians)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss(model(x), y).backward()
    torch.testing.assert_close(model.shift.diag_ggn_exact, expected)
    torch.testing.assert_close(model.shift.grad_batch.sum(0), model.shift.grad)
    with packprop.backpack(extensions.BatchGrad()):  # one column at a time
        loss(model(x), y).backward()
    rows = [
        torch.autograd.grad(loss(model(a), b), model.shift)[0]
        for a, b in zip(x.split(1), y.split(1), strict=True)
    ]
    torch.testing.assert_close(model.shift.grad_batch, torch.stack(rows))
