"""Random tensors and parameters."""

from __future__ import annotations

import torch
from torch import nn

R = torch.randn


def p(*shape: int) -> nn.Parameter:
    return nn.Parameter(R(*shape) + 0.3)
