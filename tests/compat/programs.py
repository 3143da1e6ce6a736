"""Models, data and dense matrices for the tests of programs that were written for BackPACK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")


installed = pytest.mark.usefixtures("_installed")


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3), nn.Tanh()
    )


def images(samples: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 1, 6, 6), torch.arange(samples) % 3


def vectors(samples: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.arange(samples) % 3


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """``[n, c, p]``, row by row."""
    parameters = list(model.parameters())
    rows = [
        flat(torch.autograd.grad(entry, parameters, retain_graph=True)) for row in model(x) for entry in row
    ]
    return torch.stack(rows).unflatten(0, (len(x), -1))


def dense_ggn(model: nn.Module, x: Tensor, hessian: Callable[[Tensor], Tensor]) -> Tensor:
    """``sum_n J_n^T H_n J_n`` from rows of the Jacobian; ``hessian`` gives H_n of one output."""
    outputs = model(x).detach()
    return torch.stack([J.T @ hessian(f) @ J for J, f in zip(jacobians(model, x), outputs, strict=True)]).sum(0)


def softmax_hessian(output: Tensor) -> Tensor:
    p = output.softmax(-1)
    return torch.diag(p) - torch.outer(p, p)
