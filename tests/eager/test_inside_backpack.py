"""Eager branches inside `with backpack(...)`: they count like any other part of the loss, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import PackpropError, eager_backward, extensions
from tests.references.running import assert_near


class Penalised(nn.Module):
    """Two layers, and a penalty on the activation between them whose backward pass runs at once."""

    def __init__(self, penalty: Callable[[Penalised, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.critic = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
        self.penalty = penalty

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden), self.penalty(self, hidden)


PENALTIES = [
    pytest.param(lambda m, h: eager_backward(lambda h: h.pow(4).sum(), h, keep="recompute"), id="scalar"),
    pytest.param(lambda m, h: eager_backward(lambda h: h.pow(4).sum(1), h), id="per-sample"),
    pytest.param(lambda m, h: eager_backward(lambda h: h.pow(4).sum(1), h, chunks=2), id="pieces"),
]


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_branch_without_parameters_contributes(penalty: Callable[[Penalised, Tensor], Tensor]) -> None:
    model = packprop.extend(Penalised(penalty).double())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    out, value = model(x)
    loss = loss_function(out, y) + 0.1 * value.sum()
    asked = (extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.Variance())
    with packprop.backpack(*asked):
        loss.backward()
    leaves = [*model.first.parameters(), *model.last.parameters()]
    for n in range(5):
        with packprop.disable():
            hidden = torch.tanh(model.first(x[n : n + 1]))
            own = nn.functional.cross_entropy(model.last(hidden), y[n : n + 1]) / 5
            own = own + 0.1 * hidden.pow(4).sum()
        for leaf, expected in zip(leaves, torch.autograd.grad(own, leaves), strict=True):
            assert_near(leaf.grad_batch[n], expected, f"row {n}")
    for leaf in leaves:
        assert_near(leaf.batch_l2, leaf.grad_batch.flatten(1).square().sum(1), "norms")
        assert_near(leaf.variance, leaf.grad_batch.var(0, unbiased=False), "variance")


def test_one_number_of_the_batch_that_kept_no_graph_is_refused() -> None:
    """Nothing tells whether it is a sum over samples; what it is caused by says how it can be known."""
    model = packprop.extend(Penalised(lambda m, h: eager_backward(lambda h: h.pow(4).sum(), h)))
    out, value = model(torch.randn(5, 3))
    loss = nn.functional.cross_entropy(out, torch.randint(2, (5,))) + value
    with (
        pytest.raises(PackpropError, match="mixes the samples") as caught,
        packprop.backpack(extensions.BatchGrad()),
    ):
        loss.backward()
    assert "keep='recompute'" in str(caught.value.__cause__)


def test_parameters_of_a_branch_are_refused_by_name() -> None:
    model = packprop.extend(Penalised(lambda m, h: eager_backward(lambda h: m.critic(h).pow(2).sum(), h)))
    out, value = model(torch.randn(5, 3))
    loss = packprop.extend(nn.CrossEntropyLoss())(out, torch.randint(2, (5,))) + value
    with (
        pytest.raises(PackpropError, match="eager_backward") as caught,
        packprop.backpack(extensions.BatchGrad()),
    ):
        loss.backward()
    assert "'critic.weight'" in caught.value.where
    assert not hasattr(model.first.weight, "grad_batch")


def test_curvature_of_a_branch_is_refused() -> None:
    model = packprop.extend(Penalised(lambda m, h: eager_backward(lambda h: h.pow(4).sum(1), h)))
    out, value = model(torch.randn(5, 3))
    loss = packprop.extend(nn.CrossEntropyLoss())(out, torch.randint(2, (5,))) + value.sum()
    with pytest.raises(PackpropError, match="recorded loss"), packprop.backpack(extensions.DiagGGNExact()):
        loss.backward()
