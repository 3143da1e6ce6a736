"""The input factor of a table: one-hot inputs need no product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from packprop.engine.algebra.factors import input_gram
from packprop.engine.algebra.structures import Lookup

SAMPLES, POSITIONS, ENTRIES = 3, 5, 7


@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
def test_it_is_that_of_one_hot_inputs(approximation: Any) -> None:
    index = torch.randint(ENTRIES, (SAMPLES, POSITIONS))
    inputs = torch.nn.functional.one_hot(index, ENTRIES).double()
    if approximation == "reduce":
        inputs = inputs.mean(1, keepdim=True)
    expected = torch.einsum("nsi,nsj->ij", inputs, inputs)
    expected = expected / POSITIONS if approximation == "expand" else expected
    found = input_gram(Lookup(index, None, ENTRIES, torch.float64), approximation)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("approximation", ["mixed", "expand"])
def test_no_product_for_each_position(approximation: Any) -> None:
    index = torch.randint(ENTRIES, (SAMPLES, POSITIONS))
    with FlopCounterMode(display=False) as counted:
        input_gram(Lookup(index, None, ENTRIES, torch.float64), approximation)
    assert counted.get_total_flops() == 0
