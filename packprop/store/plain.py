"""One array in one ``.npy`` file that grows along its first axis."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from packprop.errors import BadInput
from packprop.store.files import opened, write_all
from packprop.store.schema import Unfit

MAGIC = b"\x93NUMPY\x01\x00"
"""The first bytes of a ``.npy`` file of version 1.0."""

DIGITS = 20
"""Room for the number of rows, so that the header never changes its length."""

DESCRIPTIONS = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.complex128: "<c16",
    torch.complex64: "<c8",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
"""The stored form of each precision; numpy has no bfloat16, whose 16 bits are stored as whole numbers."""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a precision in headers: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the precision of a name.

    Raises:
        Unfit: If no precision that can be stored has this name.
    """
    for dtype in DESCRIPTIONS:
        if name_of(dtype) == name:
            return dtype
    raise Unfit(f"unknown precision {name!r}")


def header_of(rows: int, shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return the header of a file of ``rows`` rows ``[*shape]``, of the same length for any number of them."""
    sizes = "".join(f" {size}," for size in shape)
    text = f"{{'descr': {DESCRIPTIONS[dtype]!r}, 'fortran_order': False, 'shape': ({rows},{sizes}), }}"
    start = len(MAGIC) + 2
    longest = start + len(text) - len(str(rows)) + DIGITS + 1
    total = -(-longest // 64) * 64
    return MAGIC + (total - start).to_bytes(2, "little") + text.ljust(total - start - 1).encode() + b"\n"


class GrowingArray:
    """A ``.npy`` file that grows by rows.

    Written rows stay invisible to readers of the file alone until ``show`` counts them in its header.

    Args:
        path: The file; the first rows create it.
        shape: Shape of a row.
        dtype: Precision.
    """

    def __init__(self, path: Path, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), dtype
        self.row_bytes = math.prod(self.shape) * dtype.itemsize
        self.offset = len(header_of(0, self.shape, dtype))
        self._file: int | None = None

    def put(self, start: int, rows: Tensor) -> None:
        """Write some rows ``[n, *shape]``, of this precision and on the CPU, from row ``start`` on."""
        content = as_array(rows.contiguous()).reshape(-1).view(np.uint8).data
        write_all(self._opened(), content, self.offset + start * self.row_bytes)

    def fill(self, rows: int) -> None:
        """Make the file ``rows`` rows long, with zeros for rows that were not written."""
        file = self._opened()
        needed = self.offset + rows * self.row_bytes
        if os.fstat(file).st_size < needed:
            os.ftruncate(file, needed)

    def show(self, rows: int) -> None:
        """Write a number of rows, which the file must hold, into its header; change nothing else in it."""
        with opened(self.path, os.O_RDWR) as file:
            write_all(file, header_of(rows, self.shape, self.dtype), 0)

    def sync(self) -> None:
        """Wait until all written rows are on the disk."""
        with opened(self.path, os.O_RDWR) as file:
            os.fsync(file)

    def drop(self, rows: int) -> None:
        """Drop all rows from ``rows`` on, none of which was ever shown."""
        file = self._opened()
        needed = self.offset + rows * self.row_bytes
        if os.fstat(file).st_size > needed:
            os.ftruncate(file, needed)

    def cut(self, rows: int) -> None:
        """Drop all rows from ``rows`` on, and write the number that is left into the header."""
        self.drop(rows)
        self.show(rows)

    def mapped(self, stop: int, start: int = 0) -> np.ndarray:
        """Map rows from ``start`` to ``stop`` into memory; writes to them stay in memory."""
        rows = stop - start
        if not rows * math.prod(self.shape):
            return np.zeros((rows, *self.shape), DESCRIPTIONS[self.dtype])
        place = self.offset + start * self.row_bytes
        return np.memmap(self.path, DESCRIPTIONS[self.dtype], "c", place, (rows, *self.shape))

    def close(self) -> None:
        """Close the file; the next access opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _opened(self) -> int:
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            if os.fstat(self._file).st_size < self.offset:
                write_all(self._file, header_of(0, self.shape, self.dtype), 0)
        return self._file


def shown_rows(asked: str, array: GrowingArray) -> int:
    """Return the number of rows in the header of a file; 0 if there is no file.

    Raises:
        BadInput: If it is no file of such rows.
    """
    if not array.path.exists():
        return 0
    with array.path.open("rb") as file:
        found = file.read(array.offset)
    rows = re.search(rb"'shape': \((\d{1,18}),", found)
    if len(found) < array.offset:
        return 0  # its writer was killed, or it is shorter than its finished rows
    if rows is None or found != header_of(int(rows[1]), array.shape, array.dtype):
        raise BadInput(
            asked,
            f"file {str(array.path)!r}",
            f"it is not a .npy file of rows {list(array.shape)} in {name_of(array.dtype)}, as the header of "
            "the store says",
            "take the file from a copy of the store, or write the store again",
        )
    return int(rows[1])


def require_length(asked: str, array: GrowingArray, rows: int) -> None:
    """Refuse a file that is shorter than its finished rows.

    Raises:
        BadInput: With the sizes.
    """
    needed = array.offset + rows * array.row_bytes
    size = array.path.stat().st_size if array.path.exists() else 0
    if rows and size < needed:
        raise BadInput(
            asked,
            f"file {str(array.path)!r}",
            f"it has {size} bytes, and {needed} were written for {rows} samples",
            "take the file from a copy of the store, or write the store again",
        )


def as_array(values: Tensor) -> np.ndarray:
    """Return a tensor's entries as a numpy array: those of bfloat16 as their bits."""
    values = values.detach().resolve_conj().resolve_neg()
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def as_tensor(values: np.ndarray, dtype: torch.dtype, copy: bool = True) -> Tensor:
    """Return the tensor of entries that ``as_array`` has made; in memory of its own, or read-only."""
    tensor = torch.from_numpy(np.array(values, order="C") if copy else values)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor
