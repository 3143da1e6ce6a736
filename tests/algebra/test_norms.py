"""Norms of gradients whose positions cancel: never negative, and not wrong by their own size."""

from __future__ import annotations

import pytest
import torch

from packprop.engine.algebra.choices import algorithms
from packprop.engine.algebra.joining import join
from packprop.engine.algebra.kernels import norms_of
from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.statistics import sq_norm
from packprop.engine.algebra.structures import Lookup, Outer, Tied, rows


def cancelling(*shape: int) -> torch.Tensor:
    """Cotangents ``[1, n, s, o]`` that nearly add up to zero over positions."""
    cotangent = 1000 * torch.randn(shape)
    return cotangent - cotangent.mean(2, keepdim=True) + 1e-4 * torch.randn(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_affine_use(dtype: torch.dtype) -> None:
    """All positions have nearly the same input, and cotangents of sum zero."""
    x = (1 + 1e-5 * torch.randn(64, 6, 1, 40)).to(dtype).float()
    cotangent = cancelling(1, 64, 6, 30).unsqueeze(3).to(dtype).float()
    structure = Outer(x, cotangent, fold_to(torch.Size([30, 40])))
    right = torch.einsum("vnsgo,nsgi->noi", cotangent.double(), x.double()).flatten(1).square().sum(1)
    with algorithms(norms="products"):
        norms = sq_norm(structure)
    assert norms.dtype == torch.float32
    assert (norms >= 0).all()
    torch.testing.assert_close(norms.double(), right, rtol=1e-4, atol=0.0)


def test_a_table() -> None:
    """One row is looked up at all positions of a sample."""
    cotangent = cancelling(1, 64, 6, 30)
    index = torch.randint(3, (64, 1)).expand(64, 6)
    norms = sq_norm(Lookup(index, cotangent, 3, torch.float32))
    right = cotangent.double().sum(2).square().sum(2)[0]
    gradients = cotangent.sum(2).square().sum(2)[0]  # as accurate as single precision is
    assert (norms >= 0).all()
    assert ((norms - right).abs() <= 2 * (gradients - right).abs().max()).all()


def test_a_table_of_repeated_rows() -> None:
    """Only positions that looked up the same row are added up, in every column."""
    cotangent, index = torch.randn(2, 5, 7, 4).double(), torch.randint(3, (5, 7))
    structure = Lookup(index, cotangent, 3, torch.float64)
    table = torch.zeros(2, 5, 3, 4).double()
    for sample in range(5):
        for position in range(7):
            table[:, sample, index[sample, position]] += cotangent[:, sample, position]
    torch.testing.assert_close(sq_norm(structure), table.square().sum((0, 2, 3)))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("positions", [(1, 1), (1, 4), (5, 4)], ids=str)
def test_a_table_that_is_a_head(columns: int, positions: tuple[int, int]) -> None:
    """Cross terms between look-ups and the affine map, without a table for each sample."""
    looked, mapped = positions
    index = torch.randint(7, (3, looked))
    structure = join(
        [
            Outer(
                torch.randn(3, mapped, 1, 5), torch.randn(columns, 3, mapped, 1, 7), fold_to(torch.Size([7, 5]))
            ),
            Lookup(index, torch.randn(columns, 3, looked, 5), 7, torch.float32),
        ]
    )
    assert isinstance(structure, Tied)
    with algorithms(norms="products"):
        norms = sq_norm(structure)
    assert not structure.formed
    torch.testing.assert_close(norms, rows(structure).square().sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_a_table_that_is_a_head_and_cancels() -> None:
    """What the head adds is what the look-ups take away."""
    x, cotangent = torch.randn(4, 6, 1, 5), torch.randn(1, 4, 6, 1, 7)
    gradient = torch.einsum("vnsgo,nsgi->vnoi", cotangent, x)
    index = torch.arange(7).expand(4, 7)
    structure = Tied(
        (Outer(x, cotangent, fold_to(torch.Size([7, 5]))), Lookup(index, -gradient, 7, torch.float32))
    )
    with algorithms(norms="products"):
        norms = sq_norm(structure)
    assert (norms >= 0).all()
    assert (norms <= 1e-9 * gradient.square().sum()).all()


@pytest.mark.parametrize("products", ["batched", "single"])
def test_a_large_weight(products: str) -> None:
    """The squares of two million entries are not added up one after the other."""
    x, cotangent = torch.randn(2, 5, 1, 1100) ** 3, torch.randn(1, 2, 5, 1, 2000) ** 3
    structure = Outer(x, cotangent, fold_to(torch.Size([2000, 1100])))
    right = torch.einsum("vnsgo,nsgi->noi", cotangent.double(), x.double()).flatten(1).square().sum(1)
    with algorithms(norms="gradients", products=products):
        norms = sq_norm(structure)
    assert torch.allclose(norms.double(), right, rtol=1e-6, atol=0)


def test_long_rows() -> None:
    """Rows of any length, the empty one too."""
    for length in (0, 1, 4096, 4097, 8192, 4096 * 4097 + 3):
        row = torch.randn(length)
        assert torch.allclose(norms_of(row).double(), row.double().norm(), rtol=1e-6, atol=0)
