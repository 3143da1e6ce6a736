"""Reading a store: packprop maps arrays into memory, and copies the rows that you read."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packprop.engine.tensors import tensor_of
from packprop.errors import Absent, BadInput, PackpropError, require_number
from packprop.store.arguments import whole_number
from packprop.store.checksums import CheckedRows
from packprop.store.folder import ArrayHeader, is_begun
from packprop.store.frames import to_frame
from packprop.store.plain import DESCRIPTIONS, as_tensor
from packprop.store.search import Found, extremes_and_sums, products_of_rows
from packprop.store.shard import IDENTIFIERS, Shard, require_plain_files

BLOCK = 32 * 2**20
"""Bytes that are read at once by default."""


class StoredArray:
    """Rows of all samples, on disk.

    ``array[5]``, ``array[10:20]`` and ``array[[4, 2, 7]]`` copy these rows into a tensor; iteration goes
    through single rows. packprop compares rows with their checksums on the first reading, a block of about 1
    MiB at once; see NOTE [Checksums of rows].

    Args:
        header: The description of the array.
        parts: The rows of each shard.

    Raises:
        PackpropError: Whenever you read rows that have changed.
    """

    def __init__(self, header: ArrayHeader, parts: Sequence[CheckedRows]) -> None:
        self.header, self._parts = header, list(parts)
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)]).tolist()

    @property
    def shape(self) -> torch.Size:
        """Samples, and the shape of a row."""
        return torch.Size([self._starts[-1], *self.header.shape])

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the entries."""
        return self.header.precision

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"StoredArray({self.header.said}, shape={list(self.shape)}, dtype={self.dtype})"

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor | np.ndarray) -> Tensor:
        if isinstance(rows, tuple):
            raise IndexError(f"rows[{rows}]: you can index rows alone; read them, and index the tensor")
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._between(start, max(start, stop))
            return self._chosen(np.arange(start, stop, step))
        if not np.ndim(rows):
            if np.asarray(rows).dtype == bool:
                raise IndexError(f"rows[{rows}] is neither a row nor a mask of all rows")
            number = operator.index(rows)  # type: ignore[arg-type]  # it has no axes
            return self._chosen(np.array([number]))[0]
        chosen = np.asarray(rows)
        if chosen.dtype == bool:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask of shape {list(chosen.shape)} for {len(self)} samples")
            chosen = chosen.nonzero()[0]
        return self._chosen(chosen.astype(np.int64, casting="same_kind") if chosen.size else np.arange(0))

    def __iter__(self) -> Iterator[Tensor]:
        for block in self.blocks():
            yield from block

    def blocks(self, rows: int | None = None) -> Iterator[Tensor]:
        """Iterate over all rows in order, ``rows`` at a time ``[rows, ...]``; by default about 32 MiB.

        Raises:
            BadInput: If ``rows`` is no whole number of at least 1.
        """
        if rows is None:
            step = max(1, BLOCK // max(1, self.header.row_bytes))
        else:
            step = whole_number(f"Blocks of {self.header.said} were read from a store.", "rows", rows, 1)
        return (self[start : start + step] for start in range(0, len(self), step))

    def lent(self, start: int, stop: int) -> Tensor:
        """Return rows from ``start`` to ``stop``, mapped if possible: do not write to them."""
        return self._between(start, min(stop, len(self)), copy=False)

    def torch(self) -> Tensor:
        """Return all rows, in memory."""
        return self[:]

    def numpy(self) -> np.ndarray:
        """Return all rows as a numpy array; bfloat16 as float32.

        It compares them with their checksums. If there is one shard, it maps them into memory without a copy.
        """
        if self.dtype == torch.bfloat16:
            return self.torch().float().numpy()
        pieces = [part.read(slice(0, len(part))) for part in self._parts]
        rows = pieces[0].view() if len(pieces) == 1 else np.concatenate(pieces)
        rows.flags.writeable = False
        return rows

    def checksums(self) -> list[list[int]]:
        """Return the checksums of all rows, block by block for each shard, without reading a row."""
        return [part.expected for part in self._parts]

    def damages(self) -> Iterator[str]:
        """Yield the places of changed rows; this reads all rows."""
        for part in self._parts:
            for place in part.damages():
                yield f"{self.header.said}, {place}"

    def _between(self, start: int, stop: int, copy: bool = True) -> Tensor:
        pieces = [
            part.read(slice(max(start, first) - first, min(stop, last) - first))
            for part, (first, last) in zip(self._parts, itertools.pairwise(self._starts), strict=True)
            if max(start, first) < min(stop, last)
        ] or [self._parts[0].all[:0]]
        alone = len(pieces) == 1 and pieces[0].flags.writeable
        return as_tensor(pieces[0] if alone else np.concatenate(pieces), self.dtype, copy and alone)

    def _chosen(self, rows: np.ndarray) -> Tensor:
        if rows.ndim != 1 or (len(rows) and not (-len(self) <= rows.min() and rows.max() < len(self))):
            raise IndexError(f"cannot read rows {rows.tolist()}: the array has {len(self)} rows, on one axis")
        rows = rows % max(len(self), 1)
        found = np.empty((len(rows), *self.header.shape), self._parts[0].all.dtype)
        for part, (first, last) in zip(self._parts, itertools.pairwise(self._starts), strict=True):
            here = (first <= rows) & (rows < last)
            found[here] = part.read(rows[here] - first)
        return as_tensor(found, self.dtype)


class Store(Mapping[Any, Any]):
    """The rows of a folder that are finished when you open it; writers may continue.

    ``store["grad_batch"]`` are arrays by parameter, ``store["grad_batch", "0.weight"]`` is one of them; values
    that have no parameter, such as losses, are ``store["loss"]``. Rows belong to a loss that is summed over its
    terms (``compute``), or are as you wrote them. A store reads its shards as one, one after the other.

    Args:
        folder: Folder of the store.

    Raises:
        BadInput: For a folder that holds no store, a header or marks that cannot be read or have changed,
            shards of different stores, a file that is missing, shorter than its finished rows or of another
            kind than the header says, or a link that leads out of the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._asked = f"Store({str(folder)!r}) was opened."
        require_plain_files(self._asked, self.folder)
        places = [place for place in sorted(self.folder.glob("shard-*")) if place.is_dir() and is_begun(place)]
        if not places:
            raise BadInput(
                self._asked,
                f"path {str(folder)!r}",
                "it is not the folder of a store",
                "give the folder that StoreWriter or compute(..., store=...) has written",
            )
        shards = [Shard(place, self._asked) for place in places]
        self.headers = [shard.header for shard in shards]
        for header in self.headers[1:]:
            if difference := self.headers[0].difference(header):
                raise BadInput(
                    self._asked,
                    f"shards {self.headers[0].shard} and {header.shard}",
                    f"they belong to different stores: these differ in their {difference}",
                    "keep each store in its own folder",
                )
        self._marks = [shard.marks.last for shard in shards]
        self._identifiers = self._array(shards, [IDENTIFIERS] * len(shards))
        self._arrays: dict[tuple[str, str], StoredArray] = {}
        for key in dict.fromkeys(key for shard in shards for key in shard.arrays):
            self._arrays[key] = self._array(shards, [shard.arrays.get(key) for shard in shards])

    def _array(self, shards: Sequence[Shard], headers: Sequence[ArrayHeader | None]) -> StoredArray:
        """Return one array over all shards; it is zero in shards that do not have it."""
        like = next(header for header in headers if header is not None)
        parts: list[CheckedRows] = []
        for shard, header in zip(shards, headers, strict=True):
            if header is None:
                rows = shard.marks.last.samples, *like.shape
                parts.append(CheckedRows(np.broadcast_to(np.zeros((), DESCRIPTIONS[like.precision]), rows)))
                continue
            if (header.shape, header.dtype) != (like.shape, like.dtype):
                raise BadInput(
                    self._asked,
                    f"{like.quantity!r} of {like.parameter!r} in {shard.place.name}",
                    f"rows are {list(header.shape)} in {header.dtype}, and {list(like.shape)} in {like.dtype} "
                    "in another shard",
                    "write all shards with one dtype, and rows of one shape",
                )
            parts.append(shard.rows[header.file])
        return StoredArray(like, parts)

    def __repr__(self) -> str:
        return f"<Store {str(self.folder)!r}: {', '.join(self)} of {self.samples:,} samples>"

    def verify(self) -> int:
        """Read all rows and compare them with their checksums; return the number of samples.

        Raises:
            PackpropError: With all changed rows.
        """
        arrays = [self._identifiers, *self._arrays.values()]
        damages = [damage for array in arrays for damage in array.damages()]
        if damages:
            raise PackpropError(
                f"The store {str(self.folder)!r} was verified.",
                "; ".join(damages[:20]) + (f"; and {len(damages) - 20} more" if len(damages) > 20 else ""),
                "these rows have changed since they were written: their checksums do not match",
                "take the files from a copy of the store, or write the store again; other rows can be read",
            )
        return self.samples

    def __getitem__(self, key: str | tuple[str, str]) -> Any:
        array = self._arrays.get(key if isinstance(key, tuple) else (key, ""))
        if array is not None:
            return array
        found = {parameter: array for (quantity, parameter), array in self._arrays.items() if quantity == key}
        if not found:
            raise Absent(
                f"store[{key!r}] was read.",
                f"the store {str(self.folder)!r}",
                f"it has {', '.join(map(repr, self)) or 'no values'}, of the parameters "
                f"{', '.join(sorted({repr(name) for _, name in self._arrays if name})) or 'none'}",
                "ask for one of these, or write a store with the extension that you need",
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(quantity for quantity, _ in self._arrays))

    def __len__(self) -> int:
        return len(dict.fromkeys(quantity for quantity, _ in self._arrays))

    @property
    def samples(self) -> int:
        """Samples in the store."""
        return len(self._identifiers)

    @property
    def terms(self) -> float:
        """The sum of the divisors of batches' losses: rows divided by it belong to one mean loss."""
        return sum(mark.terms for mark in self._marks)

    @property
    def finished(self) -> bool:
        """Tell whether all shards are there, and their writers were closed with nothing left to write."""
        return len(self._marks) == self.headers[0].shards and all(mark.finished for mark in self._marks)

    @property
    def identifiers(self) -> Tensor:
        """Whole numbers that identify the samples, in the order of the rows ``[n]``."""
        return self._identifiers.torch()

    def rows_of(self, identifiers: Any) -> Tensor:
        """Return the rows of samples, by their identifiers ``[k] -> [k]``.

        Raises:
            BadInput: For an identifier that no sample, or more than one, has.
        """
        known = self.identifiers
        wanted = tensor_of(identifiers).reshape(-1).to(known.device)
        known, order = known.sort()
        left, right = torch.searchsorted(known, wanted), torch.searchsorted(known, wanted, right=True)
        wrong = (right - left != 1).nonzero().reshape(-1)
        if len(wrong):
            number = int(right[wrong[0]] - left[wrong[0]])
            raise BadInput(
                f"Rows of samples of the store {str(self.folder)!r} were asked for.",
                f"identifier {wanted[wrong[0]].item()}",
                f"{number} samples have it",
                "give identifiers that `store.identifiers` holds once",
            )
        return order[left]

    def top(
        self,
        quantity: str,
        queries: Tensor | Mapping[str, Tensor],
        k: int,
        *,
        memory: int = BLOCK // 2,
        largest: bool = True,
    ) -> Found:
        """Find the samples whose rows have the largest inner products with each query, exactly.

        Args:
            quantity: Attribute of an extension, or the name of the written values.
            queries: One tensor ``[q, *row]``; for values of several parameters one for each ``[q, *p]``, by
                name: products add up over parameters.
            k: The number of samples; fewer if there are no more.
            memory: Bytes for the current rows, and their products.
            largest: ``False`` for the smallest inner products instead, the smallest first.

        Returns:
            ``products [q, k]``, largest first (or smallest first), ``identifiers [q, k]`` and ``rows [q, k]``.

        Raises:
            BadInput: For queries that do not fit the rows, and for complex rows or queries.
            PackpropError: If an inner product is not finite.
        """
        return self.extremes(quantity, queries, k, memory=memory, largest=(largest,))[0]

    def extremes(
        self,
        quantity: str,
        queries: Tensor | Mapping[str, Tensor],
        k: int,
        *,
        memory: int = BLOCK // 2,
        largest: Sequence[bool] = (True, False),
    ) -> tuple[Found, ...]:
        """Run ``top`` for each entry of ``largest``, and read the rows once; by default for both ends."""
        asked = f"store.top({quantity!r}, ...) was called."
        arrays = self.arrays(quantity)
        by_parameter = dict(queries) if isinstance(queries, Mapping) else {"": queries}
        if not arrays or by_parameter.keys() != arrays.keys():
            raise BadInput(
                asked,
                f"queries for {sorted(by_parameter)}",
                f"the store has rows of {quantity!r} for {sorted(arrays) or 'no parameter'}",
                "give a tensor [q, ...] for each of these names in a dictionary; '' stands for a single tensor",
            )
        require_number(asked, "k", k, "number of samples")
        require_number(asked, "memory", memory, "number of bytes")
        blocks = products_of_rows(asked, arrays, by_parameter, memory)
        return self.identified(extremes_and_sums(blocks, k, largest)[0])

    def identified(self, found: Iterable[tuple[Tensor, Tensor]]) -> tuple[Found, ...]:
        """Return rows and their products with the identifiers of the samples."""
        return tuple(
            Found(products, self._identifiers[rows.reshape(-1)].reshape(rows.shape), rows)
            for rows, products in found
        )

    def arrays(self, quantity: str) -> dict[str, StoredArray]:
        """Return the arrays of a quantity by parameter, ``""`` for all together; none if it is unknown."""
        return {parameter: array for (known, parameter), array in self._arrays.items() if known == quantity}

    def to_frame(self, *quantities: str) -> Any:
        """Return a data frame of pandas, with a row for each sample, and a column for each entry.

        ``quantities`` selects some; by default it takes all with one value for each sample and parameter.

        Raises:
            BadInput: If pandas is missing, a quantity is not stored, or there would be too many columns.
        """
        return to_frame(self.identifiers.numpy(), self._arrays, quantities)
