"""Values and gradients of `eager_backward` are those of plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.eager import eager_backward
from tests.eager.branches import (
    KEEPS,
    WEIGHT,
    D,
    N,
    assert_same,
    gradients,
    network,
    per_sample,
    per_sample_shared,
    scalar,
)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 1, 4, 99])
@pytest.mark.parametrize("factor", [1.0, -3.5])
def test_scalar_equals_plain(keep: str, chunks: int | None, factor: float) -> None:
    leaf, x = network()
    plain = scalar(x)
    value = eager_backward(scalar, x, chunks=chunks, keep=keep)
    assert_same([value], [plain])
    assert_same(gradients(factor * value, leaf, WEIGHT), gradients(factor * plain, leaf, WEIGHT))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("chunks", "axes"), [(None, 0), (4, 0), (2, 1), (3, -1)])
def test_a_value_per_sample_is_scaled_per_sample(keep: str, chunks: int | None, axes: int) -> None:
    def separable(x: Tensor) -> Tensor:
        return x.pow(3).sum(1)

    leaf, x = network()
    alpha = torch.linspace(-2, 3, N, dtype=torch.float64)
    plain = separable(x)
    value = eager_backward(separable, x, chunks=chunks, axes=axes, keep=keep)
    assert_same([value], [plain])
    assert_same(gradients(alpha @ value, leaf), gradients(alpha @ plain, leaf))


def test_the_scale_is_decided_at_the_end_of_the_network() -> None:
    leaf, x = network()
    plain_x = x
    penalties = []
    for _ in range(3):
        penalties.append(eager_backward(per_sample, x))
        x = x.tanh() @ torch.eye(D, dtype=torch.float64) * 1.3
    scale = x.pow(2).sum(1)  # part of the graph, known only now
    loss = x.sum() + sum((scale * penalty).sum() for penalty in penalties)
    x, plain = plain_x, []
    for _ in range(3):
        plain.append(per_sample(x))
        x = x.tanh() @ torch.eye(D, dtype=torch.float64) * 1.3
    scale = x.pow(2).sum(1)
    wanted = x.sum() + sum((scale * penalty).sum() for penalty in plain)
    assert_same(gradients(loss, leaf), gradients(wanted, leaf))


@pytest.mark.parametrize("chunks", [None, 4])
def test_weights_given_in_advance_are_right_for_parameters(chunks: int | None) -> None:
    leaf, x = network()
    weights = torch.linspace(-1, 2, N, dtype=torch.float64, requires_grad=True)
    value = eager_backward(per_sample_shared, x, weights=weights, chunks=chunks)
    plain = (weights * per_sample_shared(x)).sum()
    of = (leaf, WEIGHT, weights)
    assert_same([value], [plain])
    assert_same(gradients(5 * value, *of), gradients(5 * plain, *of))


@pytest.mark.parametrize("chunks", [None, 4])
def test_recomputation_scales_shared_tensors_per_sample(chunks: int | None) -> None:
    leaf, x = network()
    alpha = torch.linspace(-1, 2, N, dtype=torch.float64)
    value = eager_backward(per_sample_shared, x, keep="recompute", chunks=chunks)
    plain = per_sample_shared(x)
    assert_same(gradients(alpha @ value, leaf, WEIGHT), gradients(alpha @ plain, leaf, WEIGHT))


def test_pytrees_constants_and_integers() -> None:
    def fn(pair: tuple[Tensor, dict[str, Any]], index: Tensor, *, power: int, extra: Any) -> Tensor:
        a, named = pair
        return (a.pow(power) * named["b"][0])[index].sum() + extra["c"].sum() + len(named["name"])

    leaf, x = network()
    b = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    c = torch.randn(2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 2, 2])
    arguments = ((x, {"b": [b], "name": "four"}), index)
    named = {"power": 3, "extra": {"c": c}}
    for keep in KEEPS:
        value = eager_backward(fn, keep=keep)(*arguments, **named)
        plain = fn(*arguments, **named)
        assert_same([value], [plain])
        assert_same(gradients(2 * value, leaf, b, c), gradients(2 * plain, leaf, b, c))


def test_inputs_that_need_no_gradient() -> None:
    target = torch.randn(N, D, dtype=torch.float64)
    leaf, x = network()
    value = eager_backward(F.mse_loss, x, target)
    assert_same(gradients(value, leaf), gradients(F.mse_loss(x, target), leaf))
    assert not eager_backward(F.mse_loss, target, target + 1).requires_grad
    parameters_only = eager_backward(scalar, target)
    assert_same(gradients(parameters_only, WEIGHT), gradients(scalar(target), WEIGHT))


def test_one_tensor_passed_twice_and_also_reached() -> None:
    leaf, x = network()
    fn = lambda a, b: (a * b * x.cos()).sum()  # noqa: E731  # as users write it
    assert_same(gradients(eager_backward(fn, x, x), leaf), gradients(fn(x, x), leaf))
    layer = lambda w: (w * WEIGHT.exp()).sum()  # noqa: E731  # as users write it
    assert_same(gradients(eager_backward(layer, WEIGHT), WEIGHT), gradients(layer(WEIGHT), WEIGHT))


def test_an_input_or_a_leaf_returned_as_it_is() -> None:
    leaf = torch.tensor(2.0, requires_grad=True)
    assert_same(gradients(3 * eager_backward(lambda t: t, leaf), leaf), [torch.tensor(3.0)])
    value = eager_backward(lambda t: leaf, torch.ones(1))
    assert_same(gradients(value, leaf), [torch.tensor(1.0)])
    activation = leaf * 5
    value = eager_backward(lambda t: activation, torch.ones(1))
    assert_same(gradients(value, leaf), [torch.tensor(5.0)])


def test_complex_inputs() -> None:
    leaf = torch.randn(N, D, dtype=torch.complex128, requires_grad=True)
    for fn in (lambda z: z.abs().pow(3).sum(), lambda z: (z * z.conj()).real.sum(1)):
        plain = fn(leaf)
        alpha = torch.ones_like(plain) * 3
        value = eager_backward(fn, leaf, keep=torch.float32)
        assert_same(gradients((alpha * value).sum(), leaf), gradients((alpha * plain).sum(), leaf))


@pytest.mark.parametrize("keep", ["exact", "recompute"])
def test_gradcheck(keep: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return eager_backward(lambda x: (x @ w).tanh().pow(2).sum(), x, keep=keep)

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fn, (x, w))
    if keep == "recompute":
        assert torch.autograd.gradgradcheck(fn, (x, w))
