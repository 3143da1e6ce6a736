"""The benchmarks measure every quantity of packprop: none of its contestants is left out with a gap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.contestants import CONTESTANTS, QUANTITIES
from benchmarks.problems import Problem

PROBLEM = Problem(
    "a perceptron",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)),
    nn.CrossEntropyLoss,
    lambda batch: (torch.randn(batch, 4), torch.randint(2, (batch,))),
    batch=5,
    quantities=tuple(QUANTITIES),
)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_packprop_takes_part(quantity: str) -> None:
    """A module of packprop that moved is an error, and no reason to leave a row of the page empty."""
    results = CONTESTANTS["packprop"].prepare(PROBLEM.build(), QUANTITIES[quantity])()
    assert results
    assert all(value is not None for values in results.values() for value in values.values())
