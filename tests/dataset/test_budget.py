"""A whole data set inside a budget of memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.engine.memory.live import LiveBytes
from packprop.errors import BadInput
from tests.memory.steps import MIB, data, network
from tests.references.running import assert_all_near
from tests.selection import thorough


@thorough
def test_a_whole_data_set_inside_a_budget() -> None:
    asked = [extensions.DiagGGNExact(), extensions.Variance()]
    free = packprop.compute(network(), nn.CrossEntropyLoss(), data(100), asked, batch_size=32, progress=False)
    budget = "2MiB"
    live = LiveBytes()
    model = network()
    with live:
        tight = packprop.compute(
            model, nn.CrossEntropyLoss(), data(100), asked, batch_size=32, progress=False, memory=budget
        )
    assert live.peak <= 2 * MIB
    for ours, theirs in zip(tight.values(), free.values(), strict=True):
        assert_all_near(ours, theirs, "data set", 1e-4)
    with pytest.raises(BadInput, match="still takes"):
        packprop.compute(
            network(), nn.CrossEntropyLoss(), data(100), asked, batch_size=32, progress=False, memory=1000
        )


@thorough
def test_a_larger_batch_of_a_data_set_is_planned_anew(monkeypatch: Any) -> None:
    """A smaller batch, as the last of a data set often is, keeps the plan."""
    model, loss = nn.Sequential(nn.Linear(6, 200), nn.Sigmoid(), nn.Linear(200, 4)), nn.CrossEntropyLoss()
    inputs, targets = torch.randn(300, 6), torch.randint(4, (300,))
    batches = [(inputs[start:stop], targets[start:stop]) for start, stop in ((0, 3), (3, 290), (290, 300))]
    asked = extensions.DiagGGNExact()
    free = packprop.plan(model, loss, batches[1], [asked], gradients=False)
    budget = free.peak // 2
    module = sys.modules["packprop.applications.dataset.compute"]  # the package has a function of this name
    planned: list[Any] = []
    planning = module.chunk_sizes_over_data
    monkeypatch.setattr(module, "chunk_sizes_over_data", lambda *a: planned.append(a) or planning(*a))
    live = LiveBytes()
    live.own([*model.parameters(), inputs, targets], "there before")
    with live:
        found = packprop.compute(model, loss, batches, [asked], progress=False, memory=budget)
    assert live.peak <= 1.02 * budget
    assert len(planned) == 2
    expected = packprop.compute(model, loss, (inputs, targets), [asked], progress=False)
    for name, value in expected[asked].items():
        torch.testing.assert_close(found[asked][name], value)


@thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_side_by_side_are_merged_before_they_are_rounded(dtype: torch.dtype) -> None:
    """Those of the batches so far take four bytes an entry, until they are handed over."""
    model, (x, y), loss = network().to(dtype), data(), nn.CrossEntropyLoss()
    entries = sum(p.numel() for p in model.parameters())
    batch, asked = (x.to(dtype), y), [extensions.BatchGrad()]
    assert packprop.plan(model, loss, batch, asked, gradients=False).results == 4 * 64 * entries
    assert packprop.plan(model, loss, batch, asked).results == dtype.itemsize * 64 * entries
