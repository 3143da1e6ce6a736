"""Packed sequences: samples of different lengths, in the order of their lengths, sorted or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.selection import often, one_in

LENGTHS = {
    "sorted": [4, 3, 3, 1],
    "not sorted": [1, 3, 4, 2],
    "all alike": [3, 3, 3, 3],
    "one": [3],
    "many": [1 + (7 * n) % 5 for n in range(60)],
}
LAYERS: dict[str, Callable[[], Any]] = {
    "lstm": lambda: nn.LSTM(3, 2),
    "lstm, projected": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
    "gru, both directions": lambda: nn.GRU(3, 2, num_layers=2, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 2, nonlinearity="relu"),
}


class Packed(nn.Module):
    """A linear layer and a recurrent one over sequences that it packs, and a head."""

    def __init__(self, layer: Any, read: str, inside: bool = False) -> None:
        super().__init__()
        self.inner, self.layer, self.read, self.inside = nn.Linear(3, 3), layer, read, inside
        width = (2 if layer.bidirectional else 1) * (layer.proj_size or layer.hidden_size)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if self.inside else self.inner(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        if self.inside:  # a layer on the packed data themselves
            data, *rest = packed
            packed = PackedSequence(self.inner(data).tanh(), *rest)
        outputs, state = self.layer(packed)
        if self.read == "outputs":
            y, _ = pad_packed_sequence(outputs, batch_first=True)
            return self.head(y.square().sum(1))
        if self.read == "last output":
            y, _ = pad_packed_sequence(outputs, batch_first=True)
            return self.head(y[torch.arange(len(y)), lengths - 1])
        last = state[0] if isinstance(state, tuple) else state
        directions = 2 if self.layer.bidirectional else 1
        return self.head(torch.cat(list(last[-directions:]), 1))


def rows_one_by_one(model: nn.Module, samples: list[tuple[Any, ...]], y: Tensor) -> dict[str, Tensor]:
    """Gradients of a summed squared error, each sample alone."""
    parameters = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(
            nn.functional.mse_loss(model(*given), y[n : n + 1], reduction="sum"),
            parameters.values(),
            allow_unused=True,
            materialize_grads=True,
        )
        for n, given in enumerate(samples)
    ]
    return {name: torch.stack(pieces) for name, pieces in zip(parameters, zip(*rows, strict=True), strict=True)}


def check(model: nn.Module, inputs: tuple[Any, ...], samples: list[tuple[Any, ...]]) -> None:
    """Compare a pass with one sample at a time."""
    y = torch.randn(len(samples), 2).double()
    expected = rows_one_by_one(model, samples, y)
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    with packprop.backpack(extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.DiagGGNExact()):
        loss(model(*inputs), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_batch, expected[name], msg=name)
        norms = expected[name].flatten(1).square().sum(1)
        torch.testing.assert_close(parameter.batch_l2, norms, msg=name)


@one_in(3)
@often(lambda layer, lengths, read, inside: inside == (read != "outputs"))
@pytest.mark.parametrize("inside", [False, True], ids=["", "layer-on-the-data"])
@pytest.mark.parametrize("read", ["outputs", "last output", "state"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("layer", LAYERS)
def test_sequences_packed_in_the_model(layer: str, lengths: str, read: str, inside: bool) -> None:
    """Rows are those of each sequence alone, in the order of the inputs."""
    sizes = torch.tensor(LENGTHS[lengths])
    model = Packed(LAYERS[layer](), read, inside).double()
    x = torch.randn(len(sizes), int(sizes.max()), 3).double()
    samples = [(x[n : n + 1], sizes[n : n + 1]) for n in range(len(sizes))]
    check(model, (x, sizes), samples)


def test_another_order_in_the_next_pass() -> None:
    """Nothing is kept of one batch's lengths that does not hold for the next."""
    model = Packed(nn.LSTM(3, 2), "state").double()
    x = torch.randn(3, 4, 3).double()
    for sizes in ([4, 2, 2], [2, 4, 2], [4, 1, 3], [2, 2, 4]):
        own = torch.tensor(sizes)
        check(model, (x, own), [(x[n : n + 1], own[n : n + 1]) for n in range(3)])


class OfPacked(nn.Module):
    """A recurrent layer that is given packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(3, 2), nn.Linear(2, 2)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.head(self.layer(packed)[1][0])


@pytest.mark.parametrize("sizes", [[2, 2, 2, 1], [1, 2, 3], [4, 4]])
def test_packed_sequences_as_inputs(sizes: list[int]) -> None:
    """The number of samples is that of the sequences, whatever the length of the data."""
    sequences = [torch.randn(size, 3).double() for size in sizes]
    packed = pack_sequence(sequences, enforce_sorted=False)
    check(OfPacked().double(), (packed,), [(pack_sequence([each]),) for each in sequences])


def test_a_loss_over_packed_data_is_refused() -> None:
    """A loss has no axis of samples there."""
    layer = packprop.extend(nn.LSTM(3, 2))
    packed = pack_sequence([torch.randn(2, 3), torch.randn(1, 3)])
    loss = packprop.extend(nn.MSELoss())
    with pytest.raises(PackpropError, match="loss"), packprop.backpack(extensions.BatchGrad()):
        loss(layer(packed)[0].data, torch.zeros(3, 2)).backward()
