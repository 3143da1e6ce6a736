"""Rows on disk and their checksums: packprop compares each block with its checksum when it first reads it.

# NOTE [Checksums of rows]
packprop takes the rows of a chunk in blocks of about 1 MiB, each with a checksum. It views a block as a table
of 64-bit words (little-endian) with 1021 columns, and adds up each column modulo 2^64. The checksum is the
CRC-32 of the sums, and of the bytes after the last full row of the table. It is several times as fast as the
CRC-32 of all bytes, which would slow down reading. Any changed bit changes it, as do exchanged blocks: 1021 is
a prime, so no two pages of memory begin in one column. Other changes go unnoticed with a chance of 2^-32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from packprop.errors import PackpropError
from packprop.store.marks import Mark

BLOCK = 2**20
"""Bytes, about, of the rows that share a checksum: packprop reads all of these to check a single row."""

COLUMNS = 1021
"""Columns of the table whose sums a checksum is made of."""

ZEROS = -1
"""Stands for the checksum of rows that were not written, and are zero."""


def checksum(rows: np.ndarray) -> int:
    """Return the checksum of some rows; see NOTE [Checksums of rows]."""
    entries = rows.reshape(-1).view(np.uint8)
    height = len(entries) // (8 * COLUMNS)
    split = height * 8 * COLUMNS
    sums = np.add.reduce(entries[:split].view("<u8").reshape(height, COLUMNS), 0)
    return zlib.crc32(entries[split:].data, zlib.crc32(sums.data))


def checksum_of_tensor(tensor: Tensor) -> int:
    """Return the checksum of the bytes of a tensor on the CPU."""
    return checksum(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


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
        file: The name of the file in the marks.
        chunks: The marks of its chunks, one after the other; without any, rows are not compared.
        asked: The call that reads them, for messages.
        place: The path of the file, for messages.

    Raises:
        ValueError: If there is not one checksum for each block.
    """

    def __init__(
        self,
        rows: np.ndarray,
        file: str = "",
        chunks: Sequence[Mark] = (),
        asked: str = "",
        place: Path | None = None,
    ) -> None:
        self.all, self._asked, self._place = rows, asked, place
        step = rows_of_a_block(rows)
        starts: list[int] = []
        stops: list[int] = []
        expected: list[int] = []
        for chunk in chunks:
            blocks = range(chunk.start, chunk.samples, step)
            values = chunk.checksums.get(file, [ZEROS] * len(blocks))
            if len(values) != len(blocks):
                said = f"there are {len(values)} checksums for {len(blocks)} blocks"
                raise ValueError(f"{said} of rows {chunk.start} to {chunk.samples - 1}")
            starts += blocks
            stops += [min(start + step, chunk.samples) for start in blocks]
            expected += values
        self._starts, self._stops = np.array(starts, np.int64), np.array(stops, np.int64)
        self.expected, self._unread = expected, np.ones(len(starts), bool)
        """The checksums of its blocks."""

    def __len__(self) -> int:
        return len(self.all)

    def read(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return the rows of a slice, mapped into memory, or copies of the rows with the given numbers.

        Raises:
            PackpropError: If one of them has changed.
        """
        if isinstance(rows, slice):
            first = int(np.searchsorted(self._stops, rows.start, "right"))
            blocks = range(first, int(np.searchsorted(self._starts, rows.stop, "left")))
        else:
            found = np.unique(np.searchsorted(self._stops, rows, "right"))
            blocks = found[found < len(self._starts)].tolist()
        for block in blocks:
            if self._unread[block] and not self._is_right(block):
                raise PackpropError(
                    self._asked,
                    self._said(block),
                    "they have changed since they were written: their checksum does not match",
                    "take the file from a copy of the store, or write the store again; Store.verify() lists "
                    "all damaged rows, and you can still read the others",
                )
            self._unread[block] = False
        chosen: np.ndarray = self.all[rows]
        return chosen

    def damages(self) -> Iterator[str]:
        """Yield the place of each changed block; this reads all rows."""
        for block in range(len(self._starts)):
            self._unread[block] = not self._is_right(block)
            if self._unread[block]:
                yield self._said(block)

    def _is_right(self, block: int) -> bool:
        rows, expected = self.all[self._starts[block] : self._stops[block]], self.expected[block]
        if expected == ZEROS:
            return not rows.reshape(-1).view(np.uint8).any()
        return checksum(rows) == expected

    def _said(self, block: int) -> str:
        return f"rows {self._starts[block]} to {self._stops[block] - 1} of {str(self._place)!r}"
