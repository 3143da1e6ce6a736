"""Recurrent functions and cells: opened up into affine maps, at a cost that does not grow with the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.running import Counted
from tests.selection import one_in

ASKED = (extensions.BatchGrad, extensions.DiagGGNExact, extensions.KFLR)
STEPS, SIZE = 3, 4


class ByHand(nn.Module):
    """The same as a layer or a cell, step by step, in functions that are known to be affine."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.own = [getattr(layer, name) for name, _ in layer.named_parameters()]

    def forward(self, x: Tensor) -> Tensor:
        w_ih, w_hh, b_ih, b_hh = self.own
        h = c = x.new_zeros(len(x), SIZE)
        for step in x.unbind(1):
            ours, theirs = F.linear(step, w_ih, b_ih), F.linear(h, w_hh, b_hh)
            if self.kind == "LSTM":
                i, f, g, o = (ours + theirs).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            elif self.kind == "GRU":
                (r, z, n), (s, y, m) = ours.chunk(3, 1), theirs.chunk(3, 1)
                gate = (z + y).sigmoid()
                h = (1 - gate) * (n + (r + s).sigmoid() * m).tanh() + gate * h
            else:
                h = (ours + theirs).tanh()
        return h


class OfLayer(nn.Module):
    """The last state of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        last = self.layer(x)[1]
        return (last[0] if isinstance(last, tuple) else last)[0]


class OfCell(nn.Module):
    """The last state of a loop over a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


def networks(kind: str, is_cell: bool) -> tuple[nn.Module, nn.Module, list[nn.Parameter]]:
    """A layer, or a loop over a cell, and the same by hand with the same parameters."""
    make = getattr(nn, f"{kind}Cell" if is_cell else kind)
    layer = make(2, SIZE) if is_cell else make(2, SIZE, batch_first=True)
    layer = layer.double()
    model = (OfCell if is_cell else OfLayer)(layer)
    return packprop.extend(model), packprop.extend(ByHand(layer, kind)), list(layer.parameters())


@one_in(2)
@pytest.mark.parametrize("is_cell", [False, True], ids=["layer", "cell"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_factors_are_those_of_the_affine_maps(kind: str, is_cell: bool) -> None:
    """Kronecker factors, like everything else, are those of the same computation written by hand."""
    model, by_hand, parameters = networks(kind, is_cell)
    x, y = torch.randn(3, STEPS, 2).double(), torch.randn(3, SIZE).double()
    loss = packprop.extend(nn.MSELoss())
    found = []
    for network in (model, by_hand):
        with packprop.backpack(*(make() for make in ASKED)):
            loss(network(x), y).backward()
        found.append([(p.grad_batch, p.diag_ggn_exact, *p.kflr) for p in parameters])
    for ours, expected in zip(*found, strict=True):
        assert len(ours) == len(expected)
        for value, known in zip(ours, expected, strict=True):
            torch.testing.assert_close(value, known)


def calls_of_a_pass(model: nn.Module, samples: int, steps: int = STEPS) -> int:
    """How many torch functions are called in a pass for gradients of single samples, once samples are known."""
    x, loss = torch.randn(samples, steps, 2).double(), packprop.extend(nn.MSELoss())
    for _ in range(2):
        value = loss(model(x), torch.zeros(samples, SIZE).double())
        with Counted() as counted, packprop.backpack(extensions.BatchGrad()):
            value.backward()
    return counted.calls


@one_in(3)
@pytest.mark.parametrize("is_cell", [False, True], ids=["layer", "cell"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_work_is_shared_by_all_samples(kind: str, is_cell: bool) -> None:
    """No function is called once for each sample; twice the steps take at most twice the calls."""
    model, _, _ = networks(kind, is_cell)
    few = calls_of_a_pass(model, 2)
    assert calls_of_a_pass(model, 16) == few
    assert calls_of_a_pass(model, 2, 2 * STEPS) <= 2 * few


@one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("both", [False, True], ids=["one-direction", "both"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_dropout_between_layers_is_what_was_drawn(kind: Callable[..., Any], both: bool, dtype: Any) -> None:
    """Rows add up to the gradient of the very masks that the forward pass drew."""
    layer = kind(2, SIZE, num_layers=3, dropout=0.5, bidirectional=both, batch_first=True).to(dtype)
    head = nn.Linear(SIZE * (1 + both), 2).to(dtype)
    model = packprop.extend(nn.Sequential(layer, Taken(), head))
    x = torch.randn(5, STEPS, 2).to(dtype)
    state = torch.get_rng_state()
    output = model(x)
    torch.set_rng_state(state)
    assert torch.equal(output, head(layer(x)[0][:, -1]))  # recording has changed nothing
    before = torch.get_rng_state()
    with packprop.backpack(extensions.BatchGrad()):
        packprop.extend(nn.MSELoss())(output, torch.zeros_like(output)).backward()
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad, msg=name)


class Taken(nn.Module):
    """Of what a recurrent layer returns, the outputs at the last step."""

    def forward(self, returned: Any) -> Tensor:
        return returned[0][:, -1]
