"""What changed inputs of the model have changed at its uses: the words of NOTE [Witnesses]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """Which rows of the inputs were changed.

    Args:
        axis: Along which axis; ``None`` along the axes that were declared.
        extent: How many rows there are: it was done to every input that has as many along the axis.
        second: Whether it is the second half.
    """

    axis: int | None
    extent: int
    second: bool

    def rows(self) -> Tensor:
        """The rows that were changed ``[extent]``."""
        first = torch.arange(self.extent) < self.extent // 2
        return ~first if self.second else first


@dataclass(frozen=True)
class Touched:
    """Where a tensor differs from its witness.

    Args:
        shape: Its shape.
        rows: For each axis that may hold the samples, which of its rows differ.
    """

    shape: torch.Size
    rows: dict[int, Tensor | list[bool]]

    def settle(self) -> None:
        """Keep no tensors: what is kept for a module's later calls takes none of the device's memory."""
        for axis, rows in self.rows.items():
            self.rows[axis] = rows.tolist() if isinstance(rows, Tensor) else rows

    def at(self, axis: int) -> Tensor:
        """The rows along one axis that differ, on the CPU."""
        return torch.as_tensor(self.rows[axis], dtype=torch.bool, device="cpu")


@dataclass(frozen=True)
class Evidence:
    """What changed inputs have changed at one use.

    Args:
        change: Which rows of the inputs were others.
        inputs: Where its inputs differ.
        outputs: Where its outputs differ, by their numbers among those that need gradients.
        samples: How many samples it takes, if the function itself says on which axis they are.
    """

    change: Change
    inputs: list[Touched]
    outputs: dict[int, Touched]
    samples: int | None = None
