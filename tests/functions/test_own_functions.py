"""Functions with a derivative of their own: a user's, and those of a library; with a rule and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.engine.functions.entry import Entry
from packprop.engine.functions.registry import RULES
from packprop.errors import PackpropError
from packprop.functions import NodeCall, affine, scaled
from packprop.testing import check_use
from tests.references.tensors import R, p
from tests.selection import one_in
from tests.versions import needs_recent


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


class Weighted(torch.autograd.Function):
    """Numbers and texts stand between its tensors; one output of two may be left alone."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, kind: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * x * weight, x * weight.square()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[None, Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        at_x = ctx.factor * first * weight + second * weight.square()
        return None, at_x, None, (ctx.factor * first * x + 2 * second * x * weight).sum(0)


def of_first(x: Tensor, weight: Tensor) -> Tensor:
    return Weighted.apply(2.0, x, "a", weight)[0]


def of_second(x: Tensor, weight: Tensor) -> Tensor:
    return Weighted.apply(2.0, x, "a", weight)[1].sin()


def of_both(x: Tensor, weight: Tensor) -> Tensor:
    first, second = Weighted.apply(2.0, x.tanh() * weight, "a", weight)
    return first + second


@one_in(3)
@pytest.mark.parametrize("function", [of_first, of_second, of_both])
def test_arguments_that_are_no_tensors(function: Callable[..., Tensor]) -> None:
    """Places on the graph count tensors alone; what a backward returns counts all arguments."""
    report = check_use(function, lambda n: (R(n, 4), p(4)), allow_fallback=True)
    assert report.structures["weight"] == "Dense, by the fallback"
    assert report.error < 1e-12


class Square(torch.autograd.Function):
    """Input and weight have one shape: a gradient that is taken for another one would show in numbers alone."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return None, ctx.factor * gradient @ weight.T, ctx.factor * x.T @ gradient


def test_a_weight_that_looks_like_the_input() -> None:
    torch.manual_seed(0)
    first, weight = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 3))
    x = torch.randn(3, 3)
    loss = nn.functional.mse_loss(Square.apply(0.5, first(x), weight), torch.zeros(3, 3))
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for n in range(3):
        alone = nn.functional.mse_loss(0.5 * first(x[n : n + 1]) @ weight, torch.zeros(1, 3)) / 3
        (expected,) = torch.autograd.grad(alone, weight)
        torch.testing.assert_close(weight.grad_batch[n], expected)


def square_rule(call: NodeCall) -> Entry | None:
    x, factor = call.saved(0), call.attribute("factor")
    return affine(call, lambda: factor * x(), transposed=True) if call.place == 1 else None


@pytest.mark.parametrize("again", [False, True])
def test_a_rule_gives_both_kronecker_factors(again: bool) -> None:
    packprop.register_use(Square)(square_rule)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if not again:
                return Square.apply(0.5, x, self.weight)
            return checkpoint(lambda x: Square.apply(0.5, x, self.weight), x, use_reentrant=False)

    torch.manual_seed(0)
    model, plain = packprop.extend(Model().double()), nn.Linear(3, 3, bias=False).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    plain.weight.data.copy_(model.weight.T)
    loss = packprop.extend(nn.MSELoss())
    with packprop.backpack(extensions.BatchGrad(), extensions.KFLR()):
        loss(model(x), y).backward()
    with packprop.backpack(extensions.BatchGrad(), extensions.KFLR()):
        loss(packprop.extend(plain)(0.5 * model.first(x)), y).backward()
    torch.testing.assert_close(model.weight.grad_batch, plain.weight.grad_batch.mT)
    assert len(model.weight.kflr) == 2
    for found, expected in zip(model.weight.kflr, plain.weight.kflr, strict=True):
        torch.testing.assert_close(found, expected)


class Exponential(torch.autograd.Function):
    """It saves its output, which only its node can read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = (x * weight).exp()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        return gradient * y * weight, (gradient * y * x).sum(0)


