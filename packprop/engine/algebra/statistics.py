"""Statistics of a structure: each has a default through per-sample gradients, and perhaps faster cells.

Every statistic takes one structure, of some samples and some columns, and returns its partial result.
Only ``per_sample_grad`` is required; the rest are derived from it. A fast cell (``cells.py``) is a function
registered for one structure; the law "fast cell equals default" is tested for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.cells import FAST_CELLS
from packprop.engine.algebra.kernels import square_norms, sum_of_squares
from packprop.engine.algebra.monoid import Moments
from packprop.engine.algebra.order import EntryOrder
from packprop.engine.algebra.quadratic import diagonal_batch, diagonal_sum, product_batch_sum, product_sum
from packprop.engine.algebra.structures import (
    Dense,
    Diagonal,
    Lookup,
    Outer,
    Product,
    Quadratic,
    Structure,
    Tied,
    rows,
)

Statistic = Callable[..., Any]


def per_sample_grad(structure: Structure) -> Tensor:
    """Return gradients of single samples, ``[v, n, *p]``."""
    return rows(structure)


def summed_grad(structure: Structure) -> Tensor:
    """Return the gradient of one column, summed over samples, ``[*p]``."""
    return structure.total if isinstance(structure, Outer) else rows(structure)[0].sum(0)


def total_grad(structure: Structure) -> Tensor:
    """Compute ``summed_grad`` by one product over samples and positions: it forms no sample's gradient."""
    if isinstance(structure, Tied) and not structure.formed:
        return total_grad(structure.parts[0]) + total_grad(structure.parts[1])
    if isinstance(structure, Outer) and not structure.formed and structure.cotangent is not None:
        left = structure.cotangent[0].flatten(0, 1).permute(1, 2, 0)  # g o (n s)
        return structure.fold(left @ structure.x.flatten(0, 1).transpose(0, 1))
    if isinstance(structure, Lookup) and not structure.formed and structure.cotangent is not None:
        cotangent = structure.cotangent[0].flatten(0, 1)
        table = cotangent.new_zeros(structure.entries, cotangent.shape[1])
        return table.index_add(0, structure.index.flatten(), cotangent)
    return summed_grad(structure)


def sum_sq(structure: Quadratic) -> Tensor:
    """Sum squares of per-sample gradients (or products, or diagonals) over columns and samples ``[*p]``."""
    if isinstance(structure, Diagonal):
        return diagonal_sum(structure)
    if isinstance(structure, Product):
        return product_sum(structure)
    fast = _fast("sum_sq", structure)
    return sum_of_squares(rows(structure).flatten(0, 1)) if fast is None else fast


def batch_sq(structure: Quadratic) -> Tensor:
    """Sum squares of per-sample gradients (or products, or diagonals) over columns, ``[n, *p]``."""
    if isinstance(structure, Diagonal):
        return diagonal_batch(structure)
    if isinstance(structure, Product):
        return product_batch_sum(structure)
    fast = _fast("batch_sq", structure)
    return rows(structure).square().sum(0) if fast is None else fast


def sq_norm(structure: Structure) -> Tensor:
    """Return squared norms of per-sample gradients, summed over columns, ``[n]``."""
    fast = _fast("sq_norm", structure)
    return square_norms(flat_rows(structure)).sum(0) if fast is None else fast


def gram(structure: Structure) -> Tensor:
    """Return inner products of per-sample gradients, summed over columns, ``[n, n]``."""
    fast: Tensor | None = _fast("gram", structure)
    if fast is not None:
        return fast
    flat = flat_rows(structure)
    return torch.einsum("vnp,vmp->nm", flat, flat)


def along(structure: Structure, first: Sequence[Any]) -> Tensor:
    """Return inner products of per-sample gradients of one column with a direction, ``[n]``.

    Args:
        structure: Structure of a parameter.
        first: The results of the first pass. The first of them is the direction ``[*p]``, the rest are ignored.
    """
    if isinstance(structure, Tied) and not structure.formed:
        one, other = (along(part, first) for part in structure.parts)
        return one + other
    direction: Tensor = first[0]
    cotangent = None if isinstance(structure, Dense) or structure.formed else structure.cotangent
    if cotangent is None:
        return (flat_rows(structure)[0] @ direction.flatten().to(rows(structure).dtype)).to(direction.dtype)
    direction = direction.to(cotangent.dtype)
    if isinstance(structure, Outer) and structure.inner is not None:
        return structure.inner(direction).to(first[0].dtype)
    if isinstance(structure, Lookup):
        images = direction.reshape(structure.entries, -1)[structure.index]  # n s o
    else:
        assert isinstance(structure, Outer)
        groups, fan_out = cotangent.shape[3:]
        order = EntryOrder(structure.fold, (groups, fan_out, structure.shape[3]))
        matrices = order.to_matrices(direction[None]).reshape(groups, fan_out, -1)
        images = torch.einsum("nsgi,goi->nsgo", structure.x, matrices)
    return (images * cotangent[0]).flatten(1).sum(1, dtype=first[0].dtype)


def along_each(structure: Structure, directions: Mapping[str, Tensor], name: str, shape: object) -> Tensor:
    """Return inner products of per-sample gradients of one column with several directions, ``[n, d]``.

    Where a weight is shared over positions, forming the gradients costs as much as one direction takes
    without them.

    Args:
        structure: Structure of a parameter.
        directions: The directions ``[d, *p]`` by name of the parameter.
        name: Name of the parameter.
        shape: Its shape, which the directions have already.
    """
    given = directions[name]
    if isinstance(structure, Tied) and not structure.formed:
        one, other = (along_each(part, directions, name, shape) for part in structure.parts)
        return one + other
    if len(given) > 1 and isinstance(structure, Outer) and structure.shape[1] > 1:
        gradients = flat_rows(structure)[0]
        return (gradients @ given.flatten(1).to(gradients.dtype).mT).to(given.dtype)
    return torch.stack([along(structure, [each]) for each in given], -1)


def moments(structure: Structure) -> Moments:
    """Return count, mean and summed squared deviation of per-sample gradients of one column, ``[*p]`` each."""
    fast: Moments | None = _fast("moments", structure)
    if fast is not None:
        return fast
    gradients = rows(structure)[0]
    mean = summed_grad(structure) / gradients.shape[0]
    return Moments(gradients.shape[0], mean, sum_of_squares(gradients, mean))


def flat_rows(structure: Structure) -> Tensor:
    """Return per-sample gradients with all entries of the parameter on one axis, ``[v, n, p]``."""
    gradients = rows(structure)
    return gradients.reshape(*gradients.shape[:2], gradients.shape[2:].numel())


def _fast(statistic: str, structure: Structure) -> Any:
    """Return the value of the fast cell, if there is one for the structure and it applies; else ``None``."""
    cell = FAST_CELLS.get(statistic, {}).get(type(structure))
    return None if cell is None else cell(structure)
