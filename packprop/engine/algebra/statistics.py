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
from packprop.engine.algebra.choices import Extents, norms_by_products
from packprop.engine.algebra.kernels import square_norms, sum_of_squares, summed_products, wide_product
from packprop.engine.algebra.monoid import Moments
from packprop.engine.algebra.order import EntryOrder
from packprop.engine.algebra.structures import (
    ByToken,
    Dense,
    Diagonal,
    Lookup,
    Outer,
    Product,
    Quadratic,
    Structure,
    Tied,
    entry_order_of,
    rows,
)
from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.traced import is_traced


def product_sum(structure: Product) -> Tensor:
    """Sum products of rows over columns and samples ``[*p]``."""
    outer, cotangents = structure.left, _cotangent_products(structure)
    if cotangents is None or not isinstance(outer, Outer):
        return _row_product_sum(structure)
    return outer.fold(summed_products(cotangents, outer.x.square()))


def product_batch_sum(structure: Product) -> Tensor:
    """Sum products of rows over columns ``[n, *p]``."""
    outer, cotangents = structure.left, _cotangent_products(structure)
    if cotangents is None or not isinstance(outer, Outer):
        return structure.products.sum(0)
    return outer.fold(cotangents[..., None] * outer.x[:, 0, :, None, :].square())


def diagonal_sum(structure: Diagonal) -> Tensor:
    """Sum diagonals over samples ``[*p]``; an affine use forms no diagonals of single samples."""
    source = structure.source
    if isinstance(source, Outer) and source.cotangent is not None:
        return source.fold(torch.einsum("vnsgo,nsgi->goi", source.wide_cotangent, source.x))
    return rows(source).sum((0, 1))


def _row_product_sum(structure: Product) -> Tensor:
    """Compute ``product_sum`` from the rows themselves."""
    left, weights = rows(structure.left), structure.weights
    if weights is None or structure.right is not None:
        return structure.products.sum((0, 1))
    squares = left.square().reshape(weights.numel(), -1)  # one matrix product weights and adds them
    return (weights.reshape(1, -1) @ squares).reshape(left.shape[2:])


def _cotangent_products(structure: Product) -> Tensor | None:
    """Sum products of cotangents over columns ``[n, g, o]``; return ``None`` if positions are shared."""
    left, right = structure.left, structure.left if structure.right is None else structure.right
    if not isinstance(left, Outer) or not isinstance(right, Outer):
        return None
    if left.wide_cotangent.shape[2] != 1:
        return None
    products = left.wide_cotangent[:, :, 0] * right.wide_cotangent[:, :, 0]
    if structure.weights is None:
        return products.sum(0)
    return torch.einsum("vngo,vn->ngo", products, structure.weights)


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
        cotangent, x = structure.factors
        left = cotangent[0].flatten(0, 1).permute(1, 2, 0)  # g o (n s)
        return structure.fold(wide_product(left, x.flatten(0, 1).transpose(0, 1)))
    if isinstance(structure, Lookup) and not structure.formed and structure.cotangent is not None:
        return structure.added_up(structure.cotangent[0])
    return summed_grad(structure)


def sum_sq(structure: Quadratic) -> Tensor:
    """Sum squares of per-sample gradients (or products, or diagonals) over columns and samples ``[*p]``."""
    if isinstance(structure, Diagonal):
        return diagonal_sum(structure)
    if isinstance(structure, Product):
        return product_sum(structure)
    fast = _fast("sum_sq", structure)
    return sum_of_squares(rows(structure), axes=2) if fast is None else fast


def batch_sq(structure: Quadratic) -> Tensor:
    """Sum squares of per-sample gradients (or products, or diagonals) over columns, ``[n, *p]``."""
    if isinstance(structure, Diagonal):
        return rows(structure.source)[0]
    if isinstance(structure, Product):
        return product_batch_sum(structure)
    fast = _fast("batch_sq", structure)
    return rows(structure).square().sum(0) if fast is None else fast


def sq_norm(structure: Structure) -> Tensor:
    """Return squared norms of per-sample gradients, summed over columns, ``[n]``."""
    fast: Tensor | None = _fast("sq_norm", structure)
    if fast is not None:
        return fast
    norms = square_norms(flat_rows(structure))
    return norms.squeeze(0) if norms.shape[0] == 1 else norms.sum(0)


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
    if isinstance(structure, Dense) or structure.formed or structure.cotangent is None:
        return (flat_rows(structure)[0] @ direction.flatten().to(rows(structure).dtype)).to(direction.dtype)
    cotangent = structure.wide_cotangent
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

    If a weight is shared over positions, it costs as much to form the gradients as to take one direction
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
    samples = gradients.shape[0]
    if device_kind(gradients) != "cpu" and not (torch.is_grad_enabled() or is_traced()):
        variance, mean = torch.var_mean(gradients, 0, correction=0)  # one kernel, which reads each entry once
        return Moments(samples, mean, variance.mul_(samples))
    mean = summed_grad(structure) / samples
    return Moments(samples, mean, sum_of_squares(gradients, mean))


