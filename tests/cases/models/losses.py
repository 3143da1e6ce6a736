"""Losses of one's own."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


class Reducible(nn.Module):
    """A loss of a user's own, reduced over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        values = self.values(output, target)
        return values.mean() if self.reduction == "mean" else values.sum()

    def values(self, output: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


class LogCosh(Reducible):
    """Convex, separable."""

    def values(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.log(torch.cosh(output - target))


class SoftMaximum(Reducible):
    """Convex, coupling the outputs of a sample."""

    def values(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.logsumexp(output * (1 + target.square()), dim=-1)


class DoubleWell(Reducible):
    """Not convex."""

    def values(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.square() - 1 - target.square()).square()
