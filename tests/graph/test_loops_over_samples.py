"""Models that take their inputs apart: one sample at a time, or one step at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError, PackpropWarning
from tests.graph.one_by_one import check
from tests.selection import one_in


class Loop(nn.Module):
    """Layers that see one entry of the leading axis at a time."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(positions, 4))
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.stack([self.layer(entry * self.scale).tanh() for entry in x.unbind(0)])
        return self.head(h).reshape(-1, 2)


def problem(positions: int) -> tuple[Loop, Tensor, Tensor]:
    torch.manual_seed(positions)
    return Loop(positions).double(), torch.randn(3, positions, 4).double(), torch.randint(2, (3, positions))


def observe(model: nn.Module, x: Tensor, y: Tensor, *asked: Any, **options: Any) -> None:
    packprop.extend(model, **options)
    loss = packprop.extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y.flatten())
    with packprop.backpack(*asked):
        loss.backward()


@pytest.mark.parametrize("positions", [3, 5], ids=["as-many-positions", "more-positions"])
@pytest.mark.parametrize("axis", [0, 1], ids=["samples", "steps"])
def test_what_was_declared_is_taken(positions: int, axis: int) -> None:
    if axis == 1:  # the parameter belongs to positions: here to samples
        positions = 3
    model, x, y = problem(positions)
    targets = y.movedim(axis, 0)

    def term(n: int) -> Tensor:
        out = model(x).view(3, positions, 2).movedim(axis, 0)
        return F.cross_entropy(out[n], targets[n], reduction="sum")

    rows = {
        name: torch.stack([torch.autograd.grad(term(n), parameter)[0] for n in range(x.shape[axis])])
        for name, parameter in model.named_parameters()
    }
    observe(model, x, y, extensions.BatchGrad(), extensions.Variance(), sample_axis=axis)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_batch, rows[name])
        torch.testing.assert_close(parameter.variance, rows[name].var(0, unbiased=False))


HANDED_ON: dict[str, Any] = {
    "diff": lambda w: torch.diff(w, n=0, prepend=torch.zeros(1).double()),
    "diff once": lambda w: torch.diff(w, prepend=torch.zeros(1).double()),
    "roll": lambda w: w.roll(0),
    "dropout": lambda w: F.dropout(w, 0.0),
    "cat": lambda w: torch.cat([w]),
    "positive": lambda w: +w,
    "contiguous": lambda w: w.contiguous(),
    "to": lambda w: w.to(w.dtype),
    "pad": lambda w: F.pad(w, (0, 0)),
    "rot90": lambda w: w.view(2, 2).rot90(0).flatten(),
    "broadcast": lambda w: torch.broadcast_tensors(w, torch.zeros(4))[0],
}


@one_in(2)
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", HANDED_ON)
def test_functions_that_may_hand_their_argument_on(name: str, declared: bool) -> None:
    """What they return may be the parameter itself, or a view: each sample has its own share of its use."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4).double())

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row * HANDED_ON[name](self.weight) for row in x])

    model = packprop.extend(Rows(), **(dict(sample_axis=0) if declared else {}))
    x, y = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    with packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()
    rows = [
        torch.autograd.grad(loss(model(one), target), weight)[0]
        for one, target in zip(x.split(1), y.split(1), strict=True)
    ]
    torch.testing.assert_close(weight.grad_batch, torch.stack(rows))


class OneNumber(nn.Module):
    """A weight of one entry, which meets samples of one entry one after the other."""

    def __init__(self, dims: int, pools: bool) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn([1] * dims)), nn.Linear(1, 2)
        self.pools = pools

    def forward(self, x: Tensor) -> Tensor:
        h = x.mean(1, keepdim=True) if self.pools else x[:, :1]
        if self.scale.dim():
            return torch.as_tensor(self.layer(torch.cat([one * self.scale for one in h.split(1)])))
        return torch.as_tensor(self.layer(torch.stack([one * self.scale for one in h.flatten()])[:, None]))


@pytest.mark.parametrize("pools", [False, True], ids=["inputs", "what was made of them"])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("samples", [1, 3])
def test_samples_of_one_entry(samples: int, dims: int, pools: bool) -> None:
    """What a node made may be too small for all samples, and still hold one of them."""
    torch.manual_seed(0)
    check(OneNumber(dims, pools).double(), torch.randn(samples, 4).double())


def test_samples_that_are_numbers_are_refused_or_warned_of() -> None:
    """The graph does not tell numbers that data made from constants such as 0.5."""
    torch.manual_seed(0)
    loss, x, y = packprop.extend(nn.MSELoss()), torch.randn(3, 4), torch.randn(3, 2)
    for pools, expected in (
        (False, pytest.raises(PackpropError, match="no axis of samples")),
        (True, pytest.warns(PackpropWarning, match="numbers that you take from data")),
    ):
        model = packprop.extend(OneNumber(0, pools))
        with expected, packprop.backpack(extensions.BatchGrad()):
            loss(model(x), y).backward()
        assert not hasattr(model.scale, "grad_batch")


def test_the_curvature_of_samples_one_at_a_time() -> None:
    found = []
    for declared in (True, False):
        model, x, y = problem(5)
        if not declared:  # the same layers on all samples at once
            model.forward = lambda x, own=model: own.head(own.layer(x * own.scale).tanh()).reshape(-1, 2)
        asked = extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.BatchDiagGGNExact()
        observe(model, x, y, *asked, **(dict(sample_axis=0) if declared else {}))
        found.append([getattr(p, each.savefield) for p in model.parameters() for each in asked])
    torch.testing.assert_close(found[0], found[1])


def test_steps_that_meet_are_no_samples() -> None:
    """The loss takes the steps first: the axis of the samples is declared."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h, states = x.new_zeros(x.shape[1], 3), []
            for step in x.unbind(0):
                h = self.cell(step, h)
                states.append(h)
            return self.head(torch.stack(states)).reshape(-1, 2)

    torch.manual_seed(0)
    model, x, y = Recurrent().double(), torch.randn(5, 3, 4).double(), torch.randint(2, (5, 3))
    rows = [
        torch.autograd.grad(
            F.cross_entropy(model(x[:, n : n + 1]), y[:, n], reduction="sum"), model.head.weight
        )
        for n in range(3)
    ]
    observe(model, x, y, extensions.BatchGrad(), sample_axis=1)
    torch.testing.assert_close(model.head.weight.grad_batch, torch.stack([row for (row,) in rows]))
