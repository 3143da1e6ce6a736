"""Padding as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Pad(nn.Module):
    """``torch.nn.functional.pad``.

    Args:
        pad: Numbers of entries to add before and after, last axis first.
        mode: The kind of filling: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: The value of a constant padding.
    """

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        super().__init__()
        self.pad, self.mode, self.value = pad, mode, value

    def forward(self, input: Tensor) -> Tensor:
        """Return the tensor with its last axes extended."""
        value = self.value if self.mode == "constant" else None  # torch refuses a value for the other modes
        return F.pad(input, list(self.pad), mode=self.mode, value=value)

    def extra_repr(self) -> str:
        """Return size, mode and value."""
        return f"{tuple(self.pad)}, mode={self.mode!r}, value={self.value}"
