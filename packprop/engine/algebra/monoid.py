"""Partial results: monoids that merge results of chunks, batches and resumed runs; results that grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.engine.tensors.nesting import map_tensors, tensors_in
from packprop.errors import PackpropError


class Moments(NamedTuple):
    """Number, mean and sum of squared deviations of a set of rows (Chan et al. 1979).

    The number is a tensor if data decide which rows count.
    """

    samples: int | Tensor
    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class Monoid:
    """A way to merge partial results along an axis.

    Args:
        name: For messages and tables.
        merge: Merges two partial results into one; associative.
        result: Turns the last partial result into the value.
        axis: The axis that the value grows along; ``None`` for a value of fixed size.
        adds: Adds up partial results that have the same place along that axis.
    """

    name: str
    merge: Callable[[Any, Any], Any]
    result: Callable[[Any], Any]
    axis: int | None = None
    adds: bool = False

    @property
    def grows(self) -> bool:
        """Tell whether the value grows with every partial result."""
        return self.axis is not None

    @property
    def keeps_one(self) -> bool:
        """Tell whether the value equals the partial result if there is only one."""
        return self.axis is not None or self.result is _itself

    def __repr__(self) -> str:
        return self.name


def _itself(value: Any) -> Any:
    return value


def concatenate(axis: int) -> Monoid:
    """Return the monoid whose partial results are lists of pieces, joined once at the end along ``axis``."""

    def result(pieces: list[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)

    return Monoid(f"CAT({axis})", lambda a, b: a + b, result, axis)


def _merge_moments(a: Moments, b: Moments) -> Moments:
    shift = b.mean - a.mean
    if isinstance(a.samples, Tensor) or isinstance(b.samples, Tensor):
        number: Tensor = a.samples + b.samples  # type: ignore[assignment]  # one of them is a tensor
        share = b.samples / number.clamp(min=1)  # perhaps no row counts
        deviation = torch.addcmul(a.deviation + b.deviation, shift, shift * (a.samples * share))
        return Moments(number, torch.addcmul(a.mean, shift, share), deviation)
    samples = a.samples + b.samples
    mean = torch.add(a.mean, shift, alpha=b.samples / samples)
    between = a.samples * b.samples / samples
    return Moments(samples, mean, torch.addcmul(a.deviation + b.deviation, shift, shift, value=between))


def _refuse(a: Any, b: Any) -> Any:
    raise PackpropError(
        "Values of several batches, or of several passes, were to be merged.",
        "an extension whose value is a function of vectors",
        "it belongs to the graph of one backward pass",
        "ask for it in a backward pass of its own, inside `with packprop.backpack(...)`",
    )


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two tensors; ``None`` stands for a statistic that a structure does not have."""
    return a if b is None else b if a is None else a + b


SUM = Monoid("SUM", _add, _itself)
"""Add up values."""

CAT = {axis: concatenate(axis) for axis in (0, 1)}
"""Join values along an axis."""

ADD_IN_PLACE = replace(CAT[0], name="ADD(0)", adds=True)
"""Join values along the leading axis; add up values that have the same place there."""

SINGLE = Monoid("SINGLE", _refuse, _itself)
"""Keep the one value; refuse to merge."""

KEEP = Monoid("KEEP", lambda a, b: a, _itself)
"""Keep the first value; all are equal."""

MOMENTS = Monoid("MOMENTS", _merge_moments, _itself)
"""Merge moments as Chan et al. (1979) do."""


def rescale(value: Any, factor: Tensor | float, degree: float) -> Any:
    """Return the result for a loss times ``factor``.

    ``degree`` belongs to the row; for moments it is the degree of their mean. A value that is no tensor, such
    as a product with a block, computes its own multiples, by a method ``scaled``.
    """
    if value is None or degree == 0:
        return value
    if isinstance(value, Moments):
        return Moments(value.samples, value.mean * factor, value.deviation * factor**2)
    if hasattr(value, "scaled"):
        return value.scaled(factor**degree)
    return value * factor**degree


def nothing_like(value: Any) -> Any:
    """Return zeros in place of all sums; the number of samples stays."""
    if isinstance(value, Moments):
        return Moments(value.samples, torch.zeros_like(value.mean), torch.zeros_like(value.mean))
    return map_tensors(torch.zeros_like, value)


def lift(monoid: Monoid, value: Any) -> Any:
    """Make the partial result that consists of one value."""
    return [value] if monoid.grows else value


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
    """A result while its chunks arrive: columns in any order, and the samples of each column in order.

    It allocates memory for a result that grows only once, and adds up sums in place. So nothing larger than the
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
        """Return the place of a value ``[v, n, *p]`` in the result, for writing the value there directly.

        It is ``None`` unless both axes join values, and in gradient mode.
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

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that stay until the result is complete."""
        return tensors_in([self._filled, self._of_column.value, self._total.value])

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
    """The merged partial results so far; a sum that only this object refers to grows in place."""

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
