"""What the tests of compiled steps share: small models, and what a step leaves behind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop.applications.compiled.step import CompiledStep
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import PackpropWarning
from tests.references.running import assert_near

EAGER_CALLS = 3
"""The calls of a kind that are ordinary passes."""


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing has been compiled yet."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Sigmoid(), nn.Linear(width, 3)).double()


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3).double(), torch.randint(3, (size,))


def compiled(model: nn.Module, *extensions: Any, loss: Any = None, **options: Any) -> CompiledStep:
    """A step that replays its graphs without a compiler."""
    loss = nn.CrossEntropyLoss() if loss is None else loss
    return packprop.compile(model, loss, *extensions, **{"backend": "eager", **options})


def settle(step: CompiledStep, size: int = 5) -> None:
    """Make the calls that are ordinary passes; the next one of this kind is a replay."""
    for _ in range(EAGER_CALLS):
        step(*batch(size))


def replays(step: CompiledStep) -> int:
    """How often graphs took the place of passes."""
    return sum(kind.replays for kind in step.kinds)


def left_on(model: nn.Module, fields: Sequence[str]) -> dict[str, list[Tensor]]:
    """Gradients and results on the parameters of a model."""
    return {
        f"{name}.{field}": [each.clone() for each in tensors_in(getattr(parameter, field, None))]
        for name, parameter in model.named_parameters()
        for field in ("grad", *fields)
    }


def expected(
    model: nn.Module, loss: Any, x: Any, y: Any, *extensions: Any
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """What an ordinary pass leaves on a copy of the model, whose gradients are there before."""
    other, criterion = copy.deepcopy(model), copy.deepcopy(loss)
    for own, parameter in zip(other.parameters(), model.parameters(), strict=True):
        own.grad = None if parameter.grad is None else parameter.grad.clone()
    packprop.extend(other)
    with packprop.record():
        value = criterion(other(x), y)
    with packprop.backpack(*extensions):
        value.backward()
    return value.detach(), left_on(other, [each.savefield for each in extensions])


def check_call(step: CompiledStep, model: nn.Module, loss: Any, x: Any, y: Any, *extensions: Any) -> None:
    """A call of a step leaves what an ordinary pass leaves, from the same random state."""
    state = torch.get_rng_state()
    value, wanted = expected(model, loss, x, y, *extensions)
    torch.set_rng_state(state)
    assert_near(step(x, y), value, "loss")
    found = left_on(model, [each.savefield for each in extensions])
    assert {name: len(tensors) for name, tensors in found.items()} == {k: len(v) for k, v in wanted.items()}
    for name, tensors in wanted.items():
        for own, other in zip(found[name], tensors, strict=True):
            assert_near(own, other, name)


def quietly(step: CompiledStep, *given: Any) -> Tensor:
    """A call in which nothing is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackpropWarning)
        return step(*given)
