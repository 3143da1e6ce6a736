"""Products after the pass: while the values are those of the pass, and refused once they have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases import BY_NAME
from tests.references.running import assert_near, backward


def test_products_outlive_the_pass_and_others() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    weight = problem.parameters["0.weight"]
    vectors = torch.randn(2, *weight.shape, dtype=torch.float64)
    first, kept = weight.hmp(vectors), weight.hmp
    backward(problem, extensions.HMP(), extensions.BatchGrad())
    problem.total().backward()
    assert torch.equal(kept(vectors), first)
    assert weight.hmp is not kept


def test_dropout_is_that_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Dropout(), nn.Linear(20, 2)))
    lossfunc = packprop.extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2))
    weight = model[0].weight
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    vector = torch.randn_like(weight)
    (expected,) = torch.autograd.grad(slope, weight, vector, retain_graph=True)
    with packprop.backpack(extensions.HMP()):
        loss.backward()
    assert_near(weight.hmp(vector), expected, "hmp", 1e-6)


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_old_values_are_refused(make: Any) -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    asked = make()
    backward(problem, asked)
    weight = problem.parameters["0.weight"]
    product = getattr(weight, asked.savefield)
    with torch.no_grad():
        problem.parameters["4.bias"].add_(1.0)
    with pytest.raises(PackpropError, match="changed in place"):
        product(torch.zeros_like(weight))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_values_that_were_put_elsewhere_are_refused(make: Any) -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, make())
    weight = problem.parameters["0.weight"]
    problem.parameters["4.weight"].data = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(PackpropError, match="changed in place"):
        getattr(weight, make().savefield)(torch.zeros_like(weight))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
def test_a_step_through_data_is_refused(make: Any) -> None:
    """Programs for the older library step through ``parameter.data``: PyTorch counts no change then."""
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, make())
    weight = problem.parameters["0.weight"]
    product = getattr(weight, make().savefield)
    product(torch.zeros_like(weight))
    problem.parameters["4.weight"].data.add_(1e-3)
    with pytest.raises(PackpropError, match="changed in place"):
        product(torch.zeros_like(weight))


def test_an_optimizer_step_and_a_change_of_the_inputs_are_refused() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    weight = problem.parameters["0.weight"]
    problem.inputs.mul_(2)
    with pytest.raises(PackpropError, match="inputs or other tensors") as caught:
        weight.hmp(torch.ones_like(weight))
    assert caught.value.where == "parameter '0.weight'"
    backward(problem, extensions.HMP())
    weight.hmp(torch.ones_like(weight))
    torch.optim.SGD(problem.model.parameters(), lr=0.1).step()
    with pytest.raises(PackpropError, match="parameters were changed in place"):
        weight.hmp(torch.ones_like(weight))
