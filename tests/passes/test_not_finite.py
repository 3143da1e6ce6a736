"""Gradients that are not finite are warned of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from tests.references.refusals import batch, each_row, network
from tests.references.running import ROWS, Row, as_tensors
from tests.selection import one_in


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_signals_that_are_not_finite(bad: float, reduction: str) -> None:
    """Results are computed, and one warning names the first parameter whose cotangents are not finite."""
    model = packprop.extend(network())
    x, y = batch()
    x[1, 0] = bad
    loss = packprop.extend(nn.CrossEntropyLoss(reduction=reduction))(model(x), y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packprop.backpack(extensions.BatchGrad(), extensions.Variance()):
            loss.backward()
    ours = [w for w in caught if issubclass(w.category, packprop.errors.PackpropWarning)]
    assert len(ours) == 1
    text = str(ours[0].message)
    assert "weight" in text or "bias" in text
    assert "nan" in text.lower() or "finite" in text.lower()
    assert not model[0].weight.grad_batch[1].isfinite().all()
    others = torch.tensor([0, 2, 3])
    if reduction == "sum":  # one sample's poison is in its own row alone
        for parameter in model.parameters():
            assert parameter.grad_batch[others].isfinite().all()


def test_finite_signals_warn_about_nothing() -> None:
    model = packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with packprop.backpack(*(row() for row in ROWS)):
            loss.backward()


FIRST = [0]
CHOSEN = {
    "norms of one sample": ([extensions.BatchL2Grad(subsampling=FIRST)], {}),
    "squares of one sample": ([extensions.SumGradSquared(subsampling=FIRST)], {}),
    "one sample beside all": ([extensions.Variance(subsampling=FIRST), extensions.BatchGrad()], {}),
    "training rows": ([extensions.BatchL2Grad()], {"probes": [1]}),
    "a probe": ([extensions.BatchL2Grad(), extensions.Variance()], {"probes": [2]}),
}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("bad", [float("nan"), 0.0])
def test_samples_that_no_result_holds(name: str, bad: float) -> None:
    """A warning tells of a sample that is not finite, even if no result that is looked at is of this sample."""
    asked, options = CHOSEN[name]
    model, loss = packprop.extend(network()), packprop.extend(nn.MSELoss())
    x, _ = batch()
    target = torch.zeros_like(model(x)).detach()
    target[2, 0] = bad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packprop.backpack(*asked, **options):
            loss(model(x), target).backward()
    assert len([w for w in caught if "NaN or infinite" in str(w.message)]) == (bad != 0)


def test_squares_that_overflow_are_told_as_what_they_are() -> None:
    """Cotangents are finite there, and what is computed from them is not."""
    model, loss = packprop.extend(nn.Linear(3, 2)), packprop.extend(nn.MSELoss())
    target = torch.full((4, 2), 1e25)
    text = "The cotangent at parameter 'weight', or a quantity computed from it, holds NaN or infinite values"
    with pytest.warns(packprop.PackpropWarning, match=text), packprop.backpack(extensions.SumGradSquared()):
        loss(model(torch.ones(4, 3)), target).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@one_in(2)
@each_row
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "infinite"])
def test_every_extension_warns_once_of_signals_that_are_not_finite(row: Row, bad: float) -> None:
    """Each extension computes its result, and one warning names the first parameter concerned."""
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x, y = batch()
    x[0, 0] = bad
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x) * x[:, :1], y)
    asked = row(torch.Generator())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packprop.backpack(asked):
            loss.backward()
    own = [str(w.message) for w in caught if issubclass(w.category, packprop.PackpropWarning)]
    assert len(own) == 1
    assert "'2.weight'" in own[0]
    values = [t for p in model.parameters() for t in as_tensors(getattr(p, row.attribute))]
    assert not all(t.isfinite().all() for t in values)
