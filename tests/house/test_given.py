"""What every call says of a model or a loss that is none, and what public objects print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import BadInput
from packprop.extensions import BatchL2Grad, Variance

DATA = [(torch.ones(2, 3), torch.tensor([0, 1]))]

CALLS: dict[str, Callable[[Any, Any], object]] = {
    "compute": lambda model, loss: packprop.compute(model, loss, DATA, Variance()),
    "plan": lambda model, loss: packprop.plan(model, loss, DATA[0], Variance()),
    "compile": lambda model, loss: packprop.compile(model, loss, Variance()),
    "profile": lambda model, loss: packprop.profile(model, loss, DATA),
    "influence": lambda model, loss: packprop.influence("store", model, loss, DATA),
    "of_data": lambda model, loss: packprop.operators.of_data(model, loss, DATA),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("loss", "where", "instead"),
    [
        ("cross_entropy", "loss, 'cross_entropy'", "such as torch.nn.Linear"),
        (nn.CrossEntropyLoss, "loss, the class CrossEntropyLoss", "an instance, CrossEntropyLoss(...)"),
    ],
)
def test_a_loss_that_is_none(call: str, loss: Any, where: str, instead: str) -> None:
    with pytest.raises(BadInput, match="not a function of outputs and targets") as raised:
        CALLS[call](nn.Linear(3, 2), loss)
    assert raised.value.where == where
    assert instead in raised.value.instead


@pytest.mark.parametrize("call", CALLS)
def test_a_model_that_is_none(call: str) -> None:
    with pytest.raises(BadInput, match=r"not a torch.nn.Module"):
        CALLS[call](nn.Linear, nn.CrossEntropyLoss())


def test_a_quantity_that_a_result_lacks() -> None:
    result = packprop.compute(nn.Linear(3, 2), nn.CrossEntropyLoss(), DATA, Variance(), BatchL2Grad())
    with pytest.raises(KeyError, match="it has 'variance', 'batch_l2'"):
        result["kfac"]
    assert "kfac" not in result
    assert result.get("kfac") is None


def test_public_objects_say_what_they_are() -> None:
    model = nn.Linear(3, 2)
    assert repr(packprop.backpack(Variance())) == "<backpack(Variance)>"
    assert repr(packprop.clipped_gradients(BatchL2Grad(), max_norm=1.0)) == "<clipped_gradients(BatchL2Grad)>"
    assert repr(packprop.Monitor(model, quantities="noise_scale")) == "<Monitor of Linear: noise_scale>"