def flat_rows(structure: Structure) -> Tensor:
    """Return per-sample gradients with all entries of the parameter on one axis, ``[v, n, p]``."""
    gradients = rows(structure)
    return gradients.reshape(*gradients.shape[:2], gradients.shape[2:].numel())


def _fast(statistic: str, structure: Structure) -> Any:
    """Return the value of the fast cell, if there is one for the structure and it applies; else ``None``."""
    cell = FAST_CELLS.get(statistic, {}).get(type(structure))
    return None if cell is None else cell(structure)


def token_grads(structure: ByToken) -> Tensor:
    """Return gradients of single tokens, one column each, ``[t, n, *p]``."""
    return rows(structure.source)


def token_sum_sq(structure: ByToken) -> Tensor:
    """Sum squares of gradients of tokens over columns, tokens and samples ``[*p]``."""
    return sum_sq(structure.source)


def token_moments(structure: ByToken) -> Moments:
    """Return number, mean and summed squared deviation of the gradients of tokens that count, one column each.

    All other tokens have rows of zeros, which add nothing to the mean.
    """
    gradients = rows(structure.source).flatten(0, 1)
    counts = structure.counted.to(gradients.dtype)
    number = counts.sum()
    mean = gradients.sum(0) / number.clamp(min=1)
    deviations = (gradients - mean) * counts.reshape(-1, *[1] * mean.dim())
    return Moments(number, mean, deviations.square().sum(0))


def token_along(structure: ByToken, directions: Mapping[str, Tensor], name: str, shape: object) -> Tensor:
    """Return inner products of gradients of tokens, one column each, with several directions ``[t, n, q]``.

    Args:
        structure: Structure of the parameter.
        directions: The directions ``[q, *p]`` by name of the parameter.
        name: Name of the parameter.
        shape: Its shape, which the directions have already.
    """
    products = torch.stack([along(structure.folded, [each]) for each in directions[name]], -1)
    by_token: Tensor = products.unflatten(0, (structure.tokens, -1))
    return by_token


def _by_token(statistic: Statistic) -> Callable[[ByToken], Tensor]:
    """Turn a statistic ``[n, ...]`` of the samples into one of their tokens ``[t, n, ...]``."""

    def of_tokens(structure: ByToken) -> Tensor:
        value: Tensor = statistic(structure.folded)
        by_token: Tensor = value.unflatten(0, (structure.tokens, -1))
        return by_token

    return of_tokens


token_sq_norm = _by_token(sq_norm)
"""Squared norms of gradients of tokens, summed over columns, ``[t, n]``."""

token_batch_sq = _by_token(batch_sq)
"""Squares of gradients of tokens, summed over columns, ``[t, n, *p]``."""


OF_TOKENS = (token_grads, token_sum_sq, token_batch_sq, token_sq_norm, token_moments, token_along)
"""Statistics that are functions of the gradients of single tokens."""

BY_FACTORS = (total_grad, along, along_each, sum_sq, batch_sq, sq_norm, moments)
"""Statistics that are both in ``OF_ROWS`` and in ``FACTORED``."""

OF_ROWS = frozenset({per_sample_grad, summed_grad, gram, *BY_FACTORS, *OF_TOKENS})
"""Statistics that are functions of per-sample gradients, whatever structure these come from."""

WITHOUT_TABLES = frozenset({total_grad, sum_sq, sq_norm, moments})
"""Statistics of a table that form no table for a sample; see NOTE [Tables by their rows] (``cells.py``)."""

LINEAR = (per_sample_grad, token_grads, summed_grad, total_grad, entry_order_of)
"""Statistics that multiply no two gradients, so they also exist for complex parameters."""


def forms_rows(statistic: Statistic, extents: Extents) -> bool:
    """Tell whether a statistic of an affine use with shared positions forms per-sample gradients."""
    if extents.positions == 1:
        return False
    if statistic is sq_norm:
        return not norms_by_products(extents)
    return statistic in (per_sample_grad, sum_sq, batch_sq, moments, gram)
