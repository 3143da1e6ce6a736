"""Sums over rows that are products of two sets of columns, or diagonals already."""

from __future__ import annotations

import torch
from torch import Tensor

from packprop.algebra.cells import _summed_products
from packprop.algebra.structures import (
    Outer,
    Product,
    Structure,
    rows,
)


def _row_sum(structure: Structure) -> Tensor:
    """Rows summed over columns and samples, which an affine use need not form ``[*p]``."""
    if isinstance(structure, Outer) and structure.signal is not None:
        return structure.fold(torch.einsum("vnsgo,nsgi->goi", structure.signal, structure.x))
    return rows(structure).sum((0, 1))


def _product_sum(structure: Product) -> Tensor:
    signals = _signal_products(structure)
    if signals is None:
        return _row_product_sum(structure)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(_summed_products(signals, outer.x.squeeze(1).square()))


def _row_product_sum(structure: Product) -> Tensor:
    left, weights = rows(structure.left), structure.weights
    if weights is None or structure.right is not None:
        return structure.products.sum((0, 1))
    squares = left.square().reshape(weights.numel(), -1)  # one matrix product adds them up
    return (weights.reshape(1, -1) @ squares).reshape(left.shape[2:])


def _product_batch_sum(structure: Product) -> Tensor:
    signals = _signal_products(structure)
    if signals is None:
        return structure.products.sum(0)
    outer = structure.left
    assert isinstance(outer, Outer)
    return outer.fold(signals[..., None] * outer.x[:, 0, :, None, :].square())


def _signal_products(structure: Product) -> Tensor | None:
    """Products of the signals of an affine use without shared positions, summed over columns ``[n, g, o]``."""
    left, right = structure.left, structure.left if structure.right is None else structure.right
    if not isinstance(left, Outer) or not isinstance(right, Outer):
        return None
    assert left.signal is not None
    assert right.signal is not None
    if left.signal.shape[2] != 1:
        return None
    signals = left.signal[:, :, 0] * right.signal[:, :, 0]
    return (
        signals.sum(0)
        if structure.weights is None
        else torch.einsum("vngo,vn->ngo", signals, structure.weights)
    )
