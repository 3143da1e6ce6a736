"""Models that draw random numbers, in training mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.cases.models.wrapping import Raw
from tests.graph.one_by_one import check, double


@pytest.mark.parametrize("size", [1, 2, 5])
def test_dropout_in_training_mode(size: int) -> None:
    model = nn.Sequential(
        nn.Linear(3, 8),
        nn.Dropout(0.4),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.Dropout(0.3),
        nn.Linear(8, 2),
    )
    check(double(model).train(), torch.randn(size, 3).double())


def test_dropout_between_recurrent_layers() -> None:
    """The fallback evaluates the layer again: the same units must be dropped."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 3, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0][:, -1]

    check(double(Model()).train(), torch.randn(3, 4, 2).double())


def test_dropout_inside_attention() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.3, batch_first=True)
    check(double(layer).train(), torch.randn(3, 3, 4).double())


def test_the_fallback_leaves_the_random_state_where_it_was() -> None:
    """What a user draws after the backward pass does not depend on packprop."""
    model = packprop.extend(nn.LSTM(2, 3, num_layers=2, dropout=0.5, batch_first=True).double())
    x = torch.randn(3, 4, 2).double()
    drawn = []
    for asked in ([], [extensions.BatchGrad()]):
        torch.manual_seed(1)
        loss = packprop.extend(nn.MSELoss())(model(x)[0], torch.zeros(3, 4, 3).double())
        if asked:
            with packprop.backpack(*asked):
                loss.backward()
        else:
            loss.backward()
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_noise_that_does_not_come_from_the_input() -> None:
    """``sigma * randn(N, d)``: made of a parameter and constants, yet each sample has its own."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], 2, dtype=x.dtype)
        return x @ m.get_parameter("w") + torch.exp(m.get_parameter("s")) * noise

    check(double(Raw(forward, w=(3, 2), s=(2,))), torch.randn(4, 3).double())


def test_random_rectifier_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.RReLU(), nn.Linear(6, 2))
    check(double(model).train(), torch.randn(4, 3).double())
