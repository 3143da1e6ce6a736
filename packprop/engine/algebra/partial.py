"""A result while its chunks arrive: pieces go to their place, sums add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import SUM, Monoid, lift


class Extent(NamedTuple):
    """The piece from ``start`` to ``stop`` of an axis of length ``total``."""

    start: int
    stop: int
    total: int

    @property
    def whole(self) -> bool:
        """Tell whether the piece is the whole axis."""
        return self.stop - self.start == self.total


ONE = Extent(0, 1, 1)
"""All of an axis of length one."""


class Partial:
    """A result while its chunks arrive: columns in any order, and for each of them all samples in order.

    It allocates a result that grows once and fills it, and adds up sums in place. So nothing larger than the
    result stays after a chunk.

    Args:
        over_v: The merge of disjoint columns.
        over_n: The merge of disjoint samples.
        spare: A tensor that nobody else uses. The result takes its memory if it fits.
    """

    def __init__(self, over_v: Monoid, over_n: Monoid, spare: Tensor | None = None) -> None:
        self._over_v, self._over_n, self._spare = over_v, over_n, spare
        self._filled: Tensor | None = None
        self._out: Tensor | None = None
        self._of_column, self._total = _Running(over_n), _Running(over_v)

    def put(self, value: Any, columns: Extent, samples: Extent) -> None:
        """Merge the value of some columns and samples."""
        if value is not None and value is self._out:  # it was written to its place already
            return
        if self._over_v.adds or not (columns.whole and samples.whole):
            axes = (self._over_v.axis, columns), (self._over_n.axis, samples)
            grown = [(axis, extent) for axis, extent in axes if axis is not None]
            if grown and all(value.shape[axis] == extent.stop - extent.start for axis, extent in grown):
                place = self._place(value, grown)
                place.copy_(value) if self._is_written_once else place.add_(value)
                return
        self._of_column.add(lift(self._over_n, value))
        if samples.stop == samples.total:
            self._total.add(lift(self._over_v, self._of_column.take()))

    def out(self, like: Tensor, shape: Sequence[int], columns: Extent, samples: Extent) -> Tensor | None:
        """Return the place of a value ``[v, n, *p]`` in the result, for writing to it at once.

        It is ``None`` unless both axes join values.
        """
        if (self._over_v.axis, self._over_n.axis) != (0, 1) or torch.is_grad_enabled():
            return None
        size = (columns.stop - columns.start, samples.stop - samples.start, *shape)
        self._out = self._place(like.expand(size), [(0, columns), (1, samples)])
        return self._out

    def drop_spare(self) -> None:
        """Release the spare tensor before a value is made that will not be written to it."""
        self._spare = None

    def result(self) -> Any:
        """Return the value, once all chunks have arrived."""
        if self._filled is None:
            return self._total.take()
        return self._filled if self._total.value is None else self._filled + self._total.take()

    def tensors(self) -> list[Tensor]:
        """Return the tensors that stay until the result is complete."""
        kept = [self._filled, self._of_column.value, self._total.value]
        flat = [item for part in kept for item in (part if isinstance(part, (list, tuple)) else [part])]
        return [item for item in flat if isinstance(item, Tensor)]

    @property
    def _is_written_once(self) -> bool:
        """Tell whether each place of the result gets one value."""
        return self._over_v.grows and self._over_n.grows and not self._over_v.adds

    def _place(self, value: Tensor, grown: list[tuple[int, Extent]]) -> Tensor:
        """Return the view of the whole result that a value is written to."""
        if self._filled is None:
            shape = [*value.shape]
            for axis, extent in grown:
                shape[axis] = extent.total
            self._filled = self._allocated(value, shape)
            if not self._is_written_once:
                self._filled.zero_()
        place = self._filled
        for axis, extent in grown:
            place = place.narrow(axis, extent.start, extent.stop - extent.start)
        return place

    def _allocated(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return memory for the whole result: the spare tensor's, if it fits."""
        spare, self._spare = self._spare, None
        if (
            spare is not None
            and (spare.dtype, spare.device, spare.numel()) == (like.dtype, like.device, math.prod(shape))
            and spare.is_contiguous()
            and not torch.is_grad_enabled()
        ):
            return spare.view(shape)
        return like.new_empty(shape)


def whole(value: Any, over_v: Monoid, over_n: Monoid) -> Any:
    """Return the result that consists of one value, of all columns and samples."""
    return over_v.result(lift(over_v, over_n.result(lift(over_n, value))))


class _Running:
    """Merge the partial results so far; add in place to a sum that only this object refers to."""

    def __init__(self, monoid: Monoid) -> None:
        self._monoid = monoid
        self.value: Any = None
        self._begun = self._own = False

    def add(self, value: Any) -> None:
        if self._own and value is not None and value.shape == self.value.shape:
            self.value.add_(value)
        elif self._begun:
            self._own = self._monoid is SUM and isinstance(self.value, Tensor) and value is not None
            self.value = self._monoid.merge(self.value, value)
        else:
            self.value, self._begun = value, True

    def take(self) -> Any:
        """Return the value, and begin anew."""
        value, self.value = self.value, None
        self._begun = self._own = False
        return self._monoid.result(value)
