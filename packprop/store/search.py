"""Exact search: inner products of all stored rows with some queries, a bite of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.errors import BadInput
from packprop.tensors.precision import accumulation_dtype


class Found(NamedTuple):
    """Samples with the largest inner products.

    Args:
        products: Inner products ``[q, k]``, largest first.
        identifiers: Identifiers of the samples ``[q, k]``.
        rows: Their rows in the store ``[q, k]``.
    """

    products: Tensor
    identifiers: Tensor
    rows: Tensor


def largest_products(
    asked: str, arrays: Mapping[str, Any], queries: Mapping[str, Tensor], k: int, memory: int
) -> tuple[Tensor, Tensor]:
    """Rows ``[q, k]`` with the largest inner products with queries, and these ``[q, k]``.

    Products are added up over arrays, in at least float32.

    Raises:
        BadInput: For queries of another shape than the rows, or a ``k`` that is no number of samples.
    """
    if type(k) is not int or k < 1:
        raise BadInput(asked, f"k={k!r}", "it is no number of samples", "give a whole number of at least 1")
    counts = {len(query) if query.dim() else 0 for query in queries.values()}
    for name, array in arrays.items():
        if tuple(queries[name].shape[1:]) != tuple(array.shape[1:]) or len(counts) != 1:
            raise BadInput(
                asked,
                f"queries of shape {list(queries[name].shape)}" + (f" for {name!r}" if name else ""),
                f"rows are {list(array.shape[1:])}",
                "give queries [q, ...], as many for each parameter",
            )
    like = next(iter(arrays.values()))
    samples = len(like)
    entries = sum(max(1, array.shape[1:].numel()) for array in arrays.values())
    step = max(1, memory // (4 * entries))
    widths = {name: accumulation_dtype(array.dtype) for name, array in arrays.items()}
    flat = {name: queries[name].detach().to("cpu", widths[name]).flatten(1) for name in arrays}
    best = torch.empty(counts.pop(), 0, dtype=next(iter(widths.values())))
    rows = torch.empty(len(best), 0, dtype=torch.int64)
    for start in range(0, samples, step):
        products: Tensor | None = None
        for name, array in arrays.items():
            block = array.lent(start, start + step).to(widths[name]).reshape(-1, flat[name].shape[1])
            part = flat[name] @ block.mT
            products = part if products is None else products.add_(part)
        assert products is not None
        found, where = products.topk(min(k, products.shape[1]))
        best, rows = torch.cat([best, found], 1), torch.cat([rows, where + start], 1)
        best, order = best.topk(min(k, best.shape[1]))
        rows = rows.gather(1, order)
    return rows, best
