"""Complex parameters: gradients of single samples are given, squares and products of them are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import HESSIANS, ROWS

DEFINED = ("BatchGrad", "SqrtGGNExact", "SqrtGGNMC")


class Filter(nn.Module):
    """A filter of frequencies, behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.inner(x)) * self.weight, n=4)


def problem() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model, loss = Filter().double(), nn.MSELoss(reduction="sum")
    return packprop.extend(model), packprop.extend(loss), torch.randn(3, 4).double(), torch.randn(3, 4).double()


def test_gradients_of_single_samples() -> None:
    """They are those of one sample at a time."""
    model, loss, x, y = problem()
    with packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        one_by_one = [
            torch.autograd.grad(loss(model(x[n : n + 1]), y[n : n + 1]), parameter)[0] for n in range(3)
        ]
        torch.testing.assert_close(parameter.grad_batch, torch.stack(one_by_one), msg=name)


@pytest.mark.parametrize(
    "make",
    [row.make for row in [*ROWS, *HESSIANS] if row.name not in DEFINED]
    + [extensions.KFRA, extensions.DiagHessianMC],
    ids=lambda make: make.__name__,
)
def test_squares_and_products_are_refused(make: Any) -> None:
    """By name, with the way out; nothing is saved."""
    model, loss, x, y = problem()
    asked = make()
    with pytest.raises(PackpropError) as caught, packprop.backpack(asked):
        loss(model(x), y).backward()
    if make is not extensions.KFRA:  # its own reason comes first
        for words in ("'weight'", "complex128", "view_as_complex"):
            assert words in str(caught.value)
    assert not any(hasattr(parameter, asked.savefield) for parameter in model.parameters())


@pytest.mark.parametrize("make", [extensions.KFRA, lambda: extensions.HBP(backprop_strategy="average")])
def test_averaged_curvature_of_complex_activations_is_refused(make: Any) -> None:
    """Averages of complex numbers are not those of their parts."""
    model, loss, x, y = problem()
    model.weight.requires_grad_(False)
    with pytest.raises(PackpropError, match="complex"), packprop.backpack(make()):
        loss(model(x), y).backward()


class FilterOfPiece(nn.Module):
    """A filter whose numbers are pairs in a piece of a parameter of seven entries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.weight[:6].view(3, 2)).exp()
        return torch.fft.irfft(torch.fft.rfft(x) * pairs, n=4)


def test_pairs_in_a_piece_of_odd_size() -> None:
    """Columns of an odd length begin at odd places, where PyTorch makes no complex numbers of them."""
    model, loss = packprop.extend(FilterOfPiece().double()), packprop.extend(nn.MSELoss(reduction="sum"))
    x, y = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    asked = extensions.DiagHessian(), extensions.DiagGGNExact(), extensions.HMP(), extensions.GGNMP()
    with packprop.backpack(*asked, extensions.BatchDiagHessian()):
        loss(model(x), y).backward()
    weight = model.weight

    def total(value: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, {"weight": value}, x), y)

    hessian = torch.autograd.functional.hessian(total, weight.detach())
    torch.testing.assert_close(weight.diag_h, hessian.diagonal())
    torch.testing.assert_close(weight.diag_h_batch.sum(0), hessian.diagonal())
    units = torch.eye(7).double()
    torch.testing.assert_close(weight.hmp(units), hessian)
    torch.testing.assert_close(weight.hmp(units[1]), hessian[1])
    torch.testing.assert_close(weight.ggnmp(units).diagonal(), weight.diag_ggn_exact)


def test_a_complex_output_under_a_loss() -> None:
    """An absolute value of complex differences is no absolute value of real ones: its curvature is not zero."""
    model, _, x, _ = problem()
    target = torch.randn(3, 3, dtype=torch.complex128)
    loss = packprop.extend(nn.L1Loss(reduction="sum"))
    spectrum = packprop.extend(nn.Sequential(model.inner, Spectrum()))
    with packprop.backpack(extensions.BatchGrad()):
        loss(spectrum(x), target).backward()
    weight = model.inner.weight
    one_by_one = [
        torch.autograd.grad(loss(spectrum(x[n : n + 1]), target[n : n + 1]), weight)[0] for n in range(3)
    ]
    torch.testing.assert_close(weight.grad_batch, torch.stack(one_by_one))
    for asked in (extensions.DiagGGNExact(), extensions.DiagGGNMC(), extensions.KFLR()):
        with pytest.raises(PackpropError, match="complex"), packprop.backpack(asked):
            loss(spectrum(x), target).backward()
    with packprop.backpack(extensions.DiagHessian()):
        loss(spectrum(x), target).backward()

    def value(entries: Tensor) -> Tensor:
        output = torch.fft.rfft(torch.func.functional_call(model.inner, {"weight": entries}, x))
        return loss(output, target)

    hessian = torch.autograd.functional.hessian(value, weight.detach()).reshape(16, 16)
    torch.testing.assert_close(weight.diag_h, hessian.diagonal().reshape(4, 4))


class Spectrum(nn.Module):
    """Complex outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)
