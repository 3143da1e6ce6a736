"""Exact search: inner products of all stored rows with some queries, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.engine.tensors import accumulation_dtype, outside_autocast
from packprop.errors import BadInput, PackpropError


class Found(NamedTuple):
    """Samples with the largest, or the smallest, inner products.

    Args:
        products: Inner products ``[q, k]``, largest first; smallest first in a search for the smallest.
        identifiers: Identifiers of the samples ``[q, k]``.
        rows: Their rows in the store ``[q, k]``.
    """

    products: Tensor
    identifiers: Tensor
    rows: Tensor


def products_of_rows(
    asked: str, arrays: Mapping[str, Any], queries: Mapping[str, Tensor], memory: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of the first row of each block, and inner products of its rows with queries ``[q, n]``.

    Products add up over arrays, in at least float32. The rows of a block and their products take ``memory``
    bytes. There is at least one block, which may be empty.

    Raises:
        BadInput: For queries of another shape than the rows, or complex ones.
        PackpropError: For products that are not finite.
    """
    flat = _flat(asked, arrays, queries)
    step = max(1, memory // bytes_of_a_row(arrays, len(next(iter(flat.values())))))
    for start in range(0, max(1, len(next(iter(arrays.values())))), step):
        products = _products(arrays, flat, start, start + step)
        _require_finite(asked, products, start)
        yield start, products


@outside_autocast
def _products(arrays: Mapping[str, Any], flat: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """Return inner products of rows from ``start`` to ``stop`` with queries ``[q, n]``."""
    products: Tensor | None = None
    for name, array in arrays.items():
        block = array.lent(start, stop).to(flat[name].dtype)
        block = block.reshape(len(block), flat[name].shape[1])
        part = flat[name] @ block.mT
        del block
        products = part if products is None else products.add_(part)
    assert products is not None
    return products


def extremes_and_sums(
    blocks: Iterable[tuple[int, Tensor]],
    k: int,
    largest: Sequence[bool] = (True, False),
    groups: Tensor | None = None,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """Find rows with the largest, or smallest, products with queries, and sums over groups of rows.

    Args:
        blocks: The number of the first row of each block, and products of its rows ``[q, n]``, in order.
        k: The number of rows; fewer if there are no more.
        largest: For each search, ``True`` for the largest products.
        groups: The number of each row's group ``[n]``; rows after the last of these belong to none.

    Returns:
        For each search, rows and products ``[q, k]``; sums ``[q, g]``, if there are groups.
    """
    best: list[tuple[Tensor, Tensor]] = []
    sums: Tensor | None = None
    count = int(groups.max()) + 1 if groups is not None and len(groups) else 0
    for start, products in blocks:
        nothing = products.new_empty(len(products), 0, dtype=torch.int64), products[:, :0]
        pairs = zip(best or [nothing] * len(largest), largest, strict=True)
        best = [_better(known, products, start, k, side) for known, side in pairs]
        if groups is not None:
            own = groups[start : start + products.shape[1]]
            if sums is None:
                sums = products.new_zeros(len(products), count, dtype=torch.float64)
            sums.index_add_(1, own, products[:, : len(own)].double())
    return best, sums


def _flat(asked: str, arrays: Mapping[str, Any], queries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return queries ``[q, p]`` by array, on the CPU, in the precision of their products."""
    counts = {len(query) if query.dim() else 0 for query in queries.values()}
    for name, array in arrays.items():
        if tuple(queries[name].shape[1:]) != tuple(array.shape[1:]) or len(counts) != 1:
            raise BadInput(
                asked,
                f"queries of shape {list(queries[name].shape)}" + (f" for {name!r}" if name else ""),
                f"the rows in the store are {list(array.shape[1:])}",
                "give queries [q, ...] with rows of this shape, and the same number q for each parameter",
            )
        if array.dtype.is_complex or queries[name].is_complex():
            raise BadInput(
                asked,
                f"rows of {array.dtype}, queries of {queries[name].dtype}" + (f" for {name!r}" if name else ""),
                "inner products of complex numbers have no order",
                "store torch.view_as_real(values), and search with torch.view_as_real(queries): their inner "
                "products are the real parts",
            )
    flat = {}
    for name, array in arrays.items():
        query = queries[name].detach().to("cpu", _products_dtype(array.dtype))
        flat[name] = query.reshape(len(query), array.shape[1:].numel())  # rows may have no axes
    return flat


def bytes_of_a_row(arrays: Mapping[str, Any], queries: int) -> int:
    """Return the bytes that a search for ``queries`` queries takes for each row that it has in memory."""
    rows = 0
    for array in arrays.values():
        entries, width = max(1, array.shape[1:].numel()), _products_dtype(array.dtype)
        rows = max(rows, entries * (array.dtype.itemsize + (width.itemsize if width != array.dtype else 0)))
    return rows + 2 * queries * 8


def _products_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of products with rows: whole numbers would overflow, and cut off queries."""
    return accumulation_dtype(dtype) if dtype.is_floating_point or dtype.is_complex else torch.float64


def _better(
    known: tuple[Tensor, Tensor], products: Tensor, start: int, k: int, largest: bool
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` best of known rows with their products, and of products with rows from ``start`` on."""
    found, where = products.topk(min(k, products.shape[1]), largest=largest)
    rows, best = torch.cat([known[0], where + start], 1), torch.cat([known[1], found], 1)
    best, order = best.topk(min(k, best.shape[1]), largest=largest)
    return rows.gather(1, order), best


def _require_finite(asked: str, products: Tensor, start: int) -> None:
    wrong = (~products.isfinite()).nonzero()
    if len(wrong):
        query, row = wrong[0].tolist()
        raise PackpropError(
            asked,
            f"query {query} and row {start + row} of the store",
            f"their inner product is {products[query, row].item()}",
            "look for entries that are not finite, or so large that products overflow; to leave rows out, "
            "write the store again without them",
        )
