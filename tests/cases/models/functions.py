"""Autograd functions of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable


class Wave(torch.autograd.Function):
    """``sin(x * w)`` with a backward pass written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.sin(x * w)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        inner = cotangents[0] * torch.cos(x * w)
        return inner * w, (inner * x).sum(0)


class Cube(torch.autograd.Function):
    """``x ** 3`` with a backward pass that must not be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * cotangents[0]


class Square(torch.autograd.Function):
    """``x ** 2`` with a backward pass written by hand, without parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * cotangents[0]
