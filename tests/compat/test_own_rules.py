"""Second order by rules of one's own, propagated from module to module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packprop.compat.custom_module.branching import Parallel, SumModule
from packprop.compat.own import (
    ModuleExtension,
    SecondOrderBackpropExtension,
)
from tests.compat.module_extensions import run
from tests.compat.programs import dense_ggn, flat, installed, mlp, near, softmax_hessian, vectors


class Propagated(SecondOrderBackpropExtension):
    """A user's own second order: squares of GGN columns, propagated module by module from the loss."""

    def __init__(self) -> None:
        class OfLoss(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, arrived: Any
            ) -> Tensor:
                assert arrived is None
                p = module.input0.softmax(-1)
                roots = torch.diag_embed(p.sqrt()) - torch.einsum("no,nv->nov", p, p.sqrt())
                return roots.movedim(-1, 0) / len(p) ** 0.5

        class OfLinear(ModuleExtension):
            def __init__(self) -> None:
                super().__init__(["weight", "bias"])

            def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
                return torch.einsum("vno,ni->oi", columns**2, module.input0**2)

            def bias(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
                return (columns**2).sum((0, 1))

            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns @ module.weight

        class OfSigmoid(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns * (module.output * (1 - module.output))

        class Same(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns

        super().__init__(
            "propagated",
            {
                nn.CrossEntropyLoss: OfLoss(),
                nn.Linear: OfLinear(),
                nn.Sigmoid: OfSigmoid(),
                nn.Identity: Same(),
                SumModule: Same(),
            },
        )


class Accumulating(Propagated):
    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        return existing + other


@installed
def test_second_order_by_ones_own_rules() -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Propagated())
    expected = dense_ggn(model, x, softmax_hessian).diagonal() / 5
    near(flat(p.propagated for p in model.parameters()), expected)


@installed
def test_second_order_by_ones_own_rules_over_branches() -> None:
    """A residual connection: what arrives along both ways is accumulated."""
    branches = Parallel(nn.Identity(), nn.Sequential(nn.Linear(5, 5), nn.Sigmoid()))
    model, (x, y) = nn.Sequential(nn.Linear(4, 5), branches, nn.Linear(5, 3)), vectors()
    run(model, x, y, Accumulating())
    expected = dense_ggn(model, x, softmax_hessian).diagonal() / 5
    near(flat(p.propagated for p in model.parameters()), expected)
    with pytest.raises(NotImplementedError, match=r"existing \+ other"):
        run(model, x, y, Propagated())
