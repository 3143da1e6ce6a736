"""Tensors that are taken for their shape, type or device alone, where a region is run again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import packprop
from packprop import extensions


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
