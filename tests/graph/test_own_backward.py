"""Backward functions of the user's own that are no derivative: named as what they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions, products
from packprop.compat import hessianfree
from packprop.errors import PackpropError
from tests.selection import one_in


def function(pull: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """An autograd function that doubles, with a backward function of one's own."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
            return pull(cotangents[0], *ctx.saved_tensors)

    return Doubled


NONLINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clipped": lambda g, x: (2 * g).clamp(-0.01, 0.01),
    "clipped-far-away": lambda g, x: (2 * g).clamp(-100, 100),
    "without-small-ones": lambda g, x: torch.where(g.abs() > 0.01, 2 * g, 0.0),
    "normalised": lambda g, x: g / (g.norm(dim=1, keepdim=True) + 1e-12),
    "its-sign": lambda g, x: g.sign(),
}
LINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "derivative": lambda g, x: 2 * g,
    "straight-through": lambda g, x: g,
    "reversed": lambda g, x: -0.1 * g,
    "masked": lambda g, x: torch.where(x > 0, g, 0.0),
}


class Model(nn.Module):
    def __init__(self, applied: Any) -> None:
        super().__init__()
        self.first, self.last, self.applied = nn.Linear(3, 4), nn.Linear(4, 2), applied

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.applied.apply(self.first(x)))


def problem(pull: Callable[[Tensor, Tensor], Tensor], samples: int = 5) -> tuple[Any, Any, Tensor, Tensor]:
    model = packprop.extend(Model(function(pull)).double())
    return (
        model,
        packprop.extend(nn.MSELoss()),
        torch.randn(samples, 3).double(),
        torch.randn(samples, 2).double(),
    )


MADE = [
    extensions.BatchGrad,
    extensions.Variance,
    extensions.KFAC,
    extensions.DiagGGNExact,
    extensions.DiagHessian,
    extensions.DiagHessianMC,
]


def assert_named(caught: pytest.ExceptionInfo[PackpropError]) -> None:
    assert "the backward function of Doubled" in caught.value.where
    assert "not linear" in caught.value.why
    assert "mixed" not in str(caught.value)


@one_in(2)
@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("name", NONLINEAR)
def test_extensions_say_what_it_is(name: str, make: Any) -> None:
    model, loss, x, y = problem(NONLINEAR[name])
    with pytest.raises(PackpropError) as caught, packprop.backpack(make()):
        loss(model(x), y).backward()
    assert_named(caught)


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
@pytest.mark.parametrize("name", NONLINEAR)
def test_products_with_blocks_say_what_it_is(name: str, make: Any) -> None:
    model, loss, x, y = problem(NONLINEAR[name])
    asked = make()
    with packprop.backpack(asked):
        loss(model(x), y).backward()
    weight = model.first.weight
    with pytest.raises(PackpropError) as caught:
        getattr(weight, asked.savefield)(torch.ones_like(weight))
    assert_named(caught)


@pytest.mark.parametrize("name", NONLINEAR)
def test_products_of_the_whole_model_say_what_it_is(name: str) -> None:
    model, loss, x, y = problem(NONLINEAR[name])
    parameters = list(model.parameters())
    ones = [torch.ones_like(parameter) for parameter in parameters]
    calls: list[Callable[[], Any]] = [
        lambda: products.hvp(loss(model(x), y), parameters, ones),
        lambda: products.jvp(model(x), parameters, ones),
        lambda: products.vjp(model(x), parameters, torch.ones_like(y)),
        lambda: hessianfree.hessian_vector_product(loss(model(x), y), parameters, ones),
        lambda: hessianfree.L_op(model(x), parameters, torch.ones_like(y)),
    ]
    for call in calls:
        with pytest.raises(PackpropError) as caught:
            call()
        assert_named(caught)


def test_curvature_of_one_sample_says_what_it_is() -> None:
    """One sample is not mixed with anything, and no column can be pulled back all the same."""
    model, loss, x, y = problem(NONLINEAR["clipped"], samples=1)
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.DiagGGNExact()):
        loss(model(x), y).backward()
    assert_named(caught)


class Picky(Exception):
    """An exception of the user's own."""


def picky(g: Tensor, x: Tensor) -> Tensor:
    if g.abs().amax() > 100:
        raise Picky
    return 2 * g


def test_a_backward_function_that_raises_on_the_numbers_of_the_check_is_not_refused() -> None:
    model, loss, x, y = problem(picky, samples=1)
    value = loss(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        value.backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)


@one_in(2)
@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("name", LINEAR)
def test_backward_functions_that_are_linear_are_not_refused(name: str, make: Any) -> None:
    model, loss, x, y = problem(LINEAR[name])
    with packprop.backpack(make()):
        loss(model(x), y).backward()
    assert hasattr(model.first.weight, make().savefield)


def now_and_then(g: Tensor, _: Tensor) -> Tensor:
    if torch.rand(()) < 0.1:
        float(g.norm())
    return 2 * g


class Scaled(torch.autograd.Function):
    """Takes a parameter, so that packprop calls it for each sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        torch.rand(())
        return g * weight, (g * x).sum(0)


@pytest.mark.parametrize("takes_a_parameter", [False, True])
@pytest.mark.parametrize("make", MADE)
def test_what_a_backward_function_draws_is_drawn_once(make: Any, takes_a_parameter: bool) -> None:
    """In the user's own pass: packprop's sweeps leave the random state alone."""
    model, loss, x, y = problem(now_and_then)
    if takes_a_parameter:
        model.weight = nn.Parameter(torch.randn(2).double())
        model.register_forward_hook(lambda module, given, out: Scaled.apply(out, module.weight))
    before = torch.get_rng_state()
    loss(model(x), y).backward()
    once = torch.get_rng_state()
    torch.set_rng_state(before)
    is_sampled = make in (extensions.KFAC, extensions.DiagHessianMC)
    with packprop.backpack(make(generator=torch.Generator()) if is_sampled else make()):
        loss(model(x), y).backward()
    assert torch.equal(torch.get_rng_state(), once)


def of_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002  # as users do


def test_what_a_backward_function_draws_from_python_and_numpy_is_drawn_once() -> None:
    def drawing(g: Tensor, _: Tensor) -> Tensor:
        return 2 * g * float(random.random() < 2) * float(of_numpy() < 2)

    model, loss, x, y = problem(drawing)
    followed = []
    for context in (nullcontext(), packprop.backpack(extensions.BatchGrad())):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  # as above
        with context:
            loss(model(x), y).backward()
        followed.append((random.random(), of_numpy()))
    assert followed[0] == followed[1]


@pytest.mark.parametrize("draw", [random.random, of_numpy])
def test_a_backward_function_that_scales_by_numbers_of_python_or_numpy_is_refused(draw: Any) -> None:
    model, loss, x, y = problem(lambda g, _: g * draw())
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()
    assert_named(caught)


@pytest.mark.parametrize("make", MADE)
def test_a_backward_function_that_drops_at_random_is_refused(make: Any) -> None:
    """Before it has drawn anything: each run draws other numbers, and none is the user's."""
    model, loss, x, y = problem(lambda g, _: g * (torch.rand(g.shape) < 0.5))
    before = torch.get_rng_state()
    with pytest.raises(PackpropError) as caught, packprop.backpack(make()):
        loss(model(x), y).backward()
    assert_named(caught)
    assert torch.equal(torch.get_rng_state(), before)
