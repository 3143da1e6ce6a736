"""Columns that are fed in together, and unit columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.tensors.layout import Layout


@dataclass(frozen=True)
class Columns:
    """Columns that are fed in together, made when they are needed.

    Args:
        edges: Where they are fed in: the inputs of one or more losses.
        count: How many columns there are.
        chunk: Makes those from ``start`` to ``stop``: ``[v, *f]`` for each edge.
        weights: Factors on the squares of each column and sample ``[v, n]``; ``None`` for 1.
    """

    edges: Sequence[GradientEdge]
    count: int
    chunk: Callable[[int, int], list[Tensor]]
    weights: Tensor | None = None


def unit_columns(
    shape: torch.Size, layout: Layout, like: Tensor, start: int = 0, stop: int | None = None
) -> Tensor:
    """Columns that are 1 at one entry of every sample, all or from ``start`` to ``stop``: ``[v, *shape]``.

    Samples share memory where possible, so the columns must not be written to.
    """
    rest = layout.front_shape(shape)[1:]
    stop = rest.numel() if stop is None else stop
    flat = torch.zeros(stop - start, rest.numel(), dtype=like.dtype, device=like.device)
    flat.diagonal(start).fill_(1.0)
    units = flat.view(stop - start, 1, *rest).expand(-1, layout.samples, *rest)
    return layout.from_front(units, 1)
