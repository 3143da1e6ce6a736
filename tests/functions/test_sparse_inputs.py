"""Sparse inputs of layers: packprop calls these products for each sample, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import PackpropError, extensions
from packprop.types import Extension
from tests.references.running import assert_near

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear, COO": lambda x, w: F.linear(x.to_sparse(), w),
    "linear, CSR": lambda x, w: F.linear(x.to_sparse_csr(), w),
    "matmul": lambda x, w: x.to_sparse() @ w.T,
    "bmm": lambda x, w: torch.bmm(torch.stack([x, x]).to_sparse(), torch.stack([w.T, w.T])).sum(0) / 2,
    "sparse.mm": lambda x, w: torch.sparse.mm(x.to_sparse(), w.T),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_and_curvature(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4).relu().double(), torch.tensor([0, 1, 2, 1, 0])

    def passed(extension: Extension, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4))
        loss = F.cross_entropy(product(x, weight), y)
        with packprop.backpack(extension):
            loss.backward()
        value: Tensor = getattr(weight, extension.savefield)
        return value

    for extension in (extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.DiagGGNExact()):
        assert_near(passed(extension, PRODUCTS[name]), passed(extension, F.linear), name, 1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "sparse.mm"])  # a node of its own
def test_sparse_inputs_in_checkpoints_are_refused(name: str) -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    x = torch.ones(5, 4)
    loss = F.cross_entropy(checkpoint(PRODUCTS[name], x, weight, use_reentrant=False), torch.arange(5) % 3)
    with pytest.raises(PackpropError, match="in a checkpoint"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_other_functions_of_sparse_inputs_are_refused() -> None:
    weight = nn.Parameter(torch.ones(5, 4))
    loss = F.mse_loss((torch.ones(5, 4).to_sparse() * weight).to_dense(), torch.zeros(5, 4))
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.DiagGGNExact()):
        loss.backward()
    assert caught.value.where == "MulBackward0"  # and not in a checkpoint
    assert "products of matrices alone" in caught.value.why
