"""Models that use one parameter several times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.cases.models.wrapping import Apply


def same_module_twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def tied_autoencoder() -> nn.Module:
    return Apply(
        lambda m, x: F.linear(torch.sigmoid(m.encoder(x)), m.encoder.weight.t()),
        encoder=nn.Linear(3, 4),
    )


def two_modules_one_weight() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)
