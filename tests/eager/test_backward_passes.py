"""Backward passes through a branch: several, partial, differentiated again, with hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from packprop.engine.eager import eager_backward
from packprop.errors import PackpropError
from tests.eager.branches import KEEPS, WEIGHT, N, assert_same, gradients, network, per_sample, scalar


def test_an_input_may_be_changed_in_place_afterwards() -> None:
    leaf, _ = network()
    x = leaf + 1
    value = eager_backward(per_sample, x)
    x.zero_()
    assert_same(gradients(value.sum(), leaf), gradients(per_sample(leaf + 1).sum(), leaf))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 3])
def test_several_backward_passes(keep: str, chunks: int | None) -> None:
    leaf = network()[0].detach().requires_grad_()
    value = eager_backward(scalar, leaf, keep=keep, chunks=chunks)
    (plain,) = gradients(scalar(leaf), leaf)
    for times in (1, 2, 3):
        value.backward(retain_graph=times < 3, inputs=[leaf])
        assert_same([leaf.grad], [times * plain])
    with pytest.raises(PackpropError) as error:
        value.backward()
    assert error.value.where == "a second backward pass through the value"
    assert "released the kept gradient" in error.value.why
    assert "retain_graph=True" in error.value.instead


def test_two_values_of_one_call_share_the_kept_gradient() -> None:
    leaf, x = network()
    value = eager_backward(scalar, x, chunks=2)
    plain = scalar(x)
    assert_same(gradients(value * 3 + value.exp(), leaf), gradients(plain * 3 + plain.exp(), leaf))


def test_backward_inputs() -> None:
    leaf, x = network()
    value = eager_backward(scalar, x)
    WEIGHT.grad = None
    value.backward(inputs=[leaf], retain_graph=True)
    assert WEIGHT.grad is None
    assert_same([leaf.grad], gradients(scalar(x), leaf))


def test_create_graph_by_recomputation() -> None:
    for chunks in (None, 3):
        leaf, x = network()
        results = []
        for value in (eager_backward(scalar, x, keep="recompute", chunks=chunks), scalar(x)):
            first = torch.autograd.grad(value.pow(2), [leaf, WEIGHT], create_graph=True)
            second = sum(gradient.pow(2).sum() for gradient in first)
            results.append([*first, *gradients(second, leaf, WEIGHT)])
        assert_same(*results)


def test_create_graph_of_kept_numbers_is_refused() -> None:
    leaf, x = network()
    value = eager_backward(scalar, x)
    with pytest.raises(PackpropError) as error:
        torch.autograd.grad(value, leaf, create_graph=True)
    assert "create_graph=True" in error.value.where
    assert "keep='recompute'" in error.value.instead


@pytest.mark.parametrize("keep", ["exact", "recompute"])
def test_a_hook_changes_the_gradient_on_its_way(keep: str) -> None:
    def clip(gradient: Tensor) -> Tensor:
        norm = gradient.norm(dim=1, keepdim=True)
        return gradient / norm.clamp(min=0.5) * 0.5

    leaf, x = network()
    alpha = torch.linspace(0, 2, N, dtype=torch.float64)
    value = eager_backward(per_sample, x, hook=clip, keep=keep)
    (unclipped,) = gradients(alpha @ per_sample(x), x)
    (plain,) = torch.autograd.grad(x, leaf, clip(unclipped), retain_graph=True)
    assert_same(gradients(alpha @ value, leaf), [plain])


@pytest.mark.parametrize("chunks", [None, 2])
def test_a_hook_that_fails_may_be_tried_again(chunks: int | None) -> None:
    leaf, x = network()
    errors = [ValueError("once")]

    def hook(gradient: Tensor) -> None:
        if errors:
            raise errors.pop()

    value = eager_backward(scalar, x, chunks=chunks, hook=hook)
    with pytest.raises(ValueError, match="once"):
        (0.5 * value).backward()
    assert_same(gradients(0.5 * value, leaf), gradients(0.5 * scalar(x), leaf))


def test_a_hook_sees_inputs_only_and_may_leave_them() -> None:
    leaf, x = network()
    seen = []
    value = eager_backward(
        lambda a, n, b: (a * b).sum() + scalar(a), x, 3, leaf, hook=lambda *g: seen.append(g)
    )
    plain = gradients((x * leaf).sum() + scalar(x), leaf, WEIGHT)
    assert_same(gradients(value, leaf, WEIGHT), plain)
    assert [len(g) for g in seen] == [2]
    value = eager_backward(lambda a, b: (a * b).sum(), x, leaf, hook=lambda a, b: (a * 0, b * 2))
    assert_same(gradients(value, leaf), [2 * x])
