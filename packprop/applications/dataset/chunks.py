"""Chunk sizes for batches of different sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

from packprop.engine.passes import ChunkSizes
from packprop.engine.tensors import tensors_in


class ChunkSizesByBatch:
    """Chunk sizes for batches of different sizes: those of one batch serve all that are no larger.

    Args:
        plan: Makes those for one batch.
    """

    def __init__(self, plan: Callable[[tuple[Any, Any]], ChunkSizes]) -> None:
        self._plan = plan
        self._planned: list[tuple[list[tuple[int, ...]], ChunkSizes]] = []

    def of(self, batch: tuple[Any, Any]) -> ChunkSizes:
        """Return the chunk sizes for a batch; plan only if no earlier batch was as large in every axis."""
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        for known, chunk_sizes in reversed(self._planned):
            are_alike = [*map(len, known)] == [*map(len, shapes)]
            if are_alike and all(map(operator.le, chain(*shapes), chain(*known))):
                return chunk_sizes
        self._planned.append((shapes, self._plan(batch)))
        return self._planned[-1][1]

    @property
    def first(self) -> ChunkSizes | None:
        """Return those of the first batch."""
        return self._planned[0][1] if self._planned else None

    def saved(self) -> list[Any]:
        """Return the plans, in values that a file can hold: other chunks would round sums in another way."""
        return [[[list(shape) for shape in shapes], list(sizes)] for shapes, sizes in self._planned]

    def restore(self, saved: list[Any]) -> None:
        """Restore the values of ``saved``."""
        self._planned = [([tuple(shape) for shape in shapes], ChunkSizes(*sizes)) for shapes, sizes in saved]
