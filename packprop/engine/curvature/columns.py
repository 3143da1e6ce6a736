"""Columns of seed vectors that enter a sweep together, and unit columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.tensors.dry import chunk_starts
from packprop.engine.tensors.layout import Layout


@dataclass(frozen=True)
class Columns:
    """Columns of seed vectors that enter a sweep together, made when a sweep needs them.

    Args:
        edges: The edges of the seed vectors: the inputs of one or more losses.
        count: The number of columns.
        chunk: Makes the columns from ``start`` to ``stop``: ``[v, *f]`` for each edge.
        weights: Factors on the squares of each column and sample ``[v, n]``; ``None`` for 1.
        counted: The tokens of each sample that count, as a mask ``[t, n]``, if columns belong to tokens. Each
            token then has the same number of consecutive columns.
    """

    edges: Sequence[GradientEdge]
    count: int
    chunk: Callable[[int, int], list[Tensor]]
    weights: Tensor | None = None
    counted: Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of separate results of the group: one for each token, or for each column."""
        return self.count if self.counted is None else len(self.counted)

    @property
    def per_token(self) -> int:
        """The number of consecutive columns with one result."""
        return self.count // max(self.tokens, 1)

    def chunks(self, step: int) -> list[tuple[int, int]]:
        """Return start and stop of chunks of at most ``step`` columns: of whole tokens, or of a part of one."""
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


def unit_columns(shape: torch.Size, layout: Layout, like: Tensor, start: int, stop: int) -> Tensor:
    """Return columns that are 1 at one entry of every sample, from ``start`` to ``stop``.

    Their shape is ``[v, *shape]``.

    Samples share memory where possible, so the columns must not be written to.
    """
    rest = layout.front_shape(shape)[1:]
    flat = torch.zeros(stop - start, rest.numel(), dtype=like.dtype, device=like.device)
    flat.diagonal(start).fill_(1.0)
    units = flat.view(stop - start, 1, *rest).expand(-1, layout.samples, *rest)
    return layout.from_front(units, 1)
