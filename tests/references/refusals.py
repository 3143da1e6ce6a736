"""Checks of errors: four parts that say what, where, why and what to do, and nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop.errors import PackpropError
from tests.references.running import ROWS

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3), torch.randint(2, (size,))


def check(error: BaseException, *parts: str) -> None:
    """Check that an error has four parts, none empty, all of them and the given words in its text."""
    assert isinstance(error, PackpropError)
    text = str(error)
    for part in (error.asked, error.where, error.why, error.instead):
        assert part.strip()
        assert part in text
    for part in parts:
        assert part.lower() in text.lower(), f"{part!r} is not in:\n{text}"


def untouched(model: nn.Module) -> Callable[[], None]:
    """Remember a model; the returned function checks that nothing of the user's has changed."""
    state = copy.deepcopy(model.state_dict())
    training = [m.training for m in model.modules()]
    attributes = [set(vars(p)) for p in model.parameters()]

    def verify() -> None:
        after = model.state_dict()
        assert list(state) == list(after)
        assert all(torch.equal(state[k], after[k]) for k in state)
        assert training == [m.training for m in model.modules()]
        assert attributes == [set(vars(p)) for p in model.parameters()]
        assert not torch.overrides._get_current_function_mode_stack()

    return verify


def refused(loss: Tensor, *asked: Any, model: nn.Module) -> PackpropError:
    """Run the backward pass, which must fail and leave no result behind."""
    verify = untouched(model)
    with pytest.raises(PackpropError) as caught, packprop.backpack(*asked):
        loss.backward()
    verify()
    return caught.value
