"""Several batches in one pass, and rows that are left out: refused where nothing says which belong together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError

Shape = tuple[int, ...]


def layer(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return packprop.extend(nn.Linear(inputs, outputs).double())


def shape_of(model: nn.Module, run: Callable[[], Tensor]) -> Shape:
    with packprop.backpack(extensions.BatchGrad()):
        run().backward()
    weight = next(model.parameters())
    return tuple(weight.grad_batch.shape)


def classes(rows: int) -> Tensor:
    return torch.arange(rows) % 2


@pytest.mark.parametrize(("one", "other"), [(4, 2), (4, 8), (32, 64), (1, 8), (8, 1), (5, 3)])
def test_two_losses_of_batches_of_other_sizes(one: int, other: int) -> None:
    model = layer()
    first, second = packprop.extend(nn.CrossEntropyLoss()), packprop.extend(nn.MSELoss())
    x, z = torch.randn(one, 3).double(), torch.randn(other, 3).double()
    with pytest.raises(PackpropError):
        shape_of(
            model, lambda: first(model(x), classes(one)) + second(model(z), torch.zeros(other, 2).double())
        )


def test_batches_of_one_size_are_the_same_samples() -> None:
    model = layer()
    first, second = packprop.extend(nn.CrossEntropyLoss()), packprop.extend(nn.MSELoss())
    x, z = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    found = shape_of(model, lambda: first(model(x), classes(4)) + second(model(z), torch.zeros(4, 2).double()))
    assert found == (4, 2, 3)


@pytest.mark.parametrize("pooled", [True, False])
def test_rows_that_meet_are_of_one_sample(pooled: bool) -> None:
    """Frames of a video, folded into the rows of one call."""
    below, head, x = layer(3, 4), layer(4, 2), torch.randn(4, 5, 3).double()

    def run() -> Tensor:
        with packprop.record():
            h = below(x.flatten(0, 1)).tanh().view(4, 5, 4)
            if pooled:
                return F.cross_entropy(head(h.mean(1)), classes(4))
            return F.cross_entropy(head(h.cumsum(1)).flatten(0, 1), classes(20))

    assert shape_of(below, run) == (4, 4, 3)


@pytest.mark.parametrize("samples", [1, 4])
def test_steps_that_meet_are_of_one_sample(samples: int) -> None:
    cell, head = packprop.extend(nn.GRUCell(3, 4).double()), layer(4, 2)
    x = torch.randn(samples, 5, 3).double()

    def run() -> Tensor:
        with packprop.record():
            state, outputs = x.new_zeros(samples, 4), []
            for step in x.unbind(1):
                state = cell(step, state)
                outputs.append(head(state))
            return F.cross_entropy(torch.stack(outputs, 1).flatten(0, 1), classes(5 * samples))

    assert shape_of(cell, run) == (samples, 12, 3)
