"""Padding as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Pad(nn.Module):
    """``torch.nn.functional.pad``.

    Args:
        pad: Entries to add before and after, last axis first.
        mode: How they are filled: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: What a constant padding is filled with.
    """

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        super().__init__()
        self.pad, self.mode, self.value = pad, mode, value

    def forward(self, input: Tensor) -> Tensor:
        """The tensor with its last axes extended."""
        value = self.value if self.mode == "constant" else None  # torch refuses one for the other modes
        return F.pad(input, list(self.pad), mode=self.mode, value=value)

    def extra_repr(self) -> str:
        """How much, and with what."""
        return f"{tuple(self.pad)}, mode={self.mode!r}, value={self.value}"
