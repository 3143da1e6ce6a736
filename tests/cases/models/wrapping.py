"""Models made of a function or a few layers: what most cases wrap the layer in question in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


class Raw(nn.Module):
    """A function of an input and raw parameters, named by keyword with their shapes."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.7 * torch.randn(shape) + 0.3))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


class Apply(nn.Module):
    """A function of an input and child modules, named by keyword."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.function(self, *inputs, **named)


def headed(*layers: nn.Module, features: int, count: int = 3) -> nn.Module:
    """Layers, a smooth nonlinearity and a linear head, so that cotangents differ everywhere."""
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, count))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    """Switch gradients off for the named parameters."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


class Checkpointed(nn.Module):
    """Two layers recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.last, self.bend = nn.Linear(4, 3), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bend(self.first(x))
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return self.last(self.bend(x))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
