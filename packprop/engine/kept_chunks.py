"""What the second pass over a parameter finds of the first one: structures, or per-sample gradients."""

from __future__ import annotations

from collections.abc import Sequence

from packprop.algebra.formation import OF_ROWS
from packprop.algebra.partial import Extent
from packprop.algebra.structures import Dense, Lookup, Outer, Statistical, rows
from packprop.engine.chunks import ChunkSizes
from packprop.engine.request import Task


class Kept:
    """Chunks of samples between two passes over one parameter; see NOTE [Second pass].

    One chunk of all samples is kept as it is. Of several, the per-sample gradients are, if the first pass has
    formed them, the second one needs nothing else, and they take no more room than cotangents may: to read
    them again takes less time than what they are made of. Else nothing is kept.

    Args:
        chunk_sizes: How much may be held.
        tasks: What the second pass takes.
    """

    def __init__(self, chunk_sizes: ChunkSizes, tasks: Sequence[Task]) -> None:
        self._room = chunk_sizes.cotangents
        self._of_rows = all(task.row.statistic in OF_ROWS for task in tasks)
        self._chunks: dict[Extent, Statistical] = {}
        self._keeps = True

    def keep(self, structure: Statistical, extent: Extent) -> None:
        """Keep what the second pass can use of a chunk of the first."""
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
        """The chunks of the second pass: those of the first where they were kept, else of ``step`` samples."""
        first = next(iter(self._chunks), None)
        return step if first is None or first.whole else first.stop

    def take(self, extent: Extent) -> Statistical | None:
        """What was kept of a chunk; it is let go of."""
        return self._chunks.pop(extent, None)
