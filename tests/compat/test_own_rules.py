"""Second order by rules of one's own, propagated from module to module."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from packprop.compat.custom_module.branching import Parallel
from tests.compat.module_extensions import Propagated, run
from tests.compat.programs import dense_ggn, flat, installed, mlp, near, softmax_hessian, vectors


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
