"""Rare options of torch's losses, rare kinds of targets: curvature is that of the loss itself, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import PackpropError, extensions
from packprop.types import Extension
from tests.references.running import assert_near

Function = Callable[[Tensor], Tensor]
CLASSES = 160
BYTES = torch.tensor([156, 3, 7, 1], dtype=torch.uint8)
COUNTS = torch.tensor([[1.0, 2], [0, 1], [3, 0], [1, 1]]).double()
CHANCES = torch.linspace(0, 1, 8).view(4, 2).double()
SIGNS = torch.tensor([[1.0], [-0.5], [2.0], [1.0]]).double()
WEIGHTS = torch.linspace(0.1, 3.0, CLASSES).double()


def diagonal(function: Function, extension: Extension, outputs: int = CLASSES) -> tuple[Tensor, Tensor]:
    """The diagonal of a linear model, and that of autograd's own second derivatives."""
    torch.manual_seed(0)
    model, x = packprop.extend(nn.Linear(3, outputs).double()), torch.randn(4, 3).double()
    with packprop.disable():
        bias = model.bias.detach().clone()
        hessian = torch.autograd.functional.hessian(lambda b: function(F.linear(x, model.weight, b)), bias)
    with packprop.record():
        loss = function(model(x))
    with packprop.backpack(extension):
        loss.backward()
    return getattr(model.bias, extension.savefield), hessian.diagonal()


BY_BYTES: dict[str, Function] = {
    "plain": lambda f: F.cross_entropy(f, BYTES),
    "weights": lambda f: F.cross_entropy(f, BYTES, WEIGHTS),
    "ignored": lambda f: F.cross_entropy(f, BYTES, WEIGHTS, ignore_index=3),
    "as many as samples": lambda f: F.cross_entropy(f[:, :4], BYTES.clamp(max=3), WEIGHTS[:4]),
    "nll_loss": lambda f: F.nll_loss(f.log_softmax(1), BYTES, WEIGHTS, ignore_index=7),
}


@pytest.mark.parametrize("name", BY_BYTES)
def test_classes_may_be_bytes(name: str) -> None:
    """An index of bytes is a mask for torch, and -100 is 156 among them."""
    for extension in (extensions.DiagGGNExact(), extensions.DiagHessian()):
        assert_near(*diagonal(BY_BYTES[name], extension), name, 1e-10)


def test_smoothed_classes_of_bytes_have_no_ggn() -> None:
    """PyTorch ignores class 156 in a part of this loss."""

    def smoothed(f: Tensor) -> Tensor:
        return F.cross_entropy(f, BYTES, label_smoothing=0.3)

    with pytest.raises(PackpropError, match="uint8"):
        diagonal(smoothed, extensions.DiagGGNExact())
    assert_near(*diagonal(smoothed, extensions.DiagHessian()), "smoothed", 1e-10)


def test_positive_weights_may_be_bytes() -> None:
    weights, y = torch.tensor([0, 2], dtype=torch.uint8), torch.rand(4, 2).double()

    def weighted(f: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(f, y, pos_weight=weights)

    for extension in (extensions.DiagGGNExact(), extensions.DiagHessian()):
        assert_near(*diagonal(weighted, extension, 2), "pos_weight", 1e-10)


RATES: dict[str, Function] = {
    "eps": lambda f: F.poisson_nll_loss(f.exp(), COUNTS, log_input=False, eps=0.5),
    "small rates": lambda f: F.poisson_nll_loss((f - 18).exp(), COUNTS, log_input=False),
}


@pytest.mark.parametrize("name", RATES)
def test_rates_plus_a_number_are_no_rates(name: str) -> None:
    """The Hessian has the curvature of eps, which has no square root."""
    assert_near(*diagonal(RATES[name], extensions.DiagHessian(), 2), name, 1e-10)
    with pytest.raises(PackpropError, match=r"eps.*\n.*log_input=True"):
        diagonal(RATES[name], extensions.DiagGGNExact(), 2)


NEGATIVE: dict[str, Function] = {
    "bce": lambda f: F.binary_cross_entropy_with_logits(f, CHANCES, SIGNS),
    "pos_weight": lambda f: F.binary_cross_entropy_with_logits(f, CHANCES, pos_weight=-20 * SIGNS[0].abs()),
    "mse": lambda f: F.mse_loss(f, CHANCES, weight=SIGNS.expand(4, 2)),
    "classes": lambda f: F.cross_entropy(f, torch.tensor([0, 1, 0, 0]), torch.tensor([2.0, -0.5]).double()),
    "sum": lambda f: F.cross_entropy(f, torch.tensor([0, 1, 0, 0]), -SIGNS[:2, 0], reduction="sum"),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_weights_of_terms(name: str) -> None:
    assert_near(*diagonal(NEGATIVE[name], extensions.DiagHessian(), 2), name, 1e-10)
    for extension in (extensions.DiagGGNExact(), extensions.DiagGGNMC(), extensions.KFAC(fisher="empirical")):
        with pytest.raises(PackpropError, match="a weight of its terms is negative"):
            diagonal(NEGATIVE[name], extension, 2)


def test_terms_whose_weights_are_all_negative_have_a_mean() -> None:
    """Weights and their sum have one sign."""

    def mean(f: Tensor) -> Tensor:
        return F.mse_loss(f, CHANCES, weight=-SIGNS.abs().expand(4, 2))

    assert_near(*diagonal(mean, extensions.DiagGGNExact(), 2), "mean", 1e-10)
