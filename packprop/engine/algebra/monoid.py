"""Monoids of partial results: merges are associative, so chunks, batches and resumed runs merge alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.engine.tensors.nesting import map_tensors
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

    def __repr__(self) -> str:
        return self.name


def concatenate(axis: int) -> Monoid:
    """Partial results are lists of pieces, joined once at the end along ``axis``."""

    def result(pieces: list[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)

    return Monoid(f"CAT({axis})", lambda a, b: a + b, result, axis)


def _merge_moments(a: Moments, b: Moments) -> Moments:
    shift = b.mean - a.mean
    if isinstance(a.samples, Tensor) or isinstance(b.samples, Tensor):
        number = torch.as_tensor(a.samples + b.samples)
        share = b.samples / number.clamp(min=1)  # there may be none that counts
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


SUM = Monoid("SUM", _add, lambda total: total)
"""Add up values."""

CAT = {axis: concatenate(axis) for axis in (0, 1)}
"""Join values along an axis."""

ADD_IN_PLACE = replace(CAT[0], name="ADD(0)", adds=True)
"""Join values along the leading axis; add up those that have the same place there."""

SINGLE = Monoid("SINGLE", _refuse, lambda value: value)
"""Keep the one value; refuse to merge."""

KEEP = Monoid("KEEP", lambda a, b: a, lambda value: value)
"""Keep the first value; all are equal."""

MOMENTS = Monoid("MOMENTS", _merge_moments, lambda partial: partial)
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
