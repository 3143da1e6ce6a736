"""Reordering of axes as a module."""

from __future__ import annotations

from torch import Tensor, nn


class Permute(nn.Module):
    """``x.permute(dims)``, or ``x.transpose(*dims)`` for two axes and ``init_transpose=True``.

    Args:
        dims: New order of all axes, or two axes to exchange.
        init_transpose: Take ``dims`` as two axes to exchange.
    """

    def __init__(self, *dims: int, init_transpose: bool = False) -> None:
        super().__init__()
        self.dims, self.init_transpose = dims, init_transpose

    def forward(self, input: Tensor) -> Tensor:
        """Return a view with its axes in the new order."""
        if self.init_transpose:
            first, second = self.dims
            return input.transpose(first, second)
        return input.permute(*self.dims)

    def extra_repr(self) -> str:
        """Return the axes."""
        return f"{self.dims}{', transposed' if self.init_transpose else ''}"
