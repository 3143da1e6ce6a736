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
