"""A small network, and the per-sample gradients of it by a loop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.running import ROWS, assert_near

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def network() -> nn.Module:
    """A small network that can be pickled, so without lambdas."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()


def batch(size: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3).double(), torch.randint(3, (size,))


def rows_by_loop(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Per-sample gradients of a mean cross entropy, one sample at a time."""
    parameters = dict(model.named_parameters())
    rows = []
    with packprop.disable():
        for n in range(len(x)):
            share = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / len(x)
            rows.append(torch.autograd.grad(share, list(parameters.values())))
    return {k: torch.stack(r) for k, r in zip(parameters, zip(*rows, strict=True), strict=True)}


def check_rows(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One pass over an extended model gives the right rows."""
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    for name, expected in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)
        assert hasattr(model.get_parameter(name), "diag_ggn_exact")


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, 4, 4).double(), torch.randint(3, (size,))
