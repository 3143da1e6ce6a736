"""Factors as large as a vocabulary: one matrix for all samples, not one for each chunk of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import packprop
from benchmarks.tracked import size_of
from packprop import extensions
from packprop.engine.memory.live import LiveBytes
from tests.selection import one_in

WORDS, WIDTH, SAMPLES, TOKENS = 4096, 32, 32, 32
MATRIX = 4 * WORDS**2


class Headed(nn.Module):
    """Tokens and a head, with a bias that is a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens).tanh())
        return logits


@one_in(3)
@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "head.bias"])
def test_the_peak_holds_each_matrix_once(name: str) -> None:
    model = packprop.extend(Headed())
    for own, parameter in model.named_parameters():
        parameter.requires_grad_(own == name)
    loss, (tokens, targets) = packprop.extend(nn.CrossEntropyLoss()), torch.randint(WORDS, (2, SAMPLES, TOKENS))
    peaks = []
    for asked in ((), (extensions.KFAC(),), (extensions.KFAC(),)):
        model.zero_grad()
        for parameter in model.parameters():
            vars(parameter).pop("kfac", None)
        with LiveBytes() as live, packprop.backpack(*asked):
            loss(model(tokens).flatten(0, 1), targets.flatten()).backward()
        peaks.append(live.peak)
    results = size_of(model.get_parameter(name).kfac)
    assert results >= MATRIX
    assert peaks[-1] <= peaks[0] + results + MATRIX // 2
