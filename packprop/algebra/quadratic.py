"""Sums over rows that are products of two sets of columns, or diagonals already."""

from __future__ import annotations

import torch
from torch import Tensor

from packprop.algebra.cells import summed_products
from packprop.algebra.structures import (
    Outer,
    Product,
    Structure,
    rows,
)


def row_sum(structure: Structure) -> Tensor:
    """Rows summed over columns and samples, which an affine use need not form ``[*p]``."""
    if isinstance(structure, Outer) and structure.cotangent is not None:
        return structure.fold(torch.einsum("vnsgo,nsgi->goi", structure.cotangent, structure.x))
    return rows(structure).sum((0, 1))


def product_sum(structure: Product) -> Tensor:
    """Products of rows, summed over columns and samples ``[*p]``."""
    cotangents = _cotangent_products(structure)
    if cotangents is None:
        return _row_product_sum(structure)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(summed_products(cotangents, outer.x.squeeze(1).square()))


def _row_product_sum(structure: Product) -> Tensor:
    left, weights = rows(structure.left), structure.weights
    if weights is None or structure.right is not None:
        return structure.products.sum((0, 1))
    squares = left.square().reshape(weights.numel(), -1)  # one matrix product adds them up
    return (weights.reshape(1, -1) @ squares).reshape(left.shape[2:])


def product_batch_sum(structure: Product) -> Tensor:
    """Products of rows, summed over columns ``[n, *p]``."""
    cotangents = _cotangent_products(structure)
    if cotangents is None:
        return structure.products.sum(0)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(cotangents[..., None] * outer.x[:, 0, :, None, :].square())


def _cotangent_products(structure: Product) -> Tensor | None:
    """Products of cotangents where no positions are shared, summed over columns ``[n, g, o]``."""
    left, right = structure.left, structure.left if structure.right is None else structure.right
    if not isinstance(left, Outer) or not isinstance(right, Outer):
        return None
    assert left.cotangent is not None
    assert right.cotangent is not None
    if left.cotangent.shape[2] != 1:
        return None
    cotangents = left.cotangent[:, :, 0] * right.cotangent[:, :, 0]
    return (
        cotangents.sum(0)
        if structure.weights is None
        else torch.einsum("vngo,vn->ngo", cotangents, structure.weights)
    )
