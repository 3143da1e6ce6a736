"""A network, and the corrected eigenvalues of one step on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import packprop
from packprop import extensions


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Sigmoid(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, 3)).double()


def step(*asked: Any, **options: Any) -> nn.Sequential:
    model, loss = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.randint(3, (6,))
    value = loss(model(x), y)
    with packprop.backpack(*asked, **options):
        value.backward()
    return model


def drawn(samples: int, **options: Any) -> extensions.EKFAC:
    return extensions.EKFAC(samples, generator=torch.Generator().manual_seed(1), **options)
