"""Small functions to take backward at once, and plain autograd to compare them with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3))
N, D = 6, 3
KEEPS = ("exact", "cpu", "recompute")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_question = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this PyTorch cannot be asked whether there are hooks on saved tensors",
)


def scalar(x: Tensor) -> Tensor:
    return (x @ WEIGHT.T).tanh().pow(2).sum()


def per_sample(x: Tensor) -> Tensor:
    return x.pow(3).sum(1) + x.sin().prod(1)


def per_sample_shared(x: Tensor) -> Tensor:
    return (x @ WEIGHT.T).tanh().pow(2).sum(1)


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A leaf and an activation computed from it, as of an outer network."""
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randn(N, D, generator=generator, dtype=dtype).requires_grad_()
    return leaf, leaf.sin() * 2 + leaf


def gradients(value: Tensor, *of: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, of, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, of, strict=True)]


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-12) -> None:
    for ours, plain in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def kept(value: Tensor) -> tuple[Tensor, ...]:
    return value.grad_fn.saved_tensors


class Layer(nn.Module):
    """A layer that adds a penalty on what it computes."""

    def __init__(self, evaluate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        self.critic = nn.Linear(D, 2, dtype=torch.float64)
        self.evaluate = evaluate
        self.calls = 0

    def penalty(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(self.critic(x), 0.3).exp().sum()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x).tanh()
        return x, self.evaluate(self.penalty, x)
