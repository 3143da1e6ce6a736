"""Passes that were not recorded, or only in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

import packprop
from packprop import extensions
from tests.references.refusals import batch, check, each_row, network, refused, untouched
from tests.references.running import FIRST_ORDER, SECOND_ORDER, Row


@each_row
def test_a_model_that_was_never_extended(row: Row) -> None:
    model = network()
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    check(refused(loss, row(), model=model), "extend(")


@each_row
def test_a_model_that_was_extended_after_its_forward_pass(row: Row) -> None:
    model = network()
    x, y = batch()
    out = model(x)
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, row(), model=model), "extend(")


@each_row
def test_a_forward_pass_under_disable(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.disable():
        out = model(x)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, row(), model=model), "disable()")


def test_a_part_of_the_forward_pass_under_disable() -> None:
    model = packprop.extend(network())
    x, y = batch()
    hidden = model[0](x)
    with packprop.disable():
        out = model[2](model[1](hidden))
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, extensions.BatchGrad(), model=model), "disable()")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_that_was_not_recorded(row: Row) -> None:
    """Curvature needs the loss; gradients do not."""
    model = packprop.extend(network())
    x, y = batch()
    check(refused(F.cross_entropy(model(x), y), row(), model=model), "loss", "extend", "record()")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_module_that_was_not_extended(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    error = refused(nn.CrossEntropyLoss()(model(x), y), row(), model=model)
    check(error, "loss", "extend", "record()")


@pytest.mark.parametrize("row", FIRST_ORDER, ids=lambda row: row.name)
def test_gradients_need_no_recorded_loss(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(row()):
        F.cross_entropy(model(x), y).backward()
    assert all(hasattr(p, row.attribute) for p in model.parameters())


def test_a_backward_pass_outside_the_context_saves_nothing() -> None:
    model = packprop.extend(network())
    verify = untouched(model)
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        pass
    loss.backward()
    verify()


@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param(lambda m: sum(p.square().sum() for p in m.parameters()), id="all"),
        pytest.param(lambda m: m[0].weight.norm(), id="one"),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["inside-record", "outside"])
@each_row
def test_weight_decay_in_the_loss(row: Row, penalty: Any, inside: bool) -> None:
    """Such a term belongs to no sample, so per-sample gradients would no longer sum to the gradient."""
    model = packprop.extend(network())
    x, y = batch()
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    if inside:
        with packprop.record():
            loss = loss_function(model(x), y) + 0.1 * penalty(model)
    else:
        loss = loss_function(model(x), y) + 0.1 * penalty(model)
    check(refused(loss, row(), model=model), "0.weight")


def test_a_use_outside_of_the_forward_pass() -> None:
    model = packprop.extend(network())
    x, y = batch()
    out = F.linear(model[1](model[0](x)), model[2].weight)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, extensions.BatchGrad(), model=model), "record()", "weight")
