"""Recurrent networks."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


class Recurrent(nn.Module):
    """A recurrent layer read at its last step (or through its final state) by a head."""

    def __init__(self, layer: nn.Module, features: int, final: bool = False) -> None:
        super().__init__()
        self.rnn, self.final = layer, final
        self.head = nn.Linear(features, 3)

    def forward(self, x: Tensor, *state: Tensor) -> Tensor:
        y, last = self.rnn(x, *state)
        if self.final:
            hidden = last[0] if isinstance(last, tuple) else last
            return self.head(hidden.transpose(0, 1).flatten(1))
        return self.head(y[:, -1] if self.rnn.batch_first else y[-1])


class InitialState(nn.Module):
    """A recurrent layer whose initial state is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 3, batch_first=True)
        self.initial = nn.Parameter(torch.randn(1, 1, 3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x, self.initial.expand(-1, x.shape[0], -1).contiguous())
        return self.head(y[:, -1])


def last_step(layer: type[nn.RNNBase]) -> nn.Module:
    return Recurrent(layer(2, 2, batch_first=True), 2)


def cell_loop(m: nn.Module, x: Tensor) -> Tensor:
    state = torch.zeros(x.shape[0], 2, dtype=x.dtype, device=x.device)
    cells = torch.zeros_like(state)
    for step in x.unbind(1):
        if isinstance(m.cell, nn.LSTMCell):
            state, cells = m.cell(step, (state, cells))
        else:
            state = m.cell(step, state)
    return state


class CellStates(nn.Module):
    """A cell whose first state and memory are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 2)
        self.state, self.memory = nn.Parameter(torch.randn(1, 2)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        states = self.state.expand(x.shape[0], -1), self.memory.expand(x.shape[0], -1)
        return torch.cat(self.cell(x, states), 1)


def every_output(m: nn.Module, x: Tensor) -> Tensor:
    """Outputs at all steps, last state and last memory, of a layer whose samples come second."""
    y, states = m.layer(x.transpose(0, 1))
    return torch.cat([y.transpose(0, 1).flatten(1), *(state[0] for state in states)], 1)


def tied_layers() -> nn.Module:
    """A layer of which both layers multiply their state by the same weight."""
    layer = nn.RNN(2, 2, num_layers=2, batch_first=True)
    layer.weight_hh_l1 = layer.weight_hh_l0
    return layer
