"""Ranks of Kronecker factors are told where they mean something."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from packprop import Profile
from packprop.applications.reports.page.findings import findings_of
from packprop.applications.reports.profile.ranks import narrow_factors
from tests.reports.profiled import quiet


def profiled(model: nn.Module, x: Tensor) -> Profile:
    return quiet(model, nn.CrossEntropyLoss(), (x, torch.randint(4, (len(x),))))


def said(profile: Profile) -> str:
    return " ".join(f"{finding.says} {finding.because}" for finding in findings_of(profile))


def test_too_few_samples_are_no_news() -> None:
    torch.manual_seed(0)
    found = profiled(nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 4)), torch.randn(12, 50))
    assert found.layers[0].factors["weight.A"].rank == 12
    assert narrow_factors(found) == []
    assert "is degenerate. " in said(found)
    assert "lack a few directions" in said(found)


def test_a_softmax_and_layer_normalisation_are_no_news() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 4))
    found = profiled(model, torch.randn(300, 6))
    assert found.layers[1].factors["weight.A"].rank == 5
    assert found.layers[1].factors["weight.B"].rank == 3
    assert narrow_factors(found) == []


def test_inputs_that_are_always_zero_are_told() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 20)
    x[:, 3:6] = 0
    found = profiled(nn.Linear(20, 4), x)
    (narrow,) = narrow_factors(found)
    assert (narrow.side, narrow.idle, narrow.rank) == ("A", 3, 17)
    assert "In (model), 3 of 20 inputs are always zero." in said(found)


@pytest.mark.parametrize("rank", [3, 30])
def test_inputs_in_few_directions_are_told(rank: int) -> None:
    torch.manual_seed(0)
    found = profiled(nn.Linear(40, 4), torch.randn(200, rank) @ torch.randn(rank, 40))
    assert found.layers[0].factors["weight.A"].rank == rank
    assert bool(narrow_factors(found)) == (rank == 3)
    assert ("The inputs of (model) span 3 of 40 directions." in said(found)) == (rank == 3)


def test_entries_of_a_table_that_are_never_looked_up_are_no_news() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 6), nn.Flatten(), nn.Linear(18, 4))
    found = quiet(
        model, nn.CrossEntropyLoss(), (torch.randint(20, (300, 3)), torch.randint(4, (300,))), outliers=0
    )
    assert found.layers[0].factors["weight.A"].rank == 20
    assert narrow_factors(found) == []
