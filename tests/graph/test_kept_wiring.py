"""What one pass has shown is not kept for passes that differ in wiring, or in data that no node shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import Counted, assert_near, right_or_refused, rows_of_terms
from tests.selection import one_in

Change = Callable[[Tensor, bool], Tensor]
"""From activations ``[3, 3, 4]``, and whether samples meet, to others."""

HERE, THERE = torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])


def order(meet: bool) -> Tensor:
    return THERE if meet else HERE


def sparse(meet: bool, csr: bool = False) -> Tensor:
    matrix = torch.eye(3, dtype=torch.float64)[order(meet)]
    return matrix.to_sparse_csr() if csr else matrix.to_sparse()


class Taken(torch.autograd.Function):
    """Rows by an index that is kept as a tensor, or as a list of numbers."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, index: Tensor, as_numbers: bool) -> Tensor:
        ctx.index = index.tolist() if as_numbers else index
        return h[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        out = torch.zeros_like(gradients[0])
        out[ctx.index] = gradients[0]
        return out, None, None


WIRED: dict[str, Change] = {
    "outputs of unbind": lambda h, meet: torch.stack(
        [h.unbind(0)[1], h.unbind(0)[0], h.unbind(0)[2]] if meet else [*h.unbind(0)]
    ),
    "pieces": lambda h, meet: torch.cat([h.split(1)[int(i)] for i in order(meet)]),
    "pairs of pieces": lambda h, meet: torch.cat(
        [h.split(1)[i] + h.split(1)[(i + meet) % 3] for i in range(3)]
    ),
    "which branch": lambda h, meet: both(h, h.flip(0), meet),
    "one factor of two": lambda h, meet: h.flip(0).flip(0).sin() * (h.flip(0) if meet else h).cos(),
}

HIDDEN: dict[str, Change] = {
    "sparse matrix": lambda h, meet: torch.sparse.mm(sparse(meet), h.flatten(1)).view_as(h),
    "sparse product": lambda h, meet: (sparse(meet, csr=True) @ h.flatten(1)).view_as(h),
    "embedding": lambda h, meet: F.embedding(order(meet), h.flatten(1)).view_as(h),
    "bags": lambda h, meet: F.embedding_bag(order(meet)[:, None], h.flatten(1), mode="sum").view_as(h),
    "put": lambda h, meet: (
        torch.zeros(3, 12).double().put(torch.arange(36).view(3, 12)[order(meet)], h.flatten(1)).view_as(h)
    ),
    "masked": lambda h, meet: torch.zeros_like(h).masked_scatter(torch.ones_like(h) > 0, h[order(meet)]),
    "operator": lambda h, meet: torch.ops.aten.index_select(h, 0, order(meet)),
    "vmap": lambda h, meet: torch.func.vmap(lambda i: h.index_select(0, i[None])[0])(order(meet)),
    "own function, tensor": lambda h, meet: Taken.apply(h, order(meet), False),
    "own function, numbers": lambda h, meet: Taken.apply(h, order(meet), True),
}


def both(h: Tensor, flipped: Tensor, meet: bool) -> Tensor:
    return flipped.flip(0) + (flipped if meet else h)


class Changing(nn.Module):
    """A layer, something that may mix the samples, and a head."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change, self.meet = change, False
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(torch.tanh(self.first(x)), self.meet)).sum(1)


@one_in(3)
@pytest.mark.parametrize("name", WIRED | HIDDEN)
def test_a_pass_that_mixes_after_one_that_does_not(name: str) -> None:
    torch.manual_seed(0)
    model = packprop.extend(Changing((WIRED | HIDDEN)[name]).double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 3, 3).double(), torch.tensor([0, 1, 1])

    def step() -> Tensor:
        model.zero_grad()
        with packprop.backpack(extensions.BatchGrad()):
            loss(model(x), y).backward()
        found: Tensor = model.first.weight.grad_batch
        return found

    first = step()
    assert first.shape == (3, 4, 3)
    torch.testing.assert_close(step(), first)
    model.meet = True
    with right_or_refused("sample"):
        terms = F.cross_entropy(model(x), y, reduction="none") / 3
        (rows, *_) = rows_of_terms(terms, model.parameters())
        assert_near(step(), rows, "samples in another order")
    model.meet = False
    torch.testing.assert_close(step(), first)


def test_what_a_loss_of_ones_own_takes_is_looked_at_anew() -> None:
    torch.manual_seed(0)
    model, x = packprop.extend(nn.Linear(3, 2).double()), torch.randn(3, 3).double()
    for meet in (False, True, False):
        with packprop.backpack(extensions.BatchGrad()):
            f = torch.tanh(model(x))
            value = (f * f[order(meet)]).sum()
            if meet:
                with pytest.raises(PackpropError, match="mix"):
                    value.backward()
            else:
                value.backward()


def test_other_extended_models_cost_a_later_pass_nothing() -> None:
    torch.manual_seed(0)
    model, x = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), torch.randn(5, 3)
    loss = packprop.extend(nn.MSELoss())

    def calls_of_the_third_pass() -> int:
        for _ in range(3):
            value = loss(model(x), torch.zeros(5, 2))
            with Counted() as counted, packprop.backpack(extensions.BatchGrad()):
                value.backward()
        return counted.calls

    alone = calls_of_the_third_pass()
    others = [packprop.extend(nn.Linear(2, width)) for width in range(1, 9)]
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    assert calls_of_the_third_pass() == alone
    assert others
