"""Fast cells: statistics of one structure without per-sample gradients.

A cell belongs to one statistic and one structure, and equals the statistic's default (``statistics.py``). It
returns ``None`` if it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.choices import features_at_once, norms_by_products, samples_in_products
from packprop.engine.algebra.kernels import (
    norms_of,
    square_norms,
    squared_products,
    summed_products,
    wide_product,
)
from packprop.engine.algebra.monoid import Moments
from packprop.engine.algebra.structures import Lookup, Outer, Tied, fold_matrix
from packprop.engine.tensors.device import device_kind, multiplies_wide
from packprop.engine.tensors.dry import chunk_starts
from packprop.engine.tensors.precision import accumulation_dtype, at_least, wider_dtype

Cell = Callable[..., Any]

FAST_CELLS: dict[str, dict[type, Cell]] = {}
"""The cells, by the name of the statistic and the type of the structure."""

IN_CACHE = 2**16
"""Entries of a temporary matrix that stays in a processor's cache until it is used."""


SMALL = 2**15
"""Up to this number of entries, it takes less time to form per-sample gradients than to avoid them."""


def fast_cell(statistic: str, structure: type) -> Callable[[Cell], Cell]:
    """Register a cell for the statistic of this name and a structure."""

    def register(cell: Cell) -> Cell:
        FAST_CELLS.setdefault(statistic, {})[structure] = cell
        return cell

    return register


@fast_cell("sum_sq", Outer)
def _outer_sum_sq(structure: Outer) -> Tensor | None:
    """Multiply squares, without shared positions: the square of a product is the product of squares.

    With shared positions it forms gradients, squares them and adds them up, one after the other if that is
    faster.
    """
    columns, _, positions, groups, fan_out = structure.given_cotangent.shape
    if positions != 1:
        if structure.formed or structure.by_groups or groups != 1:
            return None
        total = squared_products(*structure.matrices).unflatten(0, (columns, fan_out)).sum(0)
        return fold_matrix(structure, total)
    squares = structure.wide_cotangent.square().sum((0, 2))
    return structure.fold(summed_products(squares, structure.x.square()))


@fast_cell("batch_sq", Outer)
def _outer_batch_sq(structure: Outer) -> Tensor | None:
    """Work as for ``sum_sq``, but sum squares of cotangents over columns before the products."""
    if structure.given_cotangent.shape[2] != 1:
        return None
    squares = structure.wide_cotangent[:, :, 0].square().sum(0)
    return structure.fold(squares[..., None] * structure.x[:, 0, :, None, :].square())


@fast_cell("sq_norm", Outer)
def _outer_sq_norm(structure: Outer) -> Tensor | None:
    """Sum inner products between pairs of positions, if these are few (Goodfellow 2015).

    Terms of different positions may cancel. So the products have a wider precision than the pass, if there is
    one. Their rounding is then no more than the rounding of gradients to their own precision would add to the
    squares.
    """
    if structure.formed:
        return None
    if structure.shape[1] == 1:
        cotangent, x = structure.wide_cotangent, structure.x
        if cotangent.shape[0] == cotangent.shape[3] == 1 and not torch.is_grad_enabled():
            return (norms_of(cotangent) * norms_of(x)).square_().flatten()
        return (square_norms(cotangent.squeeze(2)).sum(0) * square_norms(x.squeeze(1))).sum(1)
    if not norms_by_products(structure.extents):
        return None
    cotangent, x = structure.factors
    samples = len(x)
    step = samples_in_products(structure.extents, samples)
    limited = structure.held is not None
    if step == samples:
        return _norms_by_products(cotangent, x, limited)
    norms = cotangent.new_zeros(samples, dtype=structure.extents.dtype)
    for part in _blocks(samples, step):
        norms[part] = _norms_by_products(cotangent[:, part], x[part], limited)
    return norms


def _norms_by_products(cotangent: Tensor, x: Tensor, limited: bool) -> Tensor:
    """Return squared norms of gradients, ``[n]``, from inner products between pairs of positions."""
    at_once = features_at_once(x.shape[1]) if limited else max(x.shape[3], cotangent.shape[4])
    inputs = _products_of_positions(x[None], at_once)
    cotangents = _products_of_positions(cotangent, at_once)
    if device_kind(x) == "cpu" or torch.is_grad_enabled():
        norms = torch.bmm(inputs.flatten(1)[:, None], cotangents.flatten(1)[..., None])
    else:  # an accelerator would give all products of a sample to one of its many cores
        norms = inputs.mul_(cotangents).sum((1, 2))
    norms = norms.view(len(x), -1).sum(1) if len(inputs) > len(x) else norms.flatten()
    return at_least(norms, 0.0).to(accumulation_dtype(cotangent.dtype))


def _products_dtype(values: Tensor) -> torch.dtype:
    """Return a precision with twice the digits of the pass, if the device has one."""
    if multiplies_wide(values):
        return accumulation_dtype(values.dtype)
    return wider_dtype(values.dtype, device_kind(values)) or values.dtype


def _products_of_positions(values: Tensor, at_once: int) -> Tensor:
    """Return inner products between positions, ``[v, n, s, g, f] -> [n*g, s, s]``, in a wider precision.

    It widens ``at_once`` of the f entries at a time, so that no copy is as large as the values.
    """
    if multiplies_wide(values):
        part = _by_position(values)
        return wide_product(part, part.mT)
    wide = _products_dtype(values)
    blocks = [slice(None)] if values.dtype == wide else _blocks(values.shape[4], at_once)
    total: Tensor | None = None
    for block in blocks:
        part = _by_position(values if len(blocks) == 1 else values[..., block]).to(wide)
        total = torch.bmm(part, part.mT) if total is None else total.baddbmm_(part, part.mT)
    assert total is not None
    return total


