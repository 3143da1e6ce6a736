"""Groups of rows as samples: graphs of different sizes, and pairs; inputs that are objects of any class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.running import assert_near

SIZES = (3, 5, 1, 2)


class Graphs:
    """A batch of graphs, as libraries for these hold it."""

    def __init__(self, store: Any) -> None:
        self.store = store


def graphs() -> tuple[Graphs, Tensor]:
    """Nodes, edges within each graph, and the graph of each node."""
    torch.manual_seed(0)
    starts = torch.tensor(SIZES).cumsum(0) - torch.tensor(SIZES)
    edges = [torch.randint(size, (2, 2 * size)) + start for size, start in zip(SIZES, starts, strict=True)]
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    nodes = torch.randn(sum(SIZES), 3).double()
    return Graphs({"x": nodes, "edges": torch.cat(edges, 1), "owner": owner}), owner


class Messages(nn.Module):
    """Two rounds of messages along edges, and a head for each node or each graph."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, batch: Graphs, scale: Tensor | None = None) -> Tensor:
        h, (start, end) = batch.store["x"], batch.store["edges"]
        h = h if scale is None else h * scale
        for layer in (self.first, self.second):
            sent = layer(h)
            h = (sent + torch.zeros_like(sent).index_add(0, end, sent[start])).tanh()
        if self.pooled:
            h = h.new_zeros(len(SIZES), 4).index_add(0, batch.store["owner"], h)
        out: Tensor = self.head(h)
        return out


def check(model: nn.Module, loss: Callable[[], Tensor], terms: Callable[[], Tensor]) -> None:
    """Gradients of samples are those of their terms."""
    with packprop.backpack(extensions.BatchGrad(), extensions.Variance()):
        loss().backward()
    with packprop.disable():
        apart = terms()
    for name, parameter in model.named_parameters():
        rows = torch.stack([torch.autograd.grad(term, parameter, retain_graph=True)[0] for term in apart])
        assert_near(parameter.grad_batch, rows, name)
        assert_near(parameter.variance, rows.var(0, unbiased=False), name)


@pytest.mark.parametrize("with_tensor", [False, True])
def test_one_term_for_each_graph(with_tensor: bool) -> None:
    batch, owner = graphs()
    model, y = packprop.extend(Messages(True).double()), torch.tensor([0, 1, 1, 0])
    given = (batch, torch.rand(len(owner), 1).double()) if with_tensor else (batch,)
    loss = packprop.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        check(
            model,
            lambda: loss(model(*given), y),
            lambda: F.cross_entropy(model(*given), y, reduction="none") / len(y),
        )


def test_one_term_for_each_node() -> None:
    """The graphs are the samples, by the number of the graph of each node."""
    batch, owner = graphs()
    model, y = packprop.extend(Messages(False).double()), torch.arange(len(owner)) % 2

    def loss() -> Tensor:
        with packprop.record(documents=owner):
            return F.cross_entropy(model(batch), y)

    def terms() -> Tensor:
        each = F.cross_entropy(model(batch), y, reduction="none") / len(y)
        return torch.zeros(len(SIZES)).to(each).index_add(0, owner, each)

    check(model, loss, terms)


class Preference(nn.Module):
    """A loss of pairs: the first half of the rows is preferred to the second one."""

    def forward(self, scores: Tensor, strength: float) -> Tensor:
        better, worse = scores.chunk(2)
        return -F.logsigmoid(strength * (better - worse)).mean()


def test_pairs_in_one_concatenated_pass() -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double())
    x, pairs, preference = torch.randn(8, 3).double(), torch.arange(4).repeat(2), packprop.extend(Preference())

    def loss() -> Tensor:
        with packprop.record(documents=pairs):
            value: Tensor = preference(model(x), 0.5)
        return value

    def terms() -> Tensor:
        better, worse = model(x).chunk(2)
        return -F.logsigmoid(0.5 * (better - worse)) / 4

    check(model, loss, terms)


@pytest.mark.parametrize("nested", [False, True])
def test_arithmetic_knows_no_groups(nested: bool) -> None:
    """What the error advises is done above, by ``Preference``."""
    batch, owner = graphs()
    model = packprop.extend(Messages(False).double())
    told = pytest.raises(packprop.BadInput, match=r"packprop knows was called[^$]*packprop\.extend\(MyLoss")
    with packprop.record() if nested else nullcontext(), told, packprop.record(documents=owner):
        model(batch).square().sum()
    with torch.no_grad(), packprop.record(documents=owner):
        model(batch).square().sum()
