"""A head over a vocabulary, tied to its embedding or not: no gradient of it for each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from benchmarks.tracked import size_of
from packprop import extensions
from packprop.engine.memory.live import LiveBytes
from tests.selection import often, one_in

WORDS, WIDTH, SAMPLES, TOKENS = 8192, 64, 32, 16
LOGITS = 4 * SAMPLES * TOKENS * WORDS
ROWS = 4 * SAMPLES * WORDS * WIDTH
"""Bytes of the logits, and of one gradient of the head for each sample: four times as many."""


class Headed(nn.Module):
    """Tokens, a linear layer, and a head with its loss."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)).tanh().flatten(0, 1)
        return F.cross_entropy(self.head(hidden), targets.flatten())


def peak_and_results(tied: bool, *asked: Any) -> tuple[int, int]:
    """Of the second step: the first one finds the samples."""
    torch.manual_seed(0)
    model = packprop.extend(Headed(tied))
    tokens, targets = torch.randint(WORDS, (2, SAMPLES, TOKENS))
    for _ in range(2):
        model.zero_grad()
        with LiveBytes() as live, packprop.backpack(*asked):
            model(tokens, targets).backward()
    return live.peak, size_of([getattr(p, each.savefield) for each in asked for p in model.parameters()])


@one_in(5)
@often(lambda make, activations, tied: tied)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize(
    ("make", "activations"),
    [
        (extensions.BatchL2Grad, 1),
        (extensions.SumGradSquared, 1),
        (extensions.Variance, 1),
        (extensions.DiagGGNMC, 3),  # probabilities, drawn columns, and what they are computed from
    ],
)
def test_no_gradient_of_the_head_for_each_sample(make: Any, activations: int, tied: bool) -> None:
    plain, _ = peak_and_results(tied)
    peak, results = peak_and_results(tied, make())
    assert peak <= plain + results + activations * LOGITS < plain + results + ROWS
