"""`Result.norms()`: norms of single losses' gradients, whatever the reduction, from norms or from gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import BadInput, extensions
from packprop.types import Extension

X, Y = torch.randn(11, 4), torch.randint(3, (11,))


def reference(model: nn.Module, loss: nn.Module) -> Tensor:
    norms = []
    for x, y in zip(X, Y, strict=True):
        gradients = torch.autograd.grad(loss(model(x[None]), y[None]), [*model.parameters()])
        norms.append(torch.cat([each.flatten() for each in gradients]).norm())
    return torch.stack(norms)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("asked", [extensions.BatchL2Grad(), extensions.BatchGrad()])
def test_norms_of_single_losses(reduction: str, asked: Extension) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    loss = nn.CrossEntropyLoss(reduction=reduction)
    result = packprop.compute(model, loss, (X, Y), asked, batch_size=4, progress=False)
    torch.testing.assert_close(result.norms(), reference(model, loss))


def test_norms_of_a_mean_over_terms() -> None:
    """A sample of several terms: its own loss is their mean."""
    model, loss = nn.Linear(4, 2), nn.MSELoss()
    targets = torch.randn(11, 2)
    result = packprop.compute(model, loss, (X, targets), extensions.BatchL2Grad(), progress=False)
    for x, y, norm in zip(X, targets, result.norms(), strict=True):
        gradients = torch.autograd.grad(loss(model(x), y), [*model.parameters()])
        torch.testing.assert_close(torch.cat([each.flatten() for each in gradients]).norm(), norm)


class Scaled(nn.Module):
    """A parameter of one number, and one of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.wave = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * (x.to(self.wave.dtype) @ self.wave).abs()
        return out


def test_norms_of_a_number_and_of_complex_numbers() -> None:
    model, loss = Scaled(), nn.CrossEntropyLoss()
    result = packprop.compute(model, loss, (X, Y), extensions.BatchGrad(), batch_size=4, progress=False)
    expected = []
    for x, y in zip(X, Y, strict=True):
        gradients = torch.autograd.grad(loss(model(x[None]), y[None]), [*model.parameters()])
        expected.append(sum(each.abs().square().sum() for each in gradients).sqrt())
    torch.testing.assert_close(result.norms(), torch.stack(expected))


def test_values_without_norms_say_what_to_ask_for() -> None:
    result = packprop.compute(
        nn.Linear(4, 3), nn.CrossEntropyLoss(), (X, Y), extensions.Variance(), progress=False
    )
    with pytest.raises(BadInput, match="norms of single samples are not among them") as error:
        result.norms()
    assert "BatchL2Grad()" in error.value.instead
