"""Models that write into tensors in place."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


def assign_slice(m: nn.Module, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 4, dtype=x.dtype, device=x.device)
    out[:, :3] = x
    out[:, 3] = m.get_parameter("w")
    return out


def in_place(x: Tensor, method: str, w: Tensor) -> Tensor:
    return getattr(x, method)(w)


def masked_in_place(m: nn.Module, x: Tensor) -> Tensor:
    w = m.get_parameter("w").clone()
    w[0] = 0.0
    w[1].mul_(2.0)
    return x @ w


def in_place_operator(m: nn.Module, x: Tensor) -> Tensor:
    x = 2 * x
    x += m.w
    x *= 3
    x -= m.v
    return x
