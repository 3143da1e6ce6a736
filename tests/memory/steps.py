"""Networks, and steps whose peak of memory is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop.engine.memory.live import LiveBytes
from tests.cases import CASES

MIB = 2**20
PLANNED = [
    case
    for case in CASES
    if not case.refuses and not case.record and len(case.problem(case.sizes[-1]).parameters) > 0
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(8 * 36, 6),
    )


def data(samples: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 2, 8, 8), torch.randint(6, (samples,))


def step(model: nn.Module, batch: tuple[Tensor, Tensor], *asked: Any, **options: Any) -> None:
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(batch[0]), batch[1])
    with packprop.backpack(*asked, **options):
        loss.backward()


def measured(model: nn.Module, batch: tuple[Tensor, Tensor], *asked: Any, **options: Any) -> int:
    """Peak of four steps: the first finds the samples, the others begin with results of the one before.

    A walk that the first keeps serves the second; the later ones are direct.
    """
    live = LiveBytes()
    live.own([*model.parameters(), *batch], "there before")
    with live:
        for _ in range(4):
            model.zero_grad()
            step(model, batch, *asked, **options)
    return live.peak
