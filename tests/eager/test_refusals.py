"""What `eager_backward` refuses, by an error that says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.engine.eager import eager_backward
from packprop.errors import BadInput, PackpropError, PackpropWarning
from tests.eager.branches import WEIGHT, D, N, assert_same, gradients, network, scalar


def freed_input() -> Tensor:
    x = torch.ones(N, D, requires_grad=True)
    x.untyped_storage().resize_(0)
    return x


def changes_constant(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return (x * y).sum()


X = torch.ones(N, D, requires_grad=True)
BAD_INPUT: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "another shape": (
        lambda: eager_backward(lambda x: x.pow(2), X),
        "<lambda>",
        "returned the shape [6, 3]; inputs with samples: [6, 3]",
        "one value for each entry of axis 0",
    ),
    "too few values": (
        lambda: eager_backward(lambda x: x.pow(2).sum(0), X),
        "<lambda>",
        "returned the shape [3]",
        "return a scalar",
    ),
    "a whole input counted as samples": (
        lambda: eager_backward(lambda x: x.pow(2).sum(1), X, axes=[None]),
        "<lambda>",
        "inputs with samples: none",
        "return a scalar",
    ),
    "integers": (
        lambda: eager_backward(lambda x: x.argmax(), X),
        "<lambda>",
        "torch.int64, through which no gradient flows",
        "real floating point",
    ),
    "complex": (
        lambda: eager_backward(lambda x: (x * 1j).sum(), X),
        "<lambda>",
        "torch.complex64",
        "real floating point",
    ),
    "detached": (
        lambda: eager_backward(lambda x: x.detach().sum(), X),
        "<lambda>",
        "it returned a detached value",
        "without detach",
    ),
    "several values": (
        lambda: eager_backward(lambda x: (x.sum(), x.mean()), X),
        "<lambda>",
        "it returned 2 values, not one tensor",
        "return one tensor",
    ),
    "no tensor": (
        lambda: eager_backward(lambda x: x.sum().item(), X),
        "<lambda>",
        "it returned a float, not one tensor",
        "return one tensor",
    ),
    "changes its input": (
        lambda: eager_backward(lambda x: x.mul_(2).sum(), X),
        "<lambda>",
        "changed an input in place",
        "clone the input first",
    ),
    "changes a view of its input": (
        lambda: eager_backward(lambda x: x[0].mul_(2).sum(), X),
        "<lambda>",
        "changed an input in place",
        "clone the input first",
    ),
    "changes an input that needs no gradient": (
        lambda: eager_backward(changes_constant, X, torch.ones(N, D)),
        "changes_constant",
        "changed an input in place",
        "clone the input first",
    ),
    "an input that was freed": (
        lambda: eager_backward(lambda x: x.sum(), freed_input()),
        "an input of shape [6, 3]",
        "its memory was freed",
        "before it is freed",
    ),
    "mixed samples": (
        lambda: eager_backward(lambda x: (x - x.mean(0)).pow(3).sum(1), network()[1], check=True),
        "<lambda>",
        "values of other samples depend on sample",
        "the sum over samples",
    ),
    "a neighbour's sample": (
        lambda: eager_backward(
            lambda x: x.pow(2).sum(1) * (torch.arange(N) != 5) + x[0].sum() * (torch.arange(N) == 5),
            X,
            check=True,
        ),
        "<lambda>",
        "values of other samples depend on sample 0 of input 0",
        "keep='recompute'",
    ),
    "a mean in pieces": (
        lambda: eager_backward(lambda x: x.pow(2).mean(), X, chunks=3, check=True),
        "chunks=3 with <lambda>",
        "its first two pieces give 2.0 apart, 1.0 together",
        "reduction='mean'",
    ),
    "values per sample as a mean": (
        lambda: eager_backward(lambda x: x.sum(1), X, chunks=3, reduction="mean"),
        "reduction='mean' with <lambda>",
        "joined, not averaged",
        "leave reduction out",
    ),
    "inputs of several sizes": (
        lambda: eager_backward(lambda x, w: (x @ w).sum(), X, torch.ones(D, 2), chunks=2),
        "axes=0",
        "are [3, 6], not one number",
        "None for those that are passed whole",
    ),
    "an axis that an input lacks": (
        lambda: eager_backward(lambda x, y: x.sum(), X, torch.ones(N), chunks=2, axes=1),
        "axes: 1",
        "an input of shape [6] has no such axis",
        "one entry per input",
    ),
    "nothing to cut": (
        lambda: eager_backward(scalar, 3, chunks=2),
        "axes=0",
        "sizes along the axis to cut are []",
        "one entry per input",
    ),
    "too few axes": (
        lambda: eager_backward(lambda x, y: x.sum(), X, X, axes=[0]),
        "axes=[0]",
        "there are 2 inputs",
        "one entry per input",
    ),
    "samples in doubt": (
        lambda: eager_backward(lambda x, y: x.sum(1), X, torch.ones(D, N), chunks=2, axes=[0, 1]),
        "axes=[0, 1]",
        "nothing tells which axis",
        "transpose",
    ),
    "too many weights": (
        lambda: eager_backward(lambda x: x.sum(1), X, weights=torch.ones(7)),
        "weights",
        "[7] weights for values of shape [6]",
        "one weight per sample",
    ),
    "weights that go on after the last piece": (
        lambda: eager_backward(lambda x: x.sum(1), X, weights=torch.ones(7), chunks=2),
        "weights",
        "7 for 6 samples",
        "one weight per sample",
    ),
    "weights for a scalar": (
        lambda: eager_backward(lambda x: x.sum(), X, weights=torch.ones(N)),
        "<lambda>",
        "it returned the shape []",
        "one value for each entry",
    ),
    "weights that are none": (
        lambda: eager_backward(lambda x: x.sum(1), X, weights=torch.ones(N, dtype=torch.int64)),
        "weights",
        "one weight per sample",
        "floating point",
    ),
    "chunks": (
        lambda: eager_backward(scalar, X, chunks=0),
        "chunks=0",
        "positive integer",
        "chunks=4",
    ),
    "reduction": (
        lambda: eager_backward(scalar, X, reduction="none"),
        "reduction='none'",
        "added or averaged",
        "'sum' or 'mean'",
    ),
    "keep": (
        lambda: eager_backward(keep="disk"),
        "keep='disk'",
        "no such choice",
        "'exact', 'cpu', 'recompute'",
    ),
    "keep as integers": (
        lambda: eager_backward(keep=torch.int8),
        "keep=torch.int8",
        "no such choice",
        "torch.bfloat16",
    ),
    "memory": (
        lambda: eager_backward(memory="much"),
        "memory='much'",
        "no number of bytes",
        "memory='64MiB'",
    ),
    "keep and memory": (
        lambda: eager_backward(memory="1GB", keep="cpu"),
        "keep='cpu', memory='1GB'",
        "both choose what is kept",
        "give one",
    ),
    "no function": (
        lambda: eager_backward(X),
        "fn",
        "a Tensor cannot be called",
        "pass a function",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: str) -> None:
    call, where, why, instead = BAD_INPUT[case]
    with pytest.raises(BadInput) as error:
        call()
    assert "eager_backward" in error.value.asked
    assert where in error.value.where
    assert why in error.value.why
    assert instead in error.value.instead


def test_an_error_of_the_function_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        eager_backward(lambda x: (x @ x).sum(), X)
    assert not isinstance(error.value, PackpropError)
    with pytest.raises(ZeroDivisionError):
        eager_backward(lambda x: x.sum() / (1 // 0), X)


def test_a_shared_tensor_cannot_be_scaled_per_sample() -> None:
    layer = nn.Linear(D, 2, bias=False)
    for call, name in (
        (lambda: eager_backward(lambda x: layer(x).sum(1), X), "layer.weight of shape [2, 3]"),
        (lambda: eager_backward(lambda x, w: (x @ w).sum(1), X, layer.weight.T), "shape [3, 2]"),
    ):
        with pytest.raises(PackpropError) as error:
            call()
        assert name in error.value.where
        assert "only the sum over samples is kept" in error.value.why
        for way in ("weights=", "keep='recompute'", "return the sum"):
            assert way in error.value.instead


def test_independent_samples_pass_the_check() -> None:
    leaf, x = network()
    target = torch.arange(N)
    fn = lambda x, y: x.pow(3).sum(1) * y  # noqa: E731  # as users write it
    value = eager_backward(fn, x, target, check=True, chunks=3)
    assert_same(gradients(value.sum(), leaf), gradients(fn(x, target).sum(), leaf))
    mean = eager_backward(lambda x: x.pow(2).mean(), x, check=True, chunks=3, reduction="mean")
    assert_same([mean], [x.pow(2).mean()])
    with pytest.warns(PackpropWarning, match="draws random numbers"):
        eager_backward(lambda x: F.dropout(x).sum(), x, check=True, chunks=3)


def test_an_input_to_recompute_from_that_was_changed_or_freed() -> None:
    x = network()[0].detach().requires_grad_()
    value = eager_backward(scalar, x, keep="recompute")
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(PackpropError) as error:
        value.backward()
    assert error.value.where == "the backward pass through the value"
    assert "changed in place after the call" in error.value.why
    assert "change a clone" in error.value.instead
    value = eager_backward(scalar, x, keep="recompute")
    x.untyped_storage().resize_(0)
    with pytest.raises(PackpropError) as error:
        value.backward()
    assert "shape [6, 3]" in error.value.where
    assert "freed after the call" in error.value.why


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_constant_that_was_changed_before_the_function_is_evaluated_again(kind: str) -> None:
    leaf, x = network()
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval()).double().requires_grad_(False)
    constant = critic[0].weight if kind == "parameter" else critic[1].running_var

    def fn(x: Tensor) -> Tensor:
        total: Tensor = critic(x).pow(2).sum()
        return total

    value, plain = eager_backward(fn, x, keep="recompute"), fn(x)
    critic[1].num_batches_tracked.add_(1)
    assert_same(gradients(value, leaf), gradients(plain, leaf))
    value = eager_backward(fn, x, keep="recompute")
    constant.mul_(2)
    with pytest.raises(PackpropError, match="changed in place after the call") as error:
        value.backward()
    assert ("critic.0.weight" if kind == "parameter" else "critic.1.running_var") in error.value.where


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_loop_whose_functions_are_evaluated_again_after_it(create_graph: bool) -> None:
    """All functions of the loop read the variable of its last round by then."""
    _, x = network()
    total, names = x.sum(), {}
    for names["factor"] in (2.0, 3.0):
        total = total + eager_backward(lambda x: (names["factor"] * x).pow(2).sum(), x, keep="recompute")
    with pytest.raises(PackpropError, match="the variable of a loop") as error:
        torch.autograd.grad(total, x, create_graph=create_graph)
    assert "<lambda>, evaluated again in the backward pass" in error.value.where


def test_a_function_that_draws_from_python_when_it_is_evaluated_again() -> None:
    _, x = network()
    value = eager_backward(lambda x: (random.random() * x).sum(), x, keep="recompute")
    with pytest.raises(PackpropError, match="draws numbers from Python or NumPy"):
        value.backward()


def test_a_function_that_reaches_other_tensors_when_recomputed() -> None:
    _, x = network()
    reach_for = [WEIGHT[0].detach().requires_grad_(), WEIGHT[1].detach().requires_grad_()]
    value = eager_backward(lambda x: (x * reach_for.pop()).sum(), x, keep="recompute")
    with pytest.raises(PackpropError, match="reaches other tensors by closure"):
        value.backward()
