"""Layers whose parameters are computed, or changed on their way in."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import prune


class Softplus(nn.Module):
    """A parametrisation that makes a tensor positive."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


class ShiftedEmbedding(nn.Embedding):
    """A subclass of a known layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * F.embedding(input, self.weight) + self.weight.mean(0)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(3, 4), "weight", amount=0.3)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        return torch.nn.utils.weight_norm(nn.Linear(3, 4))
