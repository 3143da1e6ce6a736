"""Indexing as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Slicing(nn.Module):
    """``x[slice_info]``; extended, it lets a loss see one part of a model's output at a time.

    Args:
        slice_info: The index in the brackets: a slice, a number, a tuple of them.
    """

    def __init__(self, slice_info: Any) -> None:
        super().__init__()
        self.slice_info = slice_info

    def forward(self, input: Tensor) -> Tensor:
        """Return the chosen part of a tensor of any shape."""
        return input[self.slice_info]

    def extra_repr(self) -> str:
        """Return the index."""
        return repr(self.slice_info)
