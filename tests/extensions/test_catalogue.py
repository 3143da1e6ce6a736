"""Every extension of the catalogue obeys its laws, checked by `check_extension`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from packprop import extensions
from packprop.testing import check_extension
from packprop.types import Extension
from tests.references.running import generator
from tests.references.tensors import R
from tests.selection import often, one_in

# Values that are functions cannot be merged as numbers; they are tested in tests/curvature. Recursions are
# refused on most of the small problems.
FUNCTIONS, CHAINS = {"GGNMP", "HMP", "PCHMP"}, {"HBP", "KFRA"}


@one_in(5)
@often(lambda name: not name.endswith("MC") and name not in ("BatchDiagHessian", "SumGradSquared"))
@pytest.mark.parametrize("name", sorted(set(extensions.__all__) - {"Extension", "Row"} - FUNCTIONS - CHAINS))
def test_laws_of_the_catalogue(name: str) -> None:
    kind = getattr(extensions, name)
    drawn = "mc_samples" in inspect.signature(kind).parameters
    source = generator()
    before = source.get_state()
    report = check_extension(kind(mc_samples=3, generator=source) if drawn else kind())
    assert report.error < 1e-12
    assert ("subsampling" in report.laws) == ("subsampling" in inspect.signature(kind).parameters)
    assert torch.equal(source.get_state(), before)


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_laws_of_recursions(name: str) -> None:
    chain = nn.Sequential(
        nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)
    )
    on = chain, nn.CrossEntropyLoss(), R(4, 2, 3, 3), torch.tensor([0, 1, 1, 0])
    assert check_extension(getattr(extensions, name)(), on=on).error < 1e-12


@one_in(3)
@pytest.mark.parametrize(
    ("extension", "reference"),
    [
        (extensions.BatchGrad(), lambda rows: rows[0]),
        (extensions.Variance(), lambda rows: rows[0].var(0, correction=0)),
        (extensions.BatchDotGrad(), lambda rows: rows[0].flatten(1) @ rows[0].flatten(1).T),
        (extensions.DiagGGNExact(), lambda columns: columns.square().sum((0, 1))),
        (extensions.SqrtGGNExact(subsampling=[3, 1]), lambda columns: columns),
        (extensions.BatchDiagGGNMC(mc_samples=3), lambda drawn: drawn.square().sum(0)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_references_of_the_catalogue(extension: Extension, reference: Callable[..., Any]) -> None:
    on = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1),
        R(4, 3),
        torch.tensor([0, 2, 1, 1]),
    )
    report = check_extension(extension, reference, on=on)
    assert report.laws["reference"] >= 4
    assert report.laws["differentiable"] == 4
