"""Second derivatives that PyTorch has no number for are warned of, by the name of the function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions, operators, products
from packprop.compat import hessianfree


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


AT_ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "Std": lambda x: x.std(1, keepdim=True) * x,
    "LinalgVectorNorm": lambda x: x.norm(dim=1, keepdim=True) * x.new_ones(1, 4),
    "Sinc": torch.sinc,
    "Pow": lambda x: x.abs().pow(1.5),
}
"""Functions whose first derivative PyTorch gives at zero, and whose second it does not."""


def problem(function: Callable[[Tensor], Tensor], shift: float = 0.0) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network in which the function is given zeros, or numbers near to ``shift``."""
    model = nn.Sequential(nn.Linear(3, 4), Applied(function), nn.Linear(4, 2)).double()
    nn.init.constant_(model[0].bias, shift)
    if not shift:
        nn.init.zeros_(model[0].weight)
    return model, torch.randn(2, 3).double(), torch.randn(2, 2).double()


def own(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if issubclass(each.category, packprop.PackpropWarning)]


MADE = [
    extensions.DiagHessian,
    extensions.BatchDiagHessian,
    extensions.DiagHessianMC,
    extensions.HMP,
]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("name", AT_ZERO)
def test_extensions_name_the_function_and_the_layer(name: str, make: Any) -> None:
    """One warning, with the name of the node and of the use before it; products say so once."""
    model, x, y = problem(AT_ZERO[name])
    packprop.extend(model)
    loss, asked = packprop.extend(nn.MSELoss()), make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packprop.backpack(asked):
            loss(model(x), y).backward()
        value = getattr(model[0].weight, asked.savefield)
        if callable(value):
            again = value
            value = again(torch.ones_like(model[0].weight))
            again(torch.ones_like(model[0].weight))
    assert not value.isfinite().all()
    (text,) = own(caught)
    assert f"{name}Backward0, behind linear of '0.weight', '0.bias'" in text


@pytest.mark.parametrize("name", AT_ZERO)
@pytest.mark.parametrize("call", ["hvp", "operator", "compat"])
def test_products_of_the_whole_model_name_the_function(call: str, name: str) -> None:
    model, x, y = problem(AT_ZERO[name])
    parameters = list(model.parameters())
    ones = [torch.ones_like(parameter) for parameter in parameters]

    def value() -> Tensor:
        return F.mse_loss(model(x), y)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if call == "hvp":
            products.hvp(value(), parameters, ones)
        elif call == "compat":
            hessianfree.hessian_vector_product(value(), parameters, ones)
        else:
            matrix = operators.hessian(value, parameters)
            matrix @ torch.ones(matrix.shape[0]).double()
            matrix @ torch.ones(matrix.shape[0]).double()
    (text,) = own(caught)
    assert f"{name}Backward0 " in text


@pytest.mark.parametrize(
    ("call", "name"),
    [("block", "Std"), *product(["ggnvp", "jvp", "operator", "compat"], ["Std", "Sinc"])],
)
def test_products_with_the_gauss_newton_matrix_name_the_function(call: str, name: str) -> None:
    """A product ``J v`` differentiates the first derivative in what is fed in, which may be NaN as well."""
    model, x, y = problem(AT_ZERO[name])
    parameters = list(model.parameters())
    ones = [torch.ones_like(parameter) for parameter in parameters]
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())

    def evaluate() -> tuple[Tensor, Tensor]:
        outputs = model(x)
        return outputs, loss(outputs, y)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if call == "block":
            with packprop.backpack(extensions.GGNMP()):
                evaluate()[1].backward()
            model[0].weight.ggnmp(ones[0])
        elif call == "ggnvp":
            products.ggnvp(evaluate, parameters, ones)
        elif call == "jvp":
            products.jvp(model(x), parameters, ones)
        elif call == "operator":
            matrix = operators.ggn(evaluate, parameters)
            matrix @ torch.ones(matrix.shape[0]).double()
        else:
            outputs, value = evaluate()
            hessianfree.ggn_vector_product(value, outputs, model, ones)
    (text,) = own(caught)
    assert f"{name}Backward0" in text


def test_a_penalty_at_zero_names_its_function() -> None:
    """The Hessian of a norm at zero, which is added to the loss."""
    model, x, y = problem(torch.tanh)
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packprop.backpack(extensions.DiagHessian()):
            (loss(model(x), y) + model[0].weight.norm()).backward()
    assert not model[0].weight.diag_h.isfinite().all()
    (text,) = own(caught)
    assert "'0.weight'" in text


@pytest.mark.parametrize("name", AT_ZERO)
def test_nothing_is_said_elsewhere(name: str) -> None:
    model, x, y = problem(AT_ZERO[name], shift=2.0)
    parameters = list(model.parameters())
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())
    ones = [torch.ones_like(parameter) for parameter in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = [make() for make in MADE]
        with packprop.backpack(*asked, extensions.GGNMP()):
            loss(model(x), y).backward()
        for parameter, vector in zip(parameters, ones, strict=True):
            assert parameter.hmp(vector).isfinite().all()
            assert parameter.ggnmp(vector).isfinite().all()
        products.hvp(loss(model(x), y), parameters, ones)