def _by_position(values: Tensor) -> Tensor:
    """Map ``[v, n, s, g, f]`` to ``[n*g, s, v*f]``."""
    if values.shape[0] == values.shape[3] == 1:
        return values[0, :, :, 0]
    return values.permute(1, 3, 2, 0, 4).flatten(3).flatten(0, 1)


@fast_cell("moments", Outer)
def _outer_moments(structure: Outer) -> Moments | None:
    """Return moments without shared positions, by matrix products in a wider precision.

    It subtracts the mean after summing the squares. This cancels only digits that per-sample gradients would
    not have had: rounding them to their own precision costs more than the sum in the wider one.
    """
    _, samples, positions, groups, fan_out = structure.given_cotangent.shape
    is_small = samples * groups * fan_out * structure.shape[3] <= SMALL
    if positions != 1 or structure.formed or torch.is_grad_enabled() or is_small:
        return None
    cotangent, x = structure.factors
    wide = _products_dtype(cotangent)
    if wide == cotangent.dtype:
        return None
    left, right = cotangent[0, :, 0].permute(1, 2, 0), x[:, 0].transpose(0, 1).to(wide)
    squares, dtype = right.square(), structure.extents.dtype
    blocks = _blocks(fan_out, max(1, IN_CACHE // (groups * right.shape[2])))
    is_one = len(blocks) == 1
    mean = cotangent.new_empty(groups, 0 if is_one else fan_out, right.shape[2], dtype=dtype)
    deviation = torch.empty_like(mean)
    for block in blocks:
        part = left[:, block].to(wide)
        sums = torch.bmm(part, right)
        own = torch.bmm(part.square_(), squares).addcmul_(sums, sums, value=-1 / samples).clamp_min_(0)
        sums.div_(samples)
        if is_one:
            mean, deviation = sums.to(dtype), own.to(dtype)
        else:
            mean[:, block], deviation[:, block] = sums, own
            del part, sums, own  # before the next block makes its own
    return Moments(samples, structure.fold(mean), structure.fold(deviation))


@fast_cell("gram", Outer)
def _outer_gram(structure: Outer) -> Tensor | None:
    """Multiply two Gram matrices: their product is the Gram matrix of outer products."""
    if structure.given_cotangent.shape[2] != 1:
        return None
    cotangent, x = structure.wide_cotangent, structure.x
    cotangents = torch.einsum("vngo,vmgo->gnm", cotangent[:, :, 0], cotangent[:, :, 0])
    inputs = torch.einsum("ngi,mgi->gnm", x[:, 0], x[:, 0])
    return (cotangents * inputs).sum(0)


# NOTE [Tables by their rows]
#
# A sample looks up few rows of a large table, and its gradient is zero in all others. So the cells add up the
# cotangents of a sample that belong to one row, and use only these sums: they form no table for a sample. They
# do not apply to a table that has no more rows than a sample looks up.


@fast_cell("sq_norm", Lookup)
def _lookup_sq_norm(structure: Lookup) -> Tensor | None:
    """Add up squares of the gradients of rows; see NOTE [Tables by their rows]."""
    return square_norms(structure.by_row[0].flatten(2)).sum(0) if structure.is_large else None


@fast_cell("sum_sq", Lookup)
def _lookup_sum_sq(structure: Lookup) -> Tensor | None:
    """Add squares of the gradients of rows to an empty table; see NOTE [Tables by their rows]."""
    return structure.added_up(structure.by_row[0].square().sum(0)) if structure.is_large else None


@fast_cell("moments", Lookup)
def _lookup_moments(structure: Lookup) -> Moments | None:
    """Add up deviations of the rows that a sample looks up; in every other row, the deviation is the mean.

    See NOTE [Tables by their rows].
    """
    if not structure.is_large:
        return None
    (gradients, *_), is_first = structure.by_row
    samples = len(structure.index)
    mean = structure.added_up(gradients) / samples
    deviations = torch.where(is_first[..., None], (gradients - mean[structure.index]).square(), 0.0)
    looked_up = structure.added_up(is_first[..., None].to(mean.dtype))
    deviation = structure.added_up(deviations) + (samples - looked_up) * mean.square()
    return Moments(samples, mean, deviation)


@fast_cell("sq_norm", Tied)
def _tied_sq_norm(structure: Tied) -> Tensor | None:
    """Add both norms, and twice their inner product: look-ups meet single rows of the other gradient."""
    outer, lookup = structure.parts
    if structure.formed or not norms_by_products(outer.extents):
        return None
    of_rows, wide = lookup.wide_cotangent, _products_dtype(outer.factors[0])
    cotangent, of_rows = outer.given_cotangent.to(wide), of_rows.to(wide)
    if wide != outer.extents.dtype:
        outer = replace(outer, given=outer.x.to(wide), cotangent=cotangent, direct=None, inner=None)
    mapped, looked = _outer_sq_norm(outer), _lookup_sq_norm(replace(lookup, cotangent=of_rows))
    if mapped is None or looked is None:
        return None
    inputs = torch.einsum("nsi,vnti->vnst", outer.x[:, :, 0], of_rows)
    cotangent = cotangent[:, :, :, 0]
    index = lookup.index[None, :, None, :].expand(*cotangent.shape[:3], -1)
    both = (inputs * cotangent.gather(3, index)).sum((0, 2, 3))
    norms: Tensor = mapped + looked + 2 * both
    return at_least(norms, 0.0).to(structure.parts[0].extents.dtype)


def _blocks(count: int, step: int) -> list[slice]:
    """Return slices of an axis, ``step`` indices in each."""
    return [slice(start, start + step) for start in chunk_starts(count, step)]
