"""Sums over batches: in memory of their own, with more digits than what is added to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from packprop.engine.algebra import KEEP, SUM, Moments, Monoid
from packprop.engine.tensors import wider_dtype

PIECE = 2**18
"""Entries of a large tensor that are added up at once: those that stay in a processor's caches."""


def _begun(monoid: Monoid, partial: Any) -> Any:
    """Return the first partial result, in its own memory, with more digits if others will be added."""
    if monoid.grows or monoid is KEEP:
        return partial
    if monoid is SUM and isinstance(partial, Tensor):
        return widened(partial, copy=True)
    if isinstance(partial, Moments):
        return Moments(partial.samples, widened(partial.mean), widened(partial.deviation))
    return partial


def merged_with(monoid: Monoid, before: Any, partial: Any) -> Any:
    """Merge a partial result into those before, sums in place; the first one has ``None`` before it."""
    if before is None:
        return _begun(monoid, partial)
    if monoid is SUM and isinstance(before, Tensor) and before.shape == partial.shape:
        add_to(before, partial)
        return before
    return monoid.merge(before, partial)


def add_to(total: Tensor, value: Tensor) -> None:
    """Add in place; piece by piece if the precisions differ, so that no second large tensor is made."""
    if total.dtype == value.dtype or total.device.type != "cpu" or not total.is_contiguous():
        total.add_(value)
        return
    pieces = value.reshape(-1).split(PIECE)
    for place, piece in zip(total.view(-1).split(PIECE), pieces, strict=True):
        place.add_(piece)


def widened(tensor: Tensor, copy: bool = False) -> Tensor:
    """Return a tensor with twice the digits, if the device has them."""
    return tensor.to(wider_dtype(tensor.dtype, tensor.device.type) or tensor.dtype, copy=copy)
