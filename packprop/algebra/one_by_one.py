"""Several statistics of one structure, taken of the gradients of one sample after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.cells import to_parameter
from packprop.algebra.formation import forms_rows
from packprop.algebra.kernels import (
    Extents,
    convolved_by_groups,
    products_one_by_one,
    worth_a_call,
)
from packprop.algebra.monoid import Moments
from packprop.algebra.statistics import Statistic, moments, per_sample_grad, sq_norm, sum_sq, summed_grad
from packprop.algebra.structures import (
    Outer,
    Quadratic,
)
from packprop.tensors.dry import is_dry_run

# NOTE [In turn]
#
# Gradients of single samples of a large weight that is shared over positions cost less to form than to
# write down, read again for a sum, and again for each other statistic: each is formed, given to all that was
# asked for while it is in the cache, and gone.

Add = Callable[[Tensor, int], object]
"""Takes a gradient ``[o, i]``, and how many there were with it."""


Tally = tuple[Add, Callable[[], Any]]
"""Adds up gradients of single samples, and returns their statistic."""


TALLIES: dict[Statistic, Callable[[Outer], Tally]] = {}


def together(structure: Quadratic, statistics: Sequence[Statistic]) -> list[Any]:
    """Values of several statistics of one structure; see NOTE [In turn]."""
    gradients = _gradients_one_by_one(structure, statistics)
    if gradients is None:
        return [statistic(structure) for statistic in statistics]
    assert isinstance(structure, Outer)
    tallies = [TALLIES[statistic](structure) for statistic in statistics]
    for count, gradient in enumerate(islice(gradients, 3) if is_dry_run() else gradients, 1):
        for add, _ in tallies:
            add(gradient, count)
    return [value() for _, value in tallies]


def _gradients_one_by_one(structure: Quadratic, statistics: Sequence[Statistic]) -> Iterator[Tensor] | None:
    """Gradients of single samples ``[o, i]``, where these are best seen once; else ``None``."""
    if not isinstance(structure, Outer) or structure.cotangent is None or len(structure.cotangent) > 1:
        return None
    if structure.out is None and per_sample_grad in statistics:
        return None
    return products_one_by_one(*structure.matrices) if goes_one_by_one(statistics, structure.extents) else None


def goes_one_by_one(statistics: Sequence[Statistic], extents: Extents) -> bool:
    """Whether statistics of one column of an affine use are best had from one gradient after the other."""
    positions, groups, fan_in, fan_out = extents[:4]
    return (
        groups == 1
        and worth_a_call(positions, fan_in * fan_out, extents.dtype, extents.device)
        and all(statistic in TALLIES for statistic in statistics)
        and any(forms_rows(statistic, extents) for statistic in statistics)
        and not convolved_by_groups(extents)
    )


def _tally_of(statistic: Statistic) -> Callable[[Callable[[Outer], Tally]], Callable[[Outer], Tally]]:
    def register(tally: Callable[[Outer], Tally]) -> Callable[[Outer], Tally]:
        TALLIES[statistic] = tally
        return tally

    return register


def _zeros(structure: Outer) -> Tensor:
    """``[o, i]``."""
    assert structure.cotangent is not None
    return structure.cotangent.new_zeros(structure.cotangent.shape[4], structure.shape[3])


@_tally_of(per_sample_grad)
def _tally_rows(structure: Outer) -> Tally:
    room = structure.out
    assert room is not None
    places = room.view(room.shape[1], -1, structure.shape[3])
    return lambda gradient, count: places[count - 1].copy_(gradient), lambda: room


@_tally_of(summed_grad)
def _tally_sum(structure: Outer) -> Tally:
    total = _zeros(structure)
    return lambda gradient, count: total.add_(gradient), lambda: to_parameter(structure, total)


@_tally_of(sum_sq)
def _tally_squares(structure: Outer) -> Tally:
    total = _zeros(structure)
    return lambda gradient, count: total.addcmul_(gradient, gradient), lambda: to_parameter(structure, total)


@_tally_of(sq_norm)
def _tally_norms(structure: Outer) -> Tally:
    assert structure.cotangent is not None
    norms = structure.cotangent.new_empty(structure.shape[0])

    def add(gradient: Tensor, count: int) -> None:
        torch.linalg.vector_norm(gradient, out=norms[count - 1])

    return add, norms.square_


@_tally_of(moments)
def _tally_moments(structure: Outer) -> Tally:
    """Mean and squared deviation by Welford (1962)."""
    mean, deviation, samples = _zeros(structure), _zeros(structure), structure.shape[0]

    def add(gradient: Tensor, count: int) -> None:
        shift = gradient - mean
        mean.add_(shift, alpha=1 / count)
        deviation.addcmul_(shift, shift, value=1 - 1 / count)

    return add, lambda: Moments(samples, to_parameter(structure, mean), to_parameter(structure, deviation))
