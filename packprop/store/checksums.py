"""Rows on disk and their checksums: packprop compares each block with its checksum when it first reads it.

# NOTE [Checksums of rows]
packprop takes the rows of a chunk in blocks of about 1 MiB, each with a checksum. It deals the 64-bit words of
a block (little-endian) out to 1021 columns in turn and adds them up modulo 2^64, as far as they fill a row of
these. The checksum is the CRC-32 of the sums and of the bytes that are left. It is several times as fast as the
CRC-32 of all bytes, whose time would show beside that of reading. Any changed bit changes it, as do exchanged
blocks: 1021 is a prime, so no two pages of memory begin in one column. Other changes go unnoticed with a chance
of 2^-32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 2**20
"""Bytes of rows, about, that have one checksum: the least that is read for a single row."""

COLUMNS = 1021
"""Sums that a block is folded into."""

ZEROS = -1
"""Stands for the checksum of rows that were not written, and are zero."""


class Damage(Exception):
    """Raised if rows have changed since they were written.

    Args:
        start: The first of them.
        stop: The one after the last.
    """

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.start, self.stop = start, stop


class Sums(NamedTuple):
    """Checksums of the rows of a chunk of one file.

    Args:
        start: The first row of the chunk.
        stop: The one after its last.
        values: One for each block; ``None`` if no row of the chunk was written.
    """

    start: int
    stop: int
    values: Sequence[int] | None


def checksum(rows: np.ndarray) -> int:
    """Return the checksum of some rows; see NOTE [Checksums of rows]."""
    entries = rows.reshape(-1).view(np.uint8)
    height = len(entries) // (8 * COLUMNS)
    split = height * 8 * COLUMNS
    sums = np.add.reduce(entries[:split].view("<u8").reshape(height, COLUMNS), 0)
    return zlib.crc32(entries[split:].data, zlib.crc32(sums.data))


def rows_of_a_block(rows: np.ndarray) -> int:
    """Return how many rows of a chunk have one checksum."""
    return max(1, BLOCK // max(1, rows.dtype.itemsize * math.prod(rows.shape[1:])))


def checksums(rows: np.ndarray) -> list[int]:
    """Return the checksums of all blocks of a chunk."""
    step = rows_of_a_block(rows)
    return [checksum(rows[start : start + step]) for start in range(0, len(rows), step)]


class CheckedRows:
    """Rows ``[n, ...]`` of one file that are compared with their checksums on the first reading.

    Args:
        rows: All rows, mapped into memory.
        sums: Checksums of chunks, one after the other; without any, rows are not compared.

    Raises:
        ValueError: For checksums that are not one for each block.
    """

    def __init__(self, rows: np.ndarray, sums: Sequence[Sums] = ()) -> None:
        self.all = rows
        step = rows_of_a_block(rows)
        starts: list[int] = []
        stops: list[int] = []
        expected: list[int] = []
        for start, stop, values in sums:
            first = range(start, stop, step)
            if values is not None and len(values) != len(first):
                raise ValueError(
                    f"{len(values)} checksums for {len(first)} blocks of rows {start} to {stop - 1}"
                )
            starts += first
            stops += [min(each + step, stop) for each in first]
            expected += [ZEROS] * len(first) if values is None else values
        self._starts, self._stops = np.array(starts, np.int64), np.array(stops, np.int64)
        self._expected, self._unread = expected, np.ones(len(starts), bool)

    def __len__(self) -> int:
        return len(self.all)

    def between(self, start: int, stop: int) -> np.ndarray:
        """Return rows from ``start`` to ``stop``, mapped.

        Raises:
            Damage: If one of them has changed.
        """
        first = np.searchsorted(self._stops, start, "right")
        for block in range(int(first), int(np.searchsorted(self._starts, stop, "left"))):
            self._check(block)
        return self.all[start:stop]

    def chosen(self, rows: np.ndarray) -> np.ndarray:
        """Return rows by their numbers, copied.

        Raises:
            Damage: If one of them has changed.
        """
        blocks = np.searchsorted(self._stops, rows, "right")
        for block in np.unique(blocks[blocks < len(self._starts)]).tolist():
            self._check(block)
        found: np.ndarray = self.all[rows]
        return found

    def damages(self) -> Iterator[tuple[int, int]]:
        """Yield the first row, and the one after the last, of each changed block; this reads all."""
        self._unread[:] = True
        for block in range(len(self._starts)):
            try:
                self._check(block)
            except Damage as error:
                yield error.start, error.stop

    def _check(self, block: int) -> None:
        if self._unread[block]:
            start, stop = int(self._starts[block]), int(self._stops[block])
            rows, expected = self.all[start:stop], self._expected[block]
            right = (
                not rows.reshape(-1).view(np.uint8).any() if expected == ZEROS else checksum(rows) == expected
            )
            if not right:
                raise Damage(start, stop)
            self._unread[block] = False
