"""The order in which a parameter keeps the entries of the matrix that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Fold = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class EntryOrder:
    """The order in which a parameter keeps the entries of the matrix ``[g*o, i]`` that it stands for.

    Args:
        fold: Maps ``[..., g, o, i]`` to ``[..., *p]``.
        shape: Extents of g, o and i.
    """

    fold: Fold
    shape: tuple[int, int, int]

    def to_parameter(self, matrices: Tensor) -> Tensor:
        """Map ``[v, g*o, i]`` to ``[v, *p]``."""
        return self.fold(matrices.reshape(-1, *self.shape))

    def to_matrices(self, vectors: Tensor) -> Tensor:
        """Map ``[v, *p]`` to ``[v, g*o, i]``."""
        groups, fan_out, fan_in = self.shape
        places = torch.arange(groups * fan_out * fan_in, device=vectors.device)
        index = self.to_parameter(places).reshape(1, -1).expand(len(vectors), -1)
        flat = vectors.reshape(index.shape)
        return torch.empty_like(flat).scatter(1, index, flat).reshape(-1, groups * fan_out, fan_in)

    @property
    def parameter(self) -> torch.Size:
        """Shape of the parameter."""
        return self.to_parameter(torch.empty(self.shape, device="meta")).shape[1:]


@functools.lru_cache(maxsize=4096)
def fold_to(shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """Return the map ``[..., g, o, i] -> [..., *p]`` in this order; cached: equal folds are one object."""
    return functools.partial(_in_order, shape=shape)


@functools.lru_cache(maxsize=4096)
def fold_swapped(shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """Return ``[..., g, o, (c k)] -> [..., (g c), o, k]``: fan-in leads, as in transposed convolutions."""
    return functools.partial(_fan_in_leading, shape=shape)


def _in_order(gradient: Tensor, shape: torch.Size) -> Tensor:
    return gradient.reshape(gradient.shape[:-3] + shape)


def _fan_in_leading(gradient: Tensor, shape: torch.Size) -> Tensor:
    split: Tensor = gradient.unflatten(-1, (-1, shape[2:].numel())).movedim(-2, -3)
    return split.reshape(gradient.shape[:-3] + shape)
