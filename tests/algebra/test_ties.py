"""Derivatives where a value is at a bound: the same whether PyTorch's ``clamp`` has one there or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from packprop.engine.algebra import kronecker
from packprop.engine.algebra.choices import algorithms
from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.statistics import sq_norm
from packprop.engine.algebra.structures import Lookup, Outer, Tied
from packprop.engine.functions.losses.links import EXPONENTIAL, SIGMOID
from packprop.engine.tensors.precision import at_least

CLAMP = Tensor.clamp


@pytest.fixture(autouse=True, params=["one", "zero"])
def slope_at_bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivative of ``clamp`` at its bounds: one before PyTorch 2.14, zero since."""
    slope = request.param == "one"

    def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
        clamped = CLAMP(x.detach(), min, max)
        bounds = [bound for bound in (min, max) if bound is not None]
        at_bound = torch.stack([x == bound for bound in bounds]).any(0)
        return torch.where((x == clamped) & (slope | ~at_bound), x, clamped)

    monkeypatch.setattr(Tensor, "clamp", clamp)


def slopes(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The derivative of the sum of a function's values."""
    at = at.detach().requires_grad_()
    return torch.autograd.grad(function(at).sum(), at)[0]


def test_values_that_are_raised() -> None:
    values = torch.tensor([-1.0, 0.0, 2.0, torch.nan, torch.inf])
    raised = at_least(values, 0.0)
    torch.testing.assert_close(raised, torch.tensor([0.0, 0.0, 2.0, torch.nan, torch.inf]), equal_nan=True)
    assert slopes(lambda x: at_least(x, 0.0), values).tolist() == [0, 1, 1, 1, 1]
    assert at_least(values.bfloat16(), 0.1).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["eigenvalues", "diagonal", "matrix"])
def test_the_determinant_of_a_singular_block(form: str) -> None:
    def logdet(values: Tensor) -> Tensor:
        if form == "eigenvalues":
            return kronecker.logdet(kronecker.Eigen(values, [torch.eye(2).double()]), 0.5)
        return kronecker.logdet([values if form == "diagonal" else torch.diag(values)], 0.5)

    values = torch.tensor([0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(slopes(logdet, values), 1 / (values + 0.5))


@pytest.mark.parametrize("tied", [False, True])
def test_the_curvature_of_a_norm_that_is_zero(tied: bool) -> None:
    """The squared norm of the gradient of a sample whose cotangent is zero."""
    x, shape = torch.randn(2, 3, 1, 5).double(), torch.Size([4, 5])
    index = torch.tensor([[0, 2, 2], [3, 1, 0]])

    def whole(cotangent: Tensor) -> Tensor:
        mapped, looked = cotangent[..., :4], cotangent[..., 4:]
        gradient = torch.einsum("nso,nsi->noi", mapped, x[:, :, 0])
        if tied:
            places = torch.nn.functional.one_hot(index, 4).double()
            gradient = gradient + torch.einsum("nso,nsi->noi", places, looked)
        return gradient.square().sum()

    def norms(cotangent: Tensor) -> Tensor:
        outer = Outer(x, cotangent[None, :, :, None, :4], fold_to(shape))
        lookup = Lookup(index, cotangent[None, ..., 4:], 4, torch.float64)
        with algorithms(norms="products"):
            return sq_norm(Tied((outer, lookup)) if tied else outer).sum()

    zero = torch.zeros(2, 3, 9).double()
    found, expected = (torch.autograd.functional.hessian(each, zero) for each in (norms, whole))
    torch.testing.assert_close(found, expected)


def test_links_of_saturated_values() -> None:
    """Probabilities and rates that are the smallest or the largest of their precision."""
    limits = torch.finfo(torch.float64)
    p = torch.tensor([limits.tiny, 0.5, 1 - limits.eps / 2], dtype=torch.float64)
    torch.testing.assert_close(slopes(SIGMOID.undone, p), 1 / (p * (1 - p)))
    torch.testing.assert_close(slopes(EXPONENTIAL.undone, p), 1 / p)
