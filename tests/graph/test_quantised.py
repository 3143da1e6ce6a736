"""Weights of eight bits: right where PyTorch has a derivative, refused by name where it has none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.references.running import assert_near
from tests.versions import needs_hooks

EIGHT_BITS = torch.float8_e4m3fn
ASKED = extensions.BatchGrad, extensions.BatchL2Grad, extensions.DiagGGNExact, extensions.KFLR


def values(model: nn.Module, x: Tensor, *asked: Any) -> None:
    """A step with extensions under a squared error."""
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())
    out = model(x)
    with packprop.backpack(*(asked or [make() for make in ASKED])):
        loss(out, torch.zeros_like(out)).backward()


def by_loops(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of single samples, one after the other."""
    rows = []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for n in range(len(x)):
        out = model(x[n : n + 1])
        share = F.mse_loss(out, torch.zeros_like(out)) / len(x)
        rows.append(torch.autograd.grad(share, list(trained.values())))
    return dict(zip(trained, map(torch.stack, zip(*rows, strict=True)), strict=True))


def check(model: nn.Module, x: Tensor) -> None:
    values(model, x)
    for name, expected in by_loops(model, x).items():
        parameter = model.get_parameter(name)
        assert_near(parameter.grad_batch, expected, name, 1e-5)
        assert_near(parameter.batch_l2, expected.flatten(1).square().sum(1), name, 1e-5)


class Adapted(nn.Module):
    """A frozen weight of eight bits with a scale, and a trained product of low rank beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = (torch.randn(5, 4) * 40).to(dtype)
        self.frozen = nn.Parameter(weight, requires_grad=False) if dtype.is_floating_point else None
        self.register_buffer("integers", None if dtype.is_floating_point else weight)
        self.scale = nn.Parameter(torch.full((5, 1), 0.02))
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        stored = self.integers if self.frozen is None else self.frozen
        assert isinstance(stored, Tensor)
        h = F.linear(x, stored.to(x.dtype) * self.scale) + self.up(self.down(x))
        out: Tensor = self.head(h.tanh())
        return out


@pytest.mark.parametrize("samples", [3, 4])
@pytest.mark.parametrize("dtype", [EIGHT_BITS, torch.float8_e5m2, torch.int8], ids=str)
def test_frozen_weights_of_eight_bits_below_trained_ones(dtype: torch.dtype, samples: int) -> None:
    check(Adapted(dtype), torch.randn(samples, 4))


def quietly(make: Any, *args: Any, **options: Any) -> nn.Module:
    """What ``torch.ao.quantization`` makes, without the warning that it will go."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = make(*args, **options)
        return made


def test_training_that_is_aware_of_quantisation() -> None:
    """Weights and activations are rounded in the forward pass; the derivative goes straight through."""
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    model = quietly(torch.ao.quantization.prepare_qat, model)
    for _ in range(3):
        model(torch.randn(50, 4))
    check(model.apply(torch.ao.quantization.disable_observer), torch.randn(4, 4))


class Stacked(nn.Module):
    """Three layers, one of which is quantised as it runs."""

    def __init__(self, quantised: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
        layer = getattr(self, quantised)
        options = {"dtype": torch.qint8}
        made = quietly(torch.ao.quantization.quantize_dynamic, layer, {nn.Linear}, **options)
        setattr(self, quantised, made)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


needs_kernels = pytest.mark.skipif(
    torch.backends.quantized.engine == "none", reason="PyTorch was built without quantised kernels"
)


@needs_kernels
def test_a_layer_quantised_as_it_runs_below_trained_ones() -> None:
    """It rounds by the range of the batch, which is constant to a derivative."""
    model, x = Stacked("first"), torch.randn(4, 4)
    values(model, x)
    for parameter in model.parameters():
        assert_near(parameter.grad_batch.sum(0), parameter.grad, "rows", 1e-5)


@needs_kernels
@pytest.mark.parametrize(("quantised", "below"), [("second", "first"), ("third", "second")])
def test_trained_layers_below_a_quantised_one_are_refused(quantised: str, below: str) -> None:
    """PyTorch has no derivative for it, warns, and goes on as if it were zero."""
    with pytest.raises(PackpropError) as caught:
        values(Stacked(quantised), torch.randn(4, 4))
    assert f"'{below}.0.weight'" in caught.value.where
    assert "no derivative" in caught.value.why
    assert "requires_grad=False" in caught.value.instead


class Stored(nn.Module):
    """A trained weight that is kept in eight bits, and taken out of them to be used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4).to(EIGHT_BITS)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


@pytest.mark.parametrize(
    "make", [*ASKED, extensions.DiagHessian, extensions.HMP], ids=lambda make: make.__name__
)
def test_trained_parameters_of_eight_bits_are_refused(make: Any) -> None:
    with pytest.raises(PackpropError) as caught:
        values(Stored(), torch.randn(5, 4), make())
    assert "'weight'" in caught.value.where
    assert "float8_e4m3fn" in caught.value.where
    assert "bfloat16" in caught.value.instead


def test_next_to_a_parameter_of_eight_bits_others_have_values() -> None:
    model, x = Stored(), torch.randn(5, 4)
    model.weight.requires_grad_(False)
    check(model, x)


class Products(nn.Module):
    """Entries of inputs are chosen in eight bits, by a function that a trained parameter enters, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        stored = x.to(EIGHT_BITS)
        return torch.where(x > 0, self.weight.to(EIGHT_BITS), stored).to(x.dtype)


@needs_hooks  # where() takes no numbers of eight bits there
def test_a_forward_pass_in_eight_bits_is_what_it_was() -> None:
    """Inputs as long as they are wide are looked at twice; in eight bits PyTorch cannot subtract them."""
    model, x = Products(), torch.randn(16, 16)
    before = model(x)
    assert torch.equal(packprop.extend(model)(x), before)


class InEightBits(torch.autograd.Function):
    """A product whose gradients are rounded to eight bits, by their own range."""

    @staticmethod
    def rounded(tensor: Tensor) -> Tensor:
        scale = 448 / tensor.abs().max().clamp(min=1e-12)
        return (tensor * scale).to(EIGHT_BITS).to(tensor.dtype) / scale

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return InEightBits.rounded(x) @ InEightBits.rounded(weight).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), rounded = ctx.saved_tensors, InEightBits.rounded(gradients[0])
        return rounded @ InEightBits.rounded(weight), rounded.T @ InEightBits.rounded(x)


class LinearInEightBits(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = InEightBits.apply(input, self.weight)
        return product + self.bias


def test_gradients_that_are_rounded_by_their_range_are_refused() -> None:
    """Rows of single samples, each rounded by its own range, would not be those of the batch."""
    model = nn.Sequential(LinearInEightBits(4, 6), nn.Tanh(), LinearInEightBits(6, 3))
    with pytest.raises(PackpropError) as caught:
        values(model, torch.randn(5, 4))
    assert "InEightBits" in caught.value.where
