"""Programs that a reading of the graph alone answers wrongly in silence: right here, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.per_sample import rows_by_loop
from tests.references.running import assert_near

SAMPLES = 8


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(SAMPLES, 6, dtype=torch.float64), torch.arange(SAMPLES) % 4


def rows_of(loss: Tensor) -> None:
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def barlow_twins(z: Tensor) -> Tensor:
    """Zbontar et al. (2021): a loss of correlations between features over the batch."""
    z = (z - z.mean(0)) / z.std(0)
    correlations = z.T @ z / len(z)
    return (correlations - torch.eye(len(correlations)).to(correlations)).pow(2).sum()


def layer(features: int = 4) -> nn.Linear:
    return packprop.extend(nn.Linear(6, features).double())


@pytest.mark.parametrize("features", [4, SAMPLES])
def test_a_loss_of_correlations_has_no_samples(features: int) -> None:
    """Also where its matrix has as many rows as the batch."""
    x, _ = batch()
    with pytest.raises(packprop.PackpropError, match=r"sum of one term for each sample|mix"):
        rows_of(barlow_twins(layer(features)(x)))


def test_outputs_that_are_centred_over_the_batch() -> None:
    x, y = batch()
    hidden = layer()(x)
    with pytest.raises(packprop.PackpropError, match="samples are mixed there"):
        rows_of(F.cross_entropy(hidden - hidden.mean(0), y))


def test_inputs_that_are_centred_over_the_batch() -> None:
    """What lies before the first parameter is the user's: rows are those of the inputs as they are."""
    x, y = batch()
    model, given = layer(), x - x.mean(0)
    rows_of(F.cross_entropy(model(given), y))
    assert_near(model.weight.grad_batch, rows_by_loop(model, given, y)["weight"], "weight")


class Gate(nn.Module):
    """Mixes samples as soon as its gate, which begins at zero, is open."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.gate * (hidden - hidden.mean(0)))


@pytest.mark.parametrize("opened", [0.0, 1.0])
def test_a_gate_that_opens_in_a_later_pass(opened: float) -> None:
    """It is refused while it is shut, so that no pass of the same structure is believed later."""
    x, y = batch()
    model = packprop.extend(Gate().double())
    for value in (0.0, opened):
        model.gate.data.fill_(value)
        with pytest.raises(packprop.PackpropError, match="samples are mixed there"):
            rows_of(F.cross_entropy(model(x), y))


def test_a_freed_graph() -> None:
    x, y = batch()
    loss = F.cross_entropy(layer()(x), y)
    loss.backward()
    with pytest.raises(packprop.PackpropError, match="retain_graph=True"):
        rows_of(loss)


class Product(torch.autograd.Function):
    """A matrix product that keeps its operands out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight, gradient.T @ ctx.x


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)


def test_a_function_of_ones_own_that_saves_nothing() -> None:
    x, y = batch()
    model = packprop.extend(Own(6, 4, bias=False).double())
    rows_of(F.cross_entropy(model(x), y))
    assert_near(model.weight.grad_batch, rows_by_loop(model, x, y)["weight"], "weight")


def test_half_precision_keeps_its_sums() -> None:
    x, y = batch()
    model = packprop.extend(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).half())
    rows_of(F.cross_entropy(model(x.half()).float(), y))
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad_batch.float().sum(0), parameter.grad.float(), name, 2e-2)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("extended", [False, True])
def test_outputs_mixed_behind_layers_whose_data_nothing_shows(normalised: bool, extended: bool) -> None:
    """No layer counts as made of parameters because the samples meet behind it: each is refused by name."""
    x, y = batch()
    gate = nn.Parameter(torch.ones(6, dtype=torch.float64))
    norm, last = nn.GroupNorm(2, 6).double(), nn.Linear(6, 4).double()
    nn.init.uniform_(norm.bias)
    if extended:
        packprop.extend(last)
    gated = torch.sigmoid(x) * gate.sum()
    hidden = norm(gated) if normalised else gated * norm.bias + norm.weight
    hidden = hidden * hidden.std(0)
    with pytest.raises(packprop.PackpropError, match="samples are mixed there"):
        rows_of(F.cross_entropy(last(hidden), y))
