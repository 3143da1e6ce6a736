"""Reentrant checkpoints are refused by name: autograd's graph does not show what is in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import ROWS, Row, generator

again = partial(checkpoint, use_reentrant=True)


class Net(nn.Module):
    """A model with a checkpoint in one of several places."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


PLACES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layers": lambda m, x: m.last(again(m.inner, m.first(x))),
    "no parameters": lambda m, x: m.last(m.inner(again(torch.tanh, m.first(x)))),
    "the first block": lambda m, x: m.last(m.inner(again(m.first, x))),
    "a parameter as an argument": lambda m, x: m.last(again(F.linear, m.first(x), m.inner.weight)),
    "another checkpoint": lambda m, x: m.last(
        checkpoint(lambda h: again(m.inner, h), m.first(x), use_reentrant=False)
    ),
}


def refused(loss: Tensor, model: nn.Module, *asked: Any, **options: Any) -> None:
    """Nothing is computed, and the error says what to write."""
    with pytest.raises(PackpropError) as raised, packprop.backpack(*asked):
        loss.backward(**options)
    for word in ("torch.utils.checkpoint", "reentrant", "use_reentrant=False", "gradient_checkpointing_enable"):
        assert word in str(raised.value)
    assert all(p.grad is None and not vars(p) for p in model.parameters())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"create_graph": True}], ids=["plain", "create-graph"])
def test_wherever_it_is(place: str, options: dict[str, Any]) -> None:
    model = packprop.extend(Net(PLACES[place]))
    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(5, 2)
    refused(packprop.extend(nn.MSELoss())(model(x), y), model, extensions.BatchGrad(), **options)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_extension(row: Row) -> None:
    model = packprop.extend(Net(PLACES["layers"]))
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(5, 3)), torch.randint(2, (5,)))
    refused(loss, model, row(generator()))


def test_around_the_loss() -> None:
    model = packprop.extend(nn.Linear(3, 2))
    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(5, 2)
    refused(again(lambda x: F.mse_loss(model(x), y), x), model, extensions.BatchGrad())


def test_a_pass_without_extensions_is_a_plain_one() -> None:
    model = packprop.extend(Net(PLACES["layers"]))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    with packprop.backpack():
        F.mse_loss(model(x), y).backward()
    plain = F.mse_loss(model.last(model.inner(model.first(x))), y)
    gradients = torch.autograd.grad(plain, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
