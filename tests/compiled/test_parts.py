"""Tensors that are written part by part, put together in one operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from packprop.applications.compiled.parts import put_together

X = torch.arange(24.0).reshape(4, 6)


def by_copies(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    room[:1].copy_(x[:1])
    room[1:4].copy_(x[1:4] * 2)
    return room + 1


def by_products(x: Tensor) -> tuple[Tensor, Tensor]:
    room = x.new_empty(1, 4, 2, 3, 2)
    total = x.new_zeros(2, 6)
    for start, stop in ((0, 3), (3, 4)):
        part = room[:, start:stop]
        left, right = x[start:stop].view(-1, 2, 3), x[start:stop].view(-1, 3, 2).repeat(1, 1, 3)
        torch.bmm(left, right, out=part.view(-1, 2, 6))
        total = total + part.view(-1, 2, 6).sum(0)
    return room[0].flatten(1), total


def changed_source(x: Tensor) -> tuple[Tensor, Tensor]:
    room, source = x.new_empty(4, 6), x[:2] + 1
    room[:2].copy_(source)
    source.add_(1)
    room[2:].copy_(source)
    return room, source


def through_a_write(x: Tensor) -> Tensor:
    room = x.new_empty(2, 6)
    first = room[:1].copy_(x[:1])
    second = room[1:].copy_(x[1:2])
    return torch.cat([first * 2, second * 3])


@pytest.mark.parametrize("function", [by_copies, by_products, changed_source, through_a_write])
def test_parts_become_one_tensor(function: Callable[[Tensor], Tensor]) -> None:
    check(function, written=False)


def left_out(x: Tensor) -> Tensor:
    room = torch.zeros_like(x.new_empty(4, 6))
    room[:1].copy_(x[:1])
    room[2:].copy_(x[2:])
    return room


def overlapping(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    room[:3].copy_(x[:3])
    room[1:].copy_(x[1:] * 2)
    return room


def written_twice(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    room[:2].copy_(x[:2])
    room[2:].copy_(x[2:])
    room[:2].add_(1)
    return room


def whole_is_written(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    first = room[:2]
    first.copy_(x[:2])
    room[2:].copy_(x[2:])
    room.mul_(3)
    return first + room.sum()


def broadcast(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    room[:2].copy_(x[0])
    room[2:].copy_(x[1])
    return room


def another_precision(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    room[:2].copy_(x[:2].double())
    room[2:].copy_(x[2:].double())
    return room


def strided(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    first = room[:2]
    first.copy_(x[:2])
    room[2:].copy_(x[2:])
    return first.as_strided((4, 6), (6, 1))


def two_axes(x: Tensor) -> Tensor:
    room = x.new_empty(4, 6)
    room[:2].copy_(x[:2])
    room[2:].copy_(x[2:])
    return room[:, 1:3] + 1


@pytest.mark.parametrize(
    "function",
    [left_out, overlapping, written_twice, whole_is_written, broadcast, another_precision, strided, two_axes],
)
def test_others_are_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    check(function, written=True)


def check(function: Callable[[Tensor], Tensor], *, written: bool) -> None:
    """The graph does what it did, and writes in place as far as it must."""
    graph: GraphModule = make_fx(function)(X)
    put_together(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(X), function(X))
    targets = [str(node.target) for node in graph.graph.nodes]
    assert any(name.startswith(("aten.copy_.", "aten.bmm.out")) for name in targets) == written
