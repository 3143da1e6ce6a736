"""Rules that are wrong are caught."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import packprop
from packprop import extensions
from packprop.engine.algebra.structures import Dense, Outer
from packprop.engine.functions.entry import Entry
from packprop.engine.functions.registry import RULES
from packprop.functions import NodeCall, affine, rowwise, scaled, select_samples
from packprop.testing import CheckFailed, check_use
from tests.references.tensors import R, p
from tests.testing.registered import Gate, gates


def right_factor(call: NodeCall) -> Callable[[], Tensor]:
    x, weight = call.saved(0), call.saved(1)
    return lambda: x() * weight().sigmoid() * (1 - weight().sigmoid())


def entry(structure_of: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for `Gate` from what it makes of a product of cotangent and factor ``[v, n, p]``."""

    def rule(call: NodeCall) -> Entry:
        factor = right_factor(call)

        def rows(cotangents: Any, where: Any, samples: Any) -> Dense:
            if cotangents[0] is None:
                return Dense(None)
            product = where[0].to_front(cotangents[0] * factor(), 1)
            rows = product.reshape(*product.shape[:2], -1, 4).sum(2)
            return Dense(structure_of(rows, samples))

        return Entry(call.operand.tensor, "Dense", rows)

    return rule


WRONG_RULES = {
    "factor": (
        lambda call: scaled(call, call.saved(0)),
        ("one sample at a time", "parameter 'weight'", "largest relative error"),
    ),
    "sums over columns": (
        entry(lambda product, samples: select_samples(product, samples, 1).sum(0, keepdim=True)),
        ("one sample at a time", "v=2", "shapes are [1, 1, 4] and [2, 1, 4]"),
    ),
    "ignores the choice": (
        entry(lambda product, samples: product),
        ("one sample at a time", "chosen [1]", "shapes are [1, 3, 4] and [1, 1, 4]"),
    ),
    "order of the choice": (
        entry(
            lambda product, samples: select_samples(
                product, samples if isinstance(samples, slice) else samples.sort().values, 1
            )
        ),
        ("one sample at a time", "chosen [2, 0]", "largest relative error"),
    ),
    "not differentiable": (
        lambda call: scaled(call, lambda: right_factor(call)().detach()),
        ("in a model that calls it once: differentiable", "parameter 'weight'"),
    ),
    "not linear": (
        lambda call: scaled(call, right_factor(call), linear=True),
        ("in a model that calls it once: double backward", "parameter 'weight'", "linear=True"),
    ),
    "no rows": (
        lambda call: Entry(call.operand.tensor, "Dense", lambda *_: Dense(None)),
        ("one sample at a time", "the structure has no rows"),
    ),
    "describes nothing": (
        lambda call: None,
        ("the registered rule", "does not describe this parameter", "parameter 'weight' in GateBackward"),
    ),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_is_caught(name: str) -> None:
    rule, texts = WRONG_RULES[name]
    packprop.register_use(Gate)(rule)
    with pytest.raises(CheckFailed) as caught:
        check_use(Gate.apply, gates)
    for text in texts:
        assert text in str(caught.value)
    assert caught.value.error > 1e-3


def test_positions_folded_into_the_samples_are_tested() -> None:
    @packprop.register_use(Gate)
    def rule(call: NodeCall) -> Entry:
        factor = right_factor(call)

        def structure_of(cotangents, where, samples):  # right wherever each row is a sample
            if cotangents[0] is None:
                return Dense(None)
            return Dense(select_samples(cotangents[0] * factor(), samples, 1))

        return Entry(call.operand.tensor, "Dense", structure_of)

    with pytest.raises(CheckFailed, match="3 samples x 2 parts"):
        check_use(Gate.apply, gates)


class Symmetric(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ (weight + weight.T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        own = x.T @ gradient
        return gradient @ (weight + weight.T), own + own.T


def test_a_fold_that_sums_breaks_fast_statistics() -> None:
    @packprop.register_use(Symmetric)
    def rule(call: NodeCall) -> Entry:
        def build(cotangent, x):
            if cotangent is not None:
                cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, 3)
            inputs = x.reshape(x.shape[0], -1, 1, 3)
            return Outer(inputs, cotangent, lambda g: (g + g.mT).squeeze(-3))

        return Entry(call.operand.tensor, "Outer", rowwise(build, call.saved(0)))

    with pytest.raises(CheckFailed, match="fast statistics was compared") as caught:
        check_use(Symmetric.apply, lambda n: (R(n, 3), p(3, 3)))
    assert "sum_sq" in caught.value.where
    assert "rearrange" in caught.value.instead


def test_inputs_alone_are_tested() -> None:
    @packprop.register_use("Mm")
    def rule(call: NodeCall) -> Entry:
        right = affine(call, call.saved("self"), transposed=True)

        def structure_of(cotangents, where, samples):
            structure = right.structure_of(cotangents, where, samples)
            if cotangents[0] is None:
                return Outer(2 * structure.x, None, structure.fold)
            return structure

        return Entry(call.operand.tensor, "Outer", structure_of)

    with pytest.raises(CheckFailed, match="inputs alone"):
        check_use(torch.mm, lambda n: (R(n, 3), p(3, 4)))


def test_a_function_of_functions_of_torch_needs_no_rule() -> None:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).tanh()

    report = check_use(plain, lambda n: (R(n, 3), p(4, 3)))
    assert report.structures == {"weight": "Outer"}


def test_a_function_that_is_called_inside_another_one() -> None:
    packprop.register_use(Gate)(lambda call: scaled(call, right_factor(call)))

    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return Gate.apply(Gate.apply(x.flip(1), weight).tanh() + bias, weight).cumsum(1)

    report = check_use(twice, lambda n: (R(n, 2, 4), p(4), p(4)))
    assert report.structures == {"weight": "Scale", "bias": "Scale"}
    assert report.error < 1e-12


def test_a_function_without_a_rule() -> None:
    with pytest.raises(CheckFailed, match="no rule is registered") as caught:
        check_use(Gate.apply, gates)
    assert "@packprop.register_use(Gate)" in caught.value.instead
    report = check_use(Gate.apply, gates, allow_fallback=True)
    assert report.structures == {"weight": "Dense, by the fallback"}


def test_a_function_that_mixes_samples() -> None:
    def mixing(x: Tensor, weight: Tensor) -> Tensor:
        return (x - x.mean(0)) * weight

    with pytest.raises(CheckFailed, match="samples are mixed"):
        check_use(mixing, gates, allow_fallback=True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda n: (R(n, 3), R(3)), "no tensor is an nn.Parameter"),
        (lambda n: (R(2, 3), p(3)), "no tensor has extent n"),
        (lambda n: (R(n, n), p(n)), "on several axes"),
        (lambda n: ([R(1, 3)] * n, p(3)), "number of tensors depends"),
    ],
)
def test_arguments_that_are_none(make: Callable[[int], Any], text: str) -> None:
    with pytest.raises(packprop.BadInput, match=re.escape(text)):
        check_use(torch.mul, make)


