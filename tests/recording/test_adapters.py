"""Adapters on a frozen base: only what is trained is recorded, and only it costs memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.memory import LiveBytes
from tests.references.running import assert_rows_of_terms


class LowRank(nn.Module):
    """A frozen linear layer, and an update of low rank that is trained."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) / width)
        self.up = nn.Parameter(torch.randn(width, rank) / width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up))


def test_what_is_trained_gets_values_and_nothing_else_does() -> None:
    model = nn.Sequential(nn.LayerNorm(8).requires_grad_(False), LowRank(8), LowRank(8)).double()
    x, y = torch.randn(3, 4, 8).double(), torch.randn(3, 4, 8).double()
    terms = nn.functional.mse_loss(packprop.extend(model)(x), y, reduction="none") / y.numel()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert_rows_of_terms(terms, packprop.extend(nn.MSELoss())(model(x), y), trained)
    assert len(trained) == 4
    assert not any(vars(p) for p in model.parameters() if not p.requires_grad)


def test_the_peak_is_that_of_plain_autograd_and_the_results() -> None:
    samples, width = 16, 256
    model = packprop.extend(nn.Sequential(LowRank(width), LowRank(width)))
    x, y = torch.randn(samples, 2, width), torch.randn(samples, 2, width)
    peaks = []
    for asked in ((), (extensions.BatchGrad(),), (extensions.BatchGrad(),)):
        for parameter in model.parameters():
            parameter.grad = None
            vars(parameter).pop("grad_batch", None)
        with LiveBytes() as live, packprop.backpack(*asked):
            packprop.extend(nn.MSELoss())(model(x), y).backward()
        peaks.append(live.peak)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    results = 4 * samples * trained
    activations = 4 * x.numel()
    assert peaks[-1] <= peaks[0] + 1.5 * results + activations
    assert peaks[-1] < 4 * samples * width**2  # one frozen weight's gradients of single samples
