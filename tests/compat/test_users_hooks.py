"""Hooks of the user's own, beside extensions written for single modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.compat import context as compat_context
from tests.compat.module_extensions import Fourth


def run(asked: list[object], change: float | None = None) -> list[Tensor]:
    """What hooks have seen, and what was kept."""
    torch.manual_seed(0)
    seen: list[Tensor] = []
    model = compat_context.extend(nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)))
    model[1].register_full_backward_hook(lambda _m, inputs, outputs: seen.extend([inputs[0], outputs[0]]))
    loss_function = compat_context.extend(nn.CrossEntropyLoss())
    h = model[1](model[0](torch.randn(6, 4)))
    h.retain_grad()
    h.register_hook(lambda gradient: seen.append(gradient) if change is None else change * gradient)
    loss = loss_function(model[2](h), torch.randint(0, 3, (6,)))
    with compat_context.backpack(*asked):
        loss.backward()
    assert h.grad is not None
    return [*seen, h.grad, model[0].weight.grad]


def test_they_see_what_they_see_without_packprop() -> None:
    expected, found = run([]), run([Fourth(), extensions.BatchGrad(), extensions.DiagGGNExact()])
    assert len(expected) == len(found) == 5
    assert all(map(torch.allclose, found, expected))


def test_a_changed_gradient_is_refused() -> None:
    """An extension for modules gets its gradients before the user's pass."""
    with pytest.raises(packprop.PackpropError, match="changed the gradient"):
        run([Fourth()], change=2.0)