@pytest.mark.parametrize("given", [(), (F.linear,), (Gate.apply,), ("",), (Gate, 3), (torch.nn.Linear,)])
def test_only_functions_and_names_can_be_registered(given: tuple[Any, ...]) -> None:
    before = dict(RULES)
    with pytest.raises(packprop.BadInput, match=r"register_use\(MyFunction\)"):
        packprop.register_use(*given)
    assert before == RULES


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda call: [scaled(call)], "returned list"),
        (lambda call: Entry(torch.zeros(4), "Dense", lambda *_: Dense(None)), "an entry of another tensor"),
    ],
)
def test_a_rule_must_return_an_entry_of_the_parameter(made: Callable[..., Any], text: str) -> None:
    packprop.register_use(Gate)(made)
    with pytest.raises(packprop.BadInput, match=text) as caught:
        check_use(Gate.apply, gates)
    assert "GateBackward" in str(caught.value)


def loss_of_gate(called: list[int]) -> tuple[torch.nn.Module, Tensor]:
    """A model whose last function is a gate, and its loss; the gate's backward notes its calls."""

    class Counted(Gate):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            called.append(1)
            return Gate.backward(ctx, *gradients)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = torch.nn.Linear(3, 4), torch.nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return Counted.apply(self.first(x), self.weight)

    packprop.register_use(Counted)(RULES[Gate].entry_of)
    model = packprop.extend(Model().double())
    return model, packprop.extend(torch.nn.MSELoss())(
        model(torch.randn(5, 3).double()), torch.randn(5, 4).double()
    )


