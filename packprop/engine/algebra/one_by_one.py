"""Several statistics of one structure, from per-sample gradients that are formed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.choices import Extents, convolved_by_groups
from packprop.engine.algebra.kernels import norms_of, products_one_by_one, worth_a_call
from packprop.engine.algebra.monoid import Moments
from packprop.engine.algebra.statistics import (
    Statistic,
    forms_rows,
    moments,
    per_sample_grad,
    sq_norm,
    sum_sq,
    summed_grad,
)
from packprop.engine.algebra.structures import Outer, Statistical, fold_matrix
from packprop.engine.tensors.dry import is_dry_run

# NOTE [One by one]
#
# Forming the per-sample gradients of a large weight that is shared over positions costs less than writing them
# to memory and reading them again for each statistic. So packprop forms each one, gives it to all statistics of
# the pass while it is in the cache, and drops it.

Add = Callable[[Tensor, int], object]
"""A function that takes the gradient of one sample ``[o, i]``, and its number, counted from one."""

Tally = tuple[Add, Callable[[], Any]]
"""A function that takes gradients one by one, and returns their statistic."""

MakeTally = Callable[[Outer, Tensor], Tally]
"""A function that makes the tally of a structure; the first gradient shows the memory format of all."""

TALLIES: dict[Statistic, MakeTally] = {}
"""The tally of each statistic, for gradients that come one by one."""


def evaluate_together(structure: Statistical, statistics: Sequence[Statistic]) -> list[Any]:
    """Return values of several statistics of one structure; see NOTE [One by one]."""
    gradients = _gradients_one_by_one(structure, statistics)
    first = None if gradients is None else next(gradients, None)
    if gradients is None or first is None:
        return [statistic(structure) for statistic in statistics]
    assert isinstance(structure, Outer)
    tallies = [TALLIES[statistic](structure, first) for statistic in statistics]
    others = islice(gradients, 2) if is_dry_run() else gradients
    for number, gradient in enumerate(chain((first,), others), 1):
        for add, _ in tallies:
            add(gradient, number)
    return [value() for _, value in tallies]


def goes_one_by_one(statistics: Sequence[Statistic], extents: Extents) -> bool:
    """Tell whether statistics of one column of an affine use are best computed from gradients one by one."""
    positions, groups, fan_in, fan_out = extents[:4]
    return (
        groups == 1
        and worth_a_call(positions, fan_in * fan_out, extents.dtype, extents.device)
        and all(statistic in TALLIES for statistic in statistics)
        and any(forms_rows(statistic, extents) for statistic in statistics)
        and not convolved_by_groups(extents)
    )


def _gradients_one_by_one(structure: Statistical, statistics: Sequence[Statistic]) -> Iterator[Tensor] | None:
    """Yield per-sample gradients ``[o, i]`` if forming them one by one is best; else return ``None``."""
    if not isinstance(structure, Outer) or structure.cotangent is None or structure.cotangent.shape[0] > 1:
        return None
    if structure.out is None and per_sample_grad in statistics:
        return None
    if not goes_one_by_one(statistics, structure.extents):
        return None
    return products_one_by_one(*structure.matrices, by_rows=per_sample_grad in statistics)


def _tally_of(statistic: Statistic) -> Callable[[MakeTally], MakeTally]:
    """Register the tally of a statistic."""

    def register(tally: MakeTally) -> MakeTally:
        TALLIES[statistic] = tally
        return tally

    return register


@_tally_of(per_sample_grad)
def _tally_rows(structure: Outer, first: Tensor) -> Tally:
    out = structure.out
    assert out is not None
    places = out.view(out.shape[1], -1, structure.shape[3])
    return lambda gradient, number: places[number - 1].copy_(gradient), lambda: out


@_tally_of(summed_grad)
def _tally_sum(structure: Outer, first: Tensor) -> Tally:
    total = torch.zeros_like(first)
    return lambda gradient, number: total.add_(gradient), lambda: _folded(structure, total)


@_tally_of(sum_sq)
def _tally_squares(structure: Outer, first: Tensor) -> Tally:
    total = torch.zeros_like(first)
    return lambda gradient, number: total.addcmul_(gradient, gradient), lambda: _folded(structure, total)


@_tally_of(sq_norm)
def _tally_norms(structure: Outer, first: Tensor) -> Tally:
    norms = first.new_empty(structure.shape[0])

    def add(gradient: Tensor, number: int) -> None:
        norms[number - 1] = norms_of(gradient.flatten())

    return add, norms.square_


@_tally_of(moments)
def _tally_moments(structure: Outer, first: Tensor) -> Tally:
    """Compute mean and squared deviation as Welford (1962) does."""
    mean, deviation, samples = torch.zeros_like(first), torch.zeros_like(first), structure.shape[0]

    def add(gradient: Tensor, number: int) -> None:
        shift = gradient - mean
        mean.add_(shift, alpha=1 / number)
        deviation.addcmul_(shift, shift, value=1 - 1 / number)

    return add, lambda: Moments(samples, _folded(structure, mean), _folded(structure, deviation))


def _folded(structure: Outer, total: Tensor) -> Tensor:
    """Return ``[o, i]`` as the parameter holds it, also in memory."""
    return fold_matrix(structure, total.contiguous())
