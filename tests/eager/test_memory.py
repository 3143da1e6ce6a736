"""The branch is freed at once, and nothing holds on to more than it needs."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from packprop.engine.eager import eager_backward
from tests.eager.branches import KEEPS, WEIGHT, D, N, assert_same, gradients, kept, network, per_sample
from tests.selection import one_in


class Witness(torch.autograd.Function):
    """An autograd function that multiplies by 2, and notes when its saved tensor is freed."""

    saved: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scratch = x.clone()
        ctx.save_for_backward(scratch)
        Witness.saved.append(weakref.ref(scratch.untyped_storage()))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.fixture
def no_collector() -> Any:
    """Switch the garbage collector off: what is freed is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def storages() -> int:
    return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))


@one_in(2)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 3])
def test_the_branch_is_freed_at_once(keep: str, chunks: int | None) -> None:
    _, x = network()
    alive: list[int] = []

    def fn(x: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in intermediate))
        y = (x @ WEIGHT.T).exp()
        intermediate.append(weakref.ref(y))
        return Witness.apply(y).pow(2).sum()

    intermediate: list[weakref.ref] = []
    Witness.saved.clear()
    value = eager_backward(fn, x, keep=keep, chunks=chunks)
    assert alive == [0] * (chunks or 1)
    assert [ref() for ref in intermediate] == [None] * (chunks or 1)
    value.backward()
    assert [ref() for ref in intermediate] == [None] * len(intermediate)


@pytest.mark.usefixtures("no_collector")
def test_the_input_is_freed_too() -> None:
    leaf, _ = network()
    x = leaf + 1  # an addition saves nothing
    alive = weakref.ref(x)
    value = eager_backward(per_sample, x)
    assert [tuple(t.shape) for t in kept(value)] == [(N, D)]
    del x
    assert alive() is None
    value.sum().backward()
    assert_same([leaf.grad], gradients(per_sample(leaf + 1).sum(), leaf))


@one_in(3)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("keep", KEEPS)
def test_many_steps_leave_nothing_behind(keep: str) -> None:
    h = torch.ones(D, dtype=torch.float64, requires_grad=True)

    def step() -> None:
        _, x = network()
        held = h * 2
        value = eager_backward(lambda t: (t * held * WEIGHT[0]).pow(2).sum(), x, keep=keep)
        (x.sum() + 3 * value).backward()

    step()
    before = storages()
    for _ in range(20):
        step()
    assert storages() == before
    WEIGHT.grad = None


def test_a_gradient_that_is_a_part_of_more_is_copied_out() -> None:
    _, x = network()
    value = eager_backward(lambda x: torch.cat([x.detach().expand(9, N, D).reshape(-1, D), x]).pow(2).sum(), x)
    assert kept(value)[0].untyped_storage().nbytes() == N * D * 8
    value = eager_backward(lambda x: x.sum(), x)  # one number, expanded
    assert kept(value)[0].untyped_storage().nbytes() == 8


def test_the_value_does_not_hold_on_to_more_than_itself() -> None:
    _, x = network()
    value = eager_backward(lambda x: x.pow(2)[:, 1], x)
    assert value.untyped_storage().nbytes() == N * 8
    value = eager_backward(lambda x: x[:, 1], x)
    with torch.no_grad():
        before = value.clone()
        x.zero_()
    assert_same([value], [before])
