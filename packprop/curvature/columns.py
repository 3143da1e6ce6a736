"""Columns that are fed in together, and unit columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.tensors.dry import chunk_starts
from packprop.tensors.layout import Layout


@dataclass(frozen=True)
class Columns:
    """Columns that are fed in together, made when they are needed.

    Args:
        edges: Where they are fed in: the inputs of one or more losses.
        count: How many columns there are.
        chunk: Makes those from ``start`` to ``stop``: ``[v, *f]`` for each edge.
        weights: Factors on the squares of each column and sample ``[v, n]``; ``None`` for 1.
        counted: Where columns belong to tokens, the same number of consecutive columns to each: whether each
            token of each sample counts ``[t, n]``.
    """

    edges: Sequence[GradientEdge]
    count: int
    chunk: Callable[[int, int], list[Tensor]]
    weights: Tensor | None = None
    counted: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many results of its own the group has: tokens, or columns."""
        return self.count if self.counted is None else len(self.counted)

    @property
    def per_token(self) -> int:
        """How many consecutive columns have one result."""
        return self.count // max(self.tokens, 1)

    def chunks(self, step: int) -> list[tuple[int, int]]:
        """Where chunks of at most ``step`` columns begin and end: of whole tokens, or of a part of one."""
        each = self.per_token
        if step >= each:
            step -= step % each
            return [(start, min(self.count, start + step)) for start in chunk_starts(self.count, step)]
        parts = [(start, min(each, start + step)) for start in chunk_starts(each, step)]
        return [
            (token * each + start, token * each + stop)
            for token in chunk_starts(self.tokens, 1)
            for start, stop in parts
        ]


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
