"""Structures or per-sample gradients that the first pass over a parameter keeps for the second one."""

from __future__ import annotations

from collections.abc import Sequence

from packprop.engine.algebra.monoid import Extent
from packprop.engine.algebra.statistics import OF_ROWS
from packprop.engine.algebra.structures import Dense, Lookup, Outer, Statistical, rows
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.passes.request import Task


class Kept:
    """Chunks of samples between two passes over one parameter; see NOTE [Second pass].

    packprop keeps a single chunk of all samples unchanged. If there are several, it keeps their per-sample
    gradients if the first pass has formed them, the second pass needs nothing else, and they take no more
    memory than cotangents may: it is faster to read them than the inputs and cotangents that they come from. In
    all other cases it keeps nothing.

    Args:
        chunk_sizes: The limit on memory.
        tasks: The tasks of the second pass.
    """

    def __init__(self, chunk_sizes: ChunkSizes, tasks: Sequence[Task]) -> None:
        self._room = chunk_sizes.cotangents
        self._of_rows = all(task.row.statistic in OF_ROWS for task in tasks)
        self._chunks: dict[Extent, Statistical] = {}
        self._keeps = True

    def keep(self, structure: Statistical, extent: Extent) -> None:
        """Keep the part of a chunk that the second pass can use."""
        if extent.whole:
            self._chunks = {extent: structure}
            return
        if isinstance(structure, (Outer, Lookup)) and structure.formed and self._of_rows and self._keeps:
            gradients = rows(structure)
            size = gradients.numel() * gradients.element_size()
            if size * extent.total <= self._room * (extent.stop - extent.start):
                self._chunks[extent] = Dense(gradients)
                return
        self._keeps = False
        self._chunks.clear()

    def samples_at_once(self, step: int) -> int:
        """Return the chunk size of the second pass: that of kept chunks, else ``step`` samples."""
        first = next(iter(self._chunks), None)
        return step if first is None or first.whole else first.stop

    def take(self, extent: Extent) -> Statistical | None:
        """Take out the kept structure of a chunk; ``None`` if there is none."""
        return self._chunks.pop(extent, None)
