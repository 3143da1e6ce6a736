"""The advice of a refused budget, followed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.memory.plan import BudgetTooSmall
from tests.memory.steps import data, network, step
from tests.selection import often, thorough

LOSS = nn.CrossEntropyLoss()


def wide() -> nn.Module:
    """A layer whose weight takes more than the samples, results and temporary sums included."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 400), nn.Linear(400, 6))


def refused(model: nn.Module, batch: tuple[Tensor, Tensor], memory: str) -> str:
    with pytest.raises(BudgetTooSmall) as caught:
        packprop.plan(model, LOSS, batch, extensions.Variance(), memory=memory)
    return str(caught.value)


@pytest.mark.parametrize("memory", [pytest.param("1.9 MiB", marks=thorough), "2.5 MiB"])
def test_a_smaller_batch_is_advised_only_if_it_fits(memory: str) -> None:
    """What a weight takes whatever the batch stands in no proportion to the samples."""
    text = refused(wide(), data(64), memory)
    found = re.search(r"a batch of (\d+) samples? instead of 64", text)
    if found is None:
        refused(wide(), data(1), memory)
    else:
        packprop.plan(wide(), LOSS, data(int(found[1])), extensions.Variance(), memory=memory)


@thorough
def test_both_happen() -> None:
    said = ["a batch of" in refused(wide(), data(64), memory) for memory in ("1.9 MiB", "2.5 MiB")]
    assert said == [False, True]


@thorough
def test_a_pass_gives_the_same_advice() -> None:
    model = wide()
    with pytest.raises(BudgetTooSmall) as caught:
        step(model, data(64), extensions.Variance(), memory="2.5 MiB")
    found = re.search(r"a batch of (\d+) samples? instead of 64", str(caught.value))
    assert found is not None
    step(model, data(int(found[1])), extensions.Variance(), memory="2.5 MiB")


@often(lambda samples: samples == 3)
@pytest.mark.parametrize("samples", [3, 16, 17, 40, 64])
def test_the_budget_that_is_named_fits(samples: int) -> None:
    """It is rounded up, so that you can copy it."""
    for model in (network(), wide()):
        text = refused(model, data(samples), "20 KiB")
        named = text.split("still takes ")[1].split(":")[0]
        packprop.plan(model, LOSS, data(samples), extensions.Variance(), memory=named)
