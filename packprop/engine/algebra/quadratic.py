"""``sum_sq`` and ``batch_sq`` of a ``Product`` of two sets of columns, or of a ``Diagonal``."""

from __future__ import annotations

import torch
from torch import Tensor

from packprop.engine.algebra.kernels import summed_products
from packprop.engine.algebra.structures import Diagonal, Outer, Product, rows


def product_sum(structure: Product) -> Tensor:
    """Sum products of rows over columns and samples ``[*p]``."""
    cotangents = _cotangent_products(structure)
    if cotangents is None:
        return _row_product_sum(structure)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(summed_products(cotangents, outer.x.squeeze(1).square()))


def product_batch_sum(structure: Product) -> Tensor:
    """Sum products of rows over columns ``[n, *p]``."""
    cotangents = _cotangent_products(structure)
    if cotangents is None:
        return structure.products.sum(0)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(cotangents[..., None] * outer.x[:, 0, :, None, :].square())


def diagonal_sum(structure: Diagonal) -> Tensor:
    """Sum diagonals over samples ``[*p]``; an affine use need not form those of single samples."""
    source = structure.source
    if isinstance(source, Outer) and source.cotangent is not None:
        return source.fold(torch.einsum("vnsgo,nsgi->goi", source.cotangent, source.x))
    return rows(source).sum((0, 1))


def diagonal_batch(structure: Diagonal) -> Tensor:
    """Return the diagonal of each sample ``[n, *p]``."""
    return rows(structure.source)[0]


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
    assert left.cotangent is not None
    assert right.cotangent is not None
    if left.cotangent.shape[2] != 1:
        return None
    products = left.cotangent[:, :, 0] * right.cotangent[:, :, 0]
    if structure.weights is None:
        return products.sum(0)
    return torch.einsum("vngo,vn->ngo", products, structure.weights)
