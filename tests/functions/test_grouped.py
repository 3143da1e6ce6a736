"""Groups of rows with a matrix each, in single precision: PyTorch has no other on a processor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.graph.walk import walk
from tests.cases.models.experts import Grouped, Tables
from tests.references.running import as_tensors, assert_near

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")

ASKED = {
    "grad_batch": extensions.BatchGrad(),
    "batch_l2": extensions.BatchL2Grad(),
    "sum_grad_squared": extensions.SumGradSquared(),
    "variance": extensions.Variance(),
    "batch_dot": extensions.BatchDotGrad(),
    "diag_ggn_exact": extensions.DiagGGNExact(),
}


class Direct(Grouped):
    """The parameters are arguments of the function as they are."""

    def __init__(self) -> None:
        super().__init__(4)
        self.up = nn.Parameter(torch.randn(3, 4, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        _, chosen = self.route(tokens)
        order = chosen[:, 0].argsort(stable=True)
        ends = chosen[:, 0].bincount(minlength=3).cumsum(0).int()
        y = F.grouped_mm(torch.tanh(F.grouped_mm(tokens[order], self.up, offs=ends)), self.down, offs=ends)
        back = torch.zeros_like(order).scatter(0, order, torch.arange(len(order)))
        return y[back].view_as(x) * self.gate(x).mean(-1, keepdim=True)


def values(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    loss = packprop.extend(nn.MSELoss())(packprop.extend(model)(x), y)
    with packprop.backpack(*ASKED.values()):
        loss.backward()
    return {
        f"{attribute} of {name}[{place}]": tensor.double()
        for attribute in ASKED
        for name, p in model.named_parameters()
        for place, tensor in enumerate(as_tensors(getattr(p, attribute)))
    }


@pytest.mark.parametrize("samples", [1, 4])
def test_groups_are_the_loop_over_experts(samples: int) -> None:
    """The same parameters, used by a loop over the experts, which the oracle has been through."""
    torch.manual_seed(0)
    model = Grouped(4, inner=4)
    loop = Tables(4, inner=4)
    loop.load_state_dict(model.state_dict())
    x, y = torch.randn(samples, 5, 4), torch.randn(samples, 5, 4)
    expected = values(loop, x, y)
    for name, value in values(model, x, y).items():
        assert_near(value, expected[name], name, 1e-4)


@pytest.mark.parametrize("samples", [1, 4])
def test_groups_against_a_loop_over_samples(samples: int) -> None:
    torch.manual_seed(0)
    model = Direct()
    plain = copy.deepcopy(model)
    x, y = torch.randn(samples, 5, 4), torch.randn(samples, 5, 4)
    found = values(model, x, y)
    for n in range(samples):
        loss = nn.MSELoss()(plain(x[n : n + 1]), y[n : n + 1]) / samples
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert_near(p.grad_batch[n], gradient, name, 1e-4)
    assert all(value.isfinite().all() for value in found.values())


def test_each_group_is_an_affine_use() -> None:
    model = packprop.extend(Direct())
    y = model(torch.randn(2, 4, 4))
    uses = walk([y], [None], None).uses
    found = [entry for use in uses if "grouped" in use.name for entry in use.entries]
    assert [(entry.structure, entry.by_rule) for entry in found] == [("Outer", True)] * 2
