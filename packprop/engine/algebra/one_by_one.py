"""Several statistics of one structure, from per-sample gradients that are formed one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
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
from packprop.engine.tensors.nesting import map_tensors

# NOTE [One by one]
#
# Forming the per-sample gradients of a large weight that is shared over positions costs less than writing them
# to memory and reading them again for each statistic. So packprop forms each one, gives it to all statistics of
# the pass while it is in the cache, and drops it.

ONE_BY_ONE = frozenset({per_sample_grad, summed_grad, sum_sq, sq_norm, moments})
"""Statistics that packprop can take of gradients that come one by one."""


def evaluate_together(structure: Statistical, statistics: Sequence[Statistic]) -> list[Any]:
    """Return values of several statistics of one structure; see NOTE [One by one]."""
    gradients = _gradients_one_by_one(structure, statistics) if isinstance(structure, Outer) else None
    first = None if gradients is None else next(gradients, None)
    if first is None:
        found = {statistic: statistic(structure) for statistic in statistics}
    else:
        assert isinstance(structure, Outer)
        assert gradients is not None
        sums = _Sums(structure, statistics, first)
        for gradient in islice(gradients, 2) if is_dry_run() else gradients:
            sums.add(gradient)
        found = {statistic: sums.value(statistic) for statistic in statistics}
    if len(found) == len(statistics):
        return [*found.values()]
    return [  # a result of its own for each, which nobody else changes
        map_tensors(torch.clone, found[statistic]) if statistic in statistics[:place] else found[statistic]
        for place, statistic in enumerate(statistics)
    ]


def goes_one_by_one(statistics: Sequence[Statistic], extents: Extents) -> bool:
    """Tell whether statistics of one column of an affine use are best computed from gradients one by one."""
    positions, groups, fan_in, fan_out = extents[:4]
    return (
        groups == 1
        and worth_a_call(positions, fan_in * fan_out, extents.dtype, extents.device)
        and ONE_BY_ONE.issuperset(statistics)
        and any(forms_rows(statistic, extents) for statistic in statistics)
        and not convolved_by_groups(extents)
    )


def _gradients_one_by_one(structure: Outer, statistics: Sequence[Statistic]) -> Iterator[Tensor] | None:
    """Return an iterator over per-sample gradients ``[o, i]`` if forming them one by one is best."""
    cotangent = structure.cotangent
    if cotangent is None or cotangent.shape[0] > 1 or cotangent.shape[2] == 1:  # no shared positions
        return None
    keeps = per_sample_grad in statistics
    if (keeps and structure.out is None) or not goes_one_by_one(statistics, structure.extents):
        return None
    return products_one_by_one(*structure.matrices, by_rows=keeps)


class _Sums:
    """Sums over gradients that come one by one, which several statistics share.

    Args:
        structure: The structure that the gradients are of.
        statistics: The statistics that are wanted.
        first: The first gradient ``[o, i]``, which nobody else keeps. All gradients have its memory format.
    """

    def __init__(self, structure: Outer, statistics: Sequence[Statistic], first: Tensor) -> None:
        self._structure, self._wanted = structure, frozenset(statistics)
        self._is_by_rows = first.is_contiguous()
        self._number = 1
        self._norms = first.new_empty(structure.shape[0])
        self._keep(first)
        self._squares = first.square() if sum_sq in self._wanted else first
        self._mean_or_sum = first
        self._deviation: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add one gradient; mean and squared deviation as Welford (1962) does."""
        self._number += 1
        self._keep(gradient)
        if sum_sq in self._wanted:
            self._squares.addcmul_(gradient, gradient)
        if moments in self._wanted:
            shift = gradient - self._mean_or_sum
            self._mean_or_sum.add_(shift, alpha=1 / self._number)
            weight = 1 - 1 / self._number
            if self._deviation is None:
                self._deviation = shift.square_().mul_(weight)
            else:
                self._deviation.addcmul_(shift, shift, value=weight)
        elif summed_grad in self._wanted:
            self._mean_or_sum.add_(gradient)

    def _keep(self, gradient: Tensor) -> None:
        """Keep the results that belong to one gradient alone."""
        place = self._number - 1
        if sq_norm in self._wanted:  # in the order of memory, which needs no copy
            entries = (gradient if self._is_by_rows else gradient.mT).flatten()
            self._norms[place] = norms_of(entries)
        if self._structure.out is not None and per_sample_grad in self._wanted:
            self._structure.out[0, place].view(gradient.shape).copy_(gradient)

    def value(self, statistic: Statistic) -> Any:
        """Return a statistic of all gradients."""
        if statistic is per_sample_grad:
            return self._structure.out
        if statistic is sq_norm:
            return self._norms.square()
        if statistic is sum_sq:
            return self._folded(self._squares)
        if statistic is moments:
            mean = self._mean_or_sum
            deviation = torch.zeros_like(mean) if self._deviation is None else self._deviation
            return Moments(self._structure.shape[0], self._folded(mean), self._folded(deviation))
        return self._folded(self._mean_or_sum * self._number if moments in self._wanted else self._mean_or_sum)

    def _folded(self, total: Tensor) -> Tensor:
        """Return ``[o, i]`` as the parameter holds it, also in memory."""
        return fold_matrix(self._structure, total.contiguous())
