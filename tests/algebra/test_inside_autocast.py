"""Algebra inside a region of autocast, which would round products of matrices to sixteen bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions, kronecker, operators
from packprop.engine.algebra.coupled import coupled
from tests.references.running import assert_near


class Quantities:
    """What one pass saved for the weight of a layer, and vectors for it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = packprop.extend(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))
        self.x, self.y = torch.randn(9, 6), torch.randint(0, 5, (9,))
        self.weight: Any = self.model[0].weight
        self.bias: Any = self.model[0].bias
        made = extensions.KFLR(), extensions.EKFAC(generator=torch.Generator()), extensions.PCHMP()
        with packprop.backpack(*made):
            F.cross_entropy(self.model(self.x), self.y).backward()
        outputs = self.model(self.x)
        self.ggn = operators.ggn((outputs, F.cross_entropy(outputs, self.y)), [self.weight], damping=0.1)
        self.vectors = torch.randn(2, 8, 6)


def of_weight_and_bias(of: Quantities) -> Tensor:
    both = coupled(of.weight.ekfac, of.bias.ekfac, 0.1)
    assert both is not None
    return torch.cat([each.flatten(1) for each in both.solve(of.vectors, of.vectors[..., 0])], 1)


CALLS: dict[str, Callable[[Quantities], Tensor]] = {
    "solve-list": lambda of: kronecker.solve(of.weight.kflr, of.vectors, 0.1),
    "solve-eigen": lambda of: kronecker.solve(of.weight.ekfac, of.vectors, 0.1),
    "multiply": lambda of: kronecker.multiply(of.weight.kflr, of.vectors),
    "dense": lambda of: kronecker.dense(of.weight.ekfac),
    "weight-and-bias": of_weight_and_bias,
    "conjugate-gradients": lambda of: operators.solve(of.ggn, of.vectors.flatten(1).T).solutions,
    "product": lambda of: of.weight.pchmp(of.vectors),
}


@pytest.mark.parametrize("call", CALLS)
def test_values_are_those_outside(call: str) -> None:
    of = Quantities()
    expected = CALLS[call](of)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(CALLS[call](of), expected, call, 1e-4)


def test_products_with_rows_of_a_store(tmp_path: Path) -> None:
    of = Quantities()
    data, loss = [(of.x, of.y)], nn.CrossEntropyLoss()
    packprop.compute(of.model, loss, data, [extensions.BatchGrad()], progress=False, store=tmp_path / "store")
    store = packprop.Store(tmp_path / "store")
    queries = {name: torch.randn(2, *parameter.shape) for name, parameter in of.model.named_parameters()}
    found = []
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            found.append(store.top("grad_batch", queries, k=3).products)
    assert_near(found[1], found[0], "products", 1e-4)
