"""Sums over batches, in their own memory and with more digits than the results that packprop adds to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from packprop.engine.algebra import KEEP, SUM, Moments, Monoid
from packprop.engine.tensors import wider_dtype

PIECE = 2**18
"""The most entries of a large tensor that packprop adds at once, so that they stay in a processor's caches."""


def _begun(monoid: Monoid, partial: Any) -> Any:
    """Return the first partial result, ready for others: a sum in its own memory, with more digits."""
    if monoid.grows or monoid is KEEP:
        return partial
    if monoid is SUM and isinstance(partial, Tensor):
        return widened(partial, copy=True)
    if isinstance(partial, Moments):
        return Moments(partial.samples, widened(partial.mean), widened(partial.deviation))
    return partial


def merged_with(monoid: Monoid, before: Any, partial: Any) -> Any:
    """Merge a partial result into those before, sums in place; ``before`` is ``None`` for the first one."""
    if before is None:
        return _begun(monoid, partial)
    if monoid is SUM and isinstance(before, Tensor) and before.shape == partial.shape:
        add_to(before, partial)
        return before
    return monoid.merge(before, partial)


def add_to(total: Tensor, value: Tensor) -> None:
    """Add a value in place; if precisions differ on a CPU, in pieces, to make no second large tensor."""
    if total.dtype == value.dtype or total.device.type != "cpu" or not total.is_contiguous():
        total.add_(value)
        return
    pieces = value.reshape(-1).split(PIECE)
    for place, piece in zip(total.view(-1).split(PIECE), pieces, strict=True):
        place.add_(piece)


def widened(tensor: Tensor, copy: bool = False) -> Tensor:
    """Return a tensor with twice the digits, if the device has them."""
    return tensor.to(wider_dtype(tensor.dtype, tensor.device.type) or tensor.dtype, copy=copy)
