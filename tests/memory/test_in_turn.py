"""Parameters in turn, so that results that a hook frees do not pile up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.memory.live import LiveBytes
from packprop.engine.memory.plan import BudgetTooSmall
from packprop.errors import BadInput
from tests.memory.steps import step
from tests.selection import thorough


def wide_layers() -> nn.Module:
    torch.manual_seed(0)
    return packprop.extend(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))


def freed_step(memory: Any) -> tuple[int, list[Tensor]]:
    """The tracked peak of a pass whose results a hook sums and frees; and these sums."""
    model, sums = wide_layers(), []

    def reduce(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            sums.append(parameter.diag_ggn_exact_batch.sum(0).sum())
            del parameter.diag_ggn_exact_batch

    x, y = torch.randn(32, 64), torch.randint(64, (32,))
    loss_fn = packprop.extend(nn.CrossEntropyLoss())
    for _ in range(2):  # the first pass finds the samples
        sums.clear()
        model.zero_grad()
        with LiveBytes() as counted:
            counted.own([*model.parameters(), x, y], "")
            loss = loss_fn(model(x), y)
            with packprop.backpack(extensions.BatchDiagGGNExact(), extension_hook=reduce, memory=memory):
                loss.backward()
    return counted.peak, sums


@thorough
def test_parameters_in_turn_keep_results_that_a_hook_frees_from_piling_up() -> None:
    """In one sweep the results of all layers wait for the last column; swept layer by layer they do not."""
    asked = [extensions.BatchDiagGGNExact()]
    batch = torch.randn(32, 64), torch.randint(64, (32,))
    results = 8 * 32 * 65 * 64 * 4
    least = packprop.plan(wide_layers(), nn.CrossEntropyLoss(), batch, asked, memory=2 * results, freed=True)
    tight = packprop.plan(wide_layers(), nn.CrossEntropyLoss(), batch, asked, memory=results // 2, freed=True)
    with pytest.raises(BudgetTooSmall):
        packprop.plan(wide_layers(), nn.CrossEntropyLoss(), batch, asked, memory=results // 2)
    assert least.chunk_sizes.parameters is None
    assert tight.chunk_sizes.parameters is not None
    peaks, sums = zip(*(freed_step(memory) for memory in (None, tight)), strict=True)
    assert peaks[0] > results
    assert peaks[1] == pytest.approx(tight.peak, rel=0.05)
    assert peaks[1] <= results // 2
    for mine, other in zip(*sums, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_plan_that_counts_on_a_hook_is_refused_without_one() -> None:
    model, batch = wide_layers(), (torch.randn(32, 64), torch.randint(64, (32,)))
    asked = extensions.BatchDiagGGNExact()
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked], freed=True)
    with pytest.raises(BadInput, match="no extension hook"):
        step(model, batch, asked, memory=plan)
