"""Fast cells: statistics of one structure that need no per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.algorithms import choose_algorithm
from packprop.algebra.kernels import (
    Extents,
    convolved_by_groups,
    square_norms,
    squared_products,
)
from packprop.algebra.monoid import Moments
from packprop.algebra.structures import (
    Lookup,
    Outer,
)
from packprop.tensors.device import device_kind
from packprop.tensors.dry import is_dry_run

Cell = Callable[..., Any]


IN_CACHE = 2**16
"""Entries of a temporary matrix that is best made and used up before it leaves the cache."""


FAST_CELLS: dict[str, dict[type, Cell]] = {}


def fast_cell(statistic: str, structure: type) -> Callable[[Cell], Cell]:
    """Register a faster way for one structure; it returns ``None`` where it does not apply."""

    def register(cell: Cell) -> Cell:
        FAST_CELLS.setdefault(statistic, {})[structure] = cell
        return cell

    return register


def norms_by_products(extents: Extents) -> bool:
    """Whether norms of per-sample gradients of an affine use are best had without forming these.

    Products over pairs of positions take ``s^2 (i + o)`` multiplications, gradients ``s i o``. The latter
    also add up to the summed gradient, which need not be computed again, so they win from half of that on.
    """
    positions, groups, fan_in, fan_out = extents[:4]
    if positions == 1:
        return True
    few = 2 * positions * (fan_in + fan_out) <= fan_in * fan_out
    inputs = 0 if convolved_by_groups(extents) else extents.unfolded
    size = extents.dtype.itemsize
    holds = {
        "gradients": size * (groups * fan_in * fan_out + inputs),
        "products": size * (2 * groups * positions**2 + extents.unfolded),
    }
    return choose_algorithm("norms", "products" if few else "gradients", holds, extents.held) == "products"


@fast_cell("sum_sq", Outer)
def _outer_sum_sq(structure: Outer) -> Tensor | None:
    """Without shared positions the square of a product is the product of squares: one matrix product."""
    assert structure.cotangent is not None
    columns, _, positions, groups, fan_out = structure.cotangent.shape
    if positions != 1:
        if structure.formed or structure.by_groups or groups != 1:
            return None
        total = squared_products(*structure.matrices).unflatten(0, (columns, fan_out)).sum(0)
        return to_parameter(structure, total)
    squares = structure.cotangent.squeeze(2).square().sum(0)
    return structure.fold(summed_products(squares, structure.x.squeeze(1).square()))


def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """``[n, g, o]`` times ``[n, g, i]``, summed over samples: ``[g, o, i]``."""
    return torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1))


@fast_cell("batch_sq", Outer)
def _outer_batch_sq(structure: Outer) -> Tensor | None:
    """As in ``sum_sq``: columns are summed before the products are formed."""
    assert structure.cotangent is not None
    if structure.cotangent.shape[2] != 1:
        return None
    squares = structure.cotangent[:, :, 0].square().sum(0)
    return structure.fold(squares[..., None] * structure.x[:, 0, :, None, :].square())


@fast_cell("sq_norm", Outer)
def _outer_sq_norm(structure: Outer) -> Tensor | None:
    """Inner products over positions, where these are few (Goodfellow 2015)."""
    cotangent = structure.cotangent
    assert cotangent is not None
    positions = cotangent.shape[2]
    if structure.formed or not norms_by_products(structure.extents):
        return None
    x = structure.x
    if positions == 1:
        return (square_norms(cotangent.squeeze(2)).sum(0) * square_norms(x.squeeze(1))).sum(1)
    inputs = torch.einsum("nsgi,ntgi->ngst", x, x)
    cotangents = torch.einsum("vnsgo,vntgo->ngst", cotangent, cotangent)
    return torch.einsum("ngst,ngst->n", inputs, cotangents)


@fast_cell("moments", Outer)
def _outer_moments(structure: Outer) -> Moments | None:
    """Without shared positions: from matrix products in a wider precision, a block of outputs at a time.

    The mean is taken off after squares were summed up, and what cancels then are digits that gradients of
    single samples would not have had: rounding these to ``dtype`` is off by more than the sum in double
    precision.
    """
    cotangent = structure.cotangent
    assert cotangent is not None
    _, samples, positions, groups, fan_out = cotangent.shape
    wide = wider_dtype(cotangent.dtype, device_kind(cotangent))
    if positions != 1 or structure.formed or wide is None or torch.is_grad_enabled():
        return None
    left, right = cotangent[0, :, 0].permute(1, 2, 0), structure.x[:, 0].transpose(0, 1).to(wide)
    squares = right.square()
    mean = cotangent.new_empty(groups, fan_out, right.shape[2])
    deviation = torch.empty_like(mean)
    for some in _blocks(fan_out, groups * right.shape[2]):
        part = left[:, some].to(wide)
        sums = part @ right
        mean[:, some] = sums / samples
        deviation[:, some] = (part.square() @ squares).addcmul_(sums, sums, value=-1 / samples).clamp_min_(0)
    return Moments(samples, structure.fold(mean), structure.fold(deviation))


def wider_dtype(dtype: torch.dtype, device: str) -> torch.dtype | None:
    """A precision with twice the digits, where there is one."""
    return torch.float64 if dtype == torch.float32 and device != "mps" else None


def _blocks(count: int, width: int) -> list[slice]:
    """Parts of an axis, such that ``width`` entries for each of a part stay in a processor's cache."""
    step = max(1, IN_CACHE // width)
    blocks = [slice(start, start + step) for start in range(0, count, step)]
    return blocks[:3] if is_dry_run() else blocks


@fast_cell("gram", Outer)
def _outer_gram(structure: Outer) -> Tensor | None:
    """The Gram matrix of outer products is the product of two Gram matrices."""
    cotangent, x = structure.cotangent, structure.x
    assert cotangent is not None
    if cotangent.shape[2] != 1:
        return None
    cotangents = torch.einsum("vngo,vmgo->gnm", cotangent[:, :, 0], cotangent[:, :, 0])
    inputs = torch.einsum("ngi,mgi->gnm", x[:, 0], x[:, 0])
    return (cotangents * inputs).sum(0)


@fast_cell("sq_norm", Lookup)
def _lookup_sq_norm(structure: Lookup) -> Tensor | None:
    """Only positions that looked up the same row meet: no table of size ``rows`` for each sample."""
    cotangent = structure.cotangent
    assert cotangent is not None
    same = structure.index[:, :, None] == structure.index[:, None, :]
    products = torch.einsum("vnso,vnto->nst", cotangent, cotangent)
    return (products * same).sum((1, 2))


def to_parameter(structure: Outer, matrix: Tensor) -> Tensor:
    """``[o, i] -> [*p]``."""
    return structure.fold(matrix.unsqueeze(-3))
