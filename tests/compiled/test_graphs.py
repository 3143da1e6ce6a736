"""Graphs are smaller than what was traced, and compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from packprop import extensions
from packprop.applications.compiled.graphs import operations_of, tidy
from tests.compiled.steps import batch, compiled, network, settle
from tests.selection import thorough


def twice(x: Tensor) -> Tensor:
    return x.sin() + x.sin()


def there_and_back(x: Tensor) -> Tensor:
    return x.T.mT.unsqueeze(0).squeeze(0).detach() * 2


def written_between(x: Tensor) -> Tensor:
    y = x.clone()
    first = y.sin()
    y.add_(1)
    return first + y.sin()


def view_written_between(x: Tensor) -> Tensor:
    y = x.clone()
    first = y.sin()
    y[0].zero_()
    return first * y.sin()


def written_to_one(x: Tensor) -> Tensor:
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    first.add_(1)
    return first + second


def chunk_written_between(x: Tensor) -> Tensor:
    """As cells of recurrent layers write over their gates."""
    first = x.sin().unsafe_chunk(2, 1)[0].cos_()
    return first + x.sin().unsafe_chunk(2, 1)[0]


def drawn(x: Tensor) -> Tensor:
    return torch.rand_like(x) - torch.rand_like(x)


def numbers_of_other_types(x: Tensor) -> Tensor:
    return (x.long() * 1).sum() + (x.long() * 1.0).sum()


def product_and_back(x: Tensor) -> Tensor:
    """A product of three axes ends in a view that does not say that it is one."""
    return (x.view(3, 2, 2) @ torch.ones(2, 4)).view(6, 4) * 2


def summed_to_size(x: Tensor) -> Tensor:
    """It takes a size alone, too, and is no view."""
    return (x.sum(0, keepdim=True).expand(3, 4) * 1).sum_to_size(1, 4)


def reordered_unsafely(x: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_index(x, [torch.tensor([2, 0, 1])])


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (twice, None),
        (there_and_back, 1),
        (product_and_back, 5),
        (summed_to_size, None),
        (reordered_unsafely, None),
        (written_between, None),
        (view_written_between, None),
        (written_to_one, None),
        (chunk_written_between, None),
        (drawn, None),
        (numbers_of_other_types, None),
    ],
)
def test_tidy_graphs_compute_the_same(function: Callable[[Tensor], Tensor], operations: int | None) -> None:
    x = torch.randn(3, 4)
    graph = tidy(make_fx(function)(x))
    other = torch.randn(3, 4)
    torch.manual_seed(0)
    expected = function(other.clone())
    torch.manual_seed(0)
    assert torch.equal(graph(other.clone()), expected)
    if operations is not None:
        assert operations_of(graph) == operations


def test_equal_outputs_are_two_tensors() -> None:
    graph = tidy(make_fx(lambda x: (x.sin(), x.sin()))(torch.ones(2)))
    first, second = graph(torch.ones(2))
    assert first.data_ptr() != second.data_ptr()


@thorough
def test_columns_are_one_sweep() -> None:
    """As many operations for many classes as for few."""
    sizes = []
    for classes in (3, 12):
        model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, classes)).double()
        step = compiled(model, extensions.DiagGGNExact(), extensions.KFLR())
        settle(step)
        assert step.graph is not None
        sizes.append(len(step.graph.nodes))
    assert sizes[0] == sizes[1]


def test_a_step_says_what_was_traced() -> None:
    step = compiled(network(), extensions.BatchGrad())
    assert step.graph is None
    assert "not called yet" in str(step)
    step(*batch())
    assert "[5, 3] float64, [5] int64: eager; the next call is traced" in str(step)
    settle(step)
    said = str(step)
    assert "compiled step of Sequential: BatchGrad; backend 'eager'" in said
    assert "operations, traced in" in said
    assert "1 replays" in said
    step(*batch(4))
    assert "[4, 3] float64" in str(step)