@pytest.mark.parametrize(
    "asked",
    [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.BatchGrad(subsampling=[3, 1]),
        extensions.DiagGGNExact(),
    ],
    ids=["rows", "norms", "some", "curvature"],
)
def test_a_wrong_rule_is_refused_in_a_pass(asked: Any) -> None:
    packprop.register_use(Gate)(lambda call: scaled(call, lambda: 1.1 * right_factor(call)()))
    _model, loss = loss_of_gate([])
    with (
        pytest.raises(packprop.PackpropError, match="do not sum to the gradient") as caught,
        packprop.backpack(asked),
    ):
        loss.backward()
    assert "'weight'" in caught.value.where
    assert "check_use" in caught.value.instead


def test_a_right_rule_is_looked_at_once() -> None:
    """The graph shows nothing of the gate, so passes 1, 2 and 4 also look for hidden mixing."""
    packprop.register_use(Gate)(lambda call: scaled(call, right_factor(call)))
    called: list[int] = []
    model, loss = loss_of_gate(called)
    times: list[int] = []
    for _ in range(4):
        before = len(called)
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward(retain_graph=True)
        times.append(len(called) - before)
    assert times[2] < times[1] == times[3] == times[0] - 1
    (weight,) = (p for name, p in model.named_parameters() if name == "weight")
    assert weight.grad is not None
    torch.testing.assert_close(4 * weight.grad_batch.sum(0), weight.grad)


def test_zeros_prove_nothing() -> None:
    packprop.register_use(Gate)(lambda call: scaled(call, lambda: 1.1 * right_factor(call)()))
    _model, loss = loss_of_gate([])
    with packprop.backpack(extensions.BatchGrad()):
        (0 * loss).backward(retain_graph=True)
    with pytest.raises(packprop.PackpropError, match="do not sum"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float, is_turned: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor, ctx.is_turned = factor, is_turned
        return factor * x @ (weight if is_turned else weight.T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        own = x.T @ gradient if ctx.is_turned else gradient.T @ x
        there = gradient @ (weight.T if ctx.is_turned else weight)
        return ctx.factor * there, ctx.factor * own, None, None


@pytest.mark.parametrize("options", [(0.5, False), (2, False), (1.0, True)])
def test_a_call_that_was_right_proves_nothing_of_other_options(options: tuple[float, bool]) -> None:
    packprop.register_use(Scaled)(lambda call: affine(call, call.saved(0)))
    weight, x = torch.nn.Parameter(torch.randn(3, 3).double()), torch.randn(5, 3).double()

    def run(*options: Any) -> None:
        with packprop.backpack(extensions.BatchGrad()):
            F.mse_loss(Scaled.apply(x, weight, *options), torch.zeros_like(x)).backward()

    run(1.0, False)
    with pytest.raises(packprop.PackpropError, match="do not sum"):
        run(*options)


class Pooled(torch.autograd.Function):
    """Means of some columns, times a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.mean(1, keepdim=True) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, (gradient * x.mean(1, keepdim=True)).sum(0)


def test_a_call_that_was_right_proves_nothing_of_other_shapes_of_constants() -> None:
    packprop.register_use(Pooled)(lambda call: scaled(call, lambda: call.saved(0)().sum(1, keepdim=True)))
    weight = torch.nn.Parameter(torch.randn(3).double())

    def run(width: int) -> None:
        with packprop.backpack(extensions.BatchGrad()):
            made = Pooled.apply(torch.randn(5, width).double(), weight)
            F.mse_loss(made, torch.zeros(5, 3).double()).backward()

    run(1)
    with pytest.raises(packprop.PackpropError, match="do not sum"):
        run(2)