@pytest.mark.parametrize("has_rule", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_function_that_saves_its_output(has_rule: bool, again: bool) -> None:
    if has_rule:

        @packprop.register_use(Exponential)
        def rule(call: NodeCall) -> Entry | None:
            x, y = call.saved(0), call.saved(2)
            return scaled(call, lambda: x() * y()) if call.place == 1 else None

    torch.manual_seed(0)
    first, weight = nn.Linear(3, 3).double(), nn.Parameter(torch.randn(3).double())
    model = nn.Module()
    model.first, model.weight = first, weight
    packprop.extend(model)
    x, y = torch.randn(4, 3).double(), torch.randn(4, 3).double()

    def run(x: Tensor) -> Tensor:
        return Exponential.apply(x, weight).tanh()

    out = run(first(x)) if not again else checkpoint(run, first(x), use_reentrant=False)
    with packprop.backpack(extensions.BatchGrad(), extensions.SumGradSquared()):
        nn.functional.mse_loss(out, y).backward()
    rows = []
    for n in range(4):
        alone = nn.functional.mse_loss(run(first(x[n : n + 1])), y[n : n + 1]) / 4
        rows.append(torch.autograd.grad(alone, weight)[0])
    torch.testing.assert_close(weight.grad_batch, torch.stack(rows))
    torch.testing.assert_close(weight.sum_grad_squared, torch.stack(rows).square().sum(0))
    assert first.weight.grad is not None


def test_a_rule_may_read_that_nothing_was_saved() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, None)
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, _ = ctx.saved_tensors
            return gradient * weight, (gradient * x).sum(0)

    @packprop.register_use(Scaled)
    def rule(call: NodeCall) -> Entry | None:
        assert call.saved(2)() is None
        return scaled(call, call.saved(0)) if call.place == 1 else None

    weight, x = nn.Parameter(torch.ones(3)), torch.arange(6.0).view(2, 3)
    with packprop.record():
        loss = nn.functional.mse_loss(Scaled.apply(x, weight), torch.zeros(2, 3), reduction="sum")
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    torch.testing.assert_close(weight.grad_batch, 2 * x * x)


def test_a_parameter_in_another_form_is_what_the_function_got() -> None:
    packprop.register_use(Square)(square_rule)

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        return Square.apply(2.0, x, weight.T) + Square.apply(1.0, x.sin(), weight.view(3, 2))

    report = check_use(turned, lambda n: (R(n, 3), p(2, 3)))
    assert report.error < 1e-12


def test_a_rule_that_leaves_a_parameter_alone() -> None:
    packprop.register_use(Square)(lambda call: None)
    assert (
        check_use(
            lambda x, weight: Square.apply(2.0, x, weight), lambda n: (R(n, 3), p(3, 3)), allow_fallback=True
        ).error
        < 1e-12
    )


def test_an_operator_of_a_library() -> None:
    @torch.library.custom_op("packprop_tests::scaled", mutates_args=())
    def operator(factor: float, x: Tensor, weight: Tensor) -> Tensor:
        return factor * x * weight

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor, *saved = inputs
        ctx.save_for_backward(*saved)

    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return None, ctx.factor * gradient * weight, (ctx.factor * gradient * x).sum(0)

    operator.register_autograd(backward, setup_context=save)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return operator(2.0, x, weight)

    def make(n: int) -> tuple[Tensor, Tensor]:
        return R(n, 4), p(4)

    assert check_use(function, make, allow_fallback=True).structures == {"weight": "Dense, by the fallback"}
    name = function(R(1, 4), p(4)).grad_fn.name()

    @packprop.register_use(name)
    def rule(call: NodeCall) -> Entry | None:
        x, factor = call.saved(0), call.attribute("factor")
        return scaled(call, lambda: factor * x(), linear=True) if call.place == 1 else None

    assert check_use(function, make).structures == {"weight": "Scale"}


def test_a_function_named_like_one_of_pytorch() -> None:
    """The rule of ``MulBackward0`` is not for a user's function of that name."""

    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x + weight.exp()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, (gradient * ctx.saved_tensors[1].exp()).sum(0)

    report = check_use(Mul.apply, lambda n: (R(n, 3), p(3)), allow_fallback=True)
    assert report.structures == {"weight": "Dense, by the fallback"}


class Again(torch.autograd.Function):
    """A checkpoint of one's own, whose parameters no graph shows."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one output
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


@needs_recent
@pytest.mark.parametrize(
    "extension", [extensions.BatchL2Grad(), extensions.KFAC(), extensions.DiagHessian()], ids=str
)
def test_a_backward_function_that_runs_a_backward_pass_is_refused(extension: Any) -> None:
    first, inner, last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    with (
        pytest.raises(PackpropError, match="it calls backward"),
        packprop.backpack(extension),
        packprop.record(),
    ):
        F.cross_entropy(last(Again.apply(inner, first(x))), y).backward()
    assert all(p.grad is None for layer in (first, inner, last) for p in layer.parameters())
