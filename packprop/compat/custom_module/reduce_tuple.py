"""Choice from a tuple as a module."""

from __future__ import annotations

from typing import Any

from torch import nn


class ReduceTuple(nn.Module):
    """Returns one element of a tuple, such as the outputs of a recurrent layer without its last states.

    Args:
        index: Position of the element.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index

    def forward(self, input: tuple[Any, ...]) -> Any:
        """Return the element."""
        return input[self.index]
