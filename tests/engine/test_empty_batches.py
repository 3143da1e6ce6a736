"""Passes over no samples, as Poisson sampling draws them: no rows, sums of zero, PyTorch's own gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.running import assert_near


class First(nn.Module):
    """The first of what a layer returns."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.times)[0]


FLOATS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "linear-shared": (lambda: nn.Linear(3, 2, bias=False), (2, 4, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, padding="same", dilation=2), (2, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 3)),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "instance-norm-1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 5)),
    "instance-norm-2d": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "instance-norm-3d": (lambda: nn.InstanceNorm3d(4, affine=True), (4, 2, 2, 2)),
    "layer-norm": (lambda: nn.LayerNorm([2, 3]), (4, 2, 3)),
    "rms-norm": (lambda: nn.RMSNorm([2, 3]), (4, 2, 3)),
    "batch-norm": (lambda: nn.BatchNorm1d(3).eval(), (3,)),
    "rnn": (lambda: First(nn.RNN(3, 2, batch_first=True)), (4, 3)),
    "gru": (lambda: First(nn.GRU(3, 2, 2, batch_first=True, bidirectional=True)), (4, 3)),
    "lstm": (lambda: First(nn.LSTM(3, 2, batch_first=True)), (4, 3)),
    "attention": (lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), 3), (5, 4)),
}

TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(7, 3, padding_idx=1),
    "embedding-bag": lambda: nn.EmbeddingBag(7, 3, mode="sum"),
}


def _made(name: str, samples: int) -> tuple[nn.Module, Tensor]:
    if name in TABLES:
        return TABLES[name]().double(), torch.randint(7, (samples, 4))
    make, shape = FLOATS[name]
    return make().double(), torch.randn(samples, *shape).double()


@pytest.mark.parametrize("samples", [0, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", [*FLOATS, *TABLES])
def test_layers(name: str, reduction: str, samples: int) -> None:
    """Rows, norms, products, sums and squares of each layer, with samples and without any."""
    model, x = _made(name, samples)
    try:
        plain = copy.deepcopy(model)(x)
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"PyTorch itself: {error}")
    reference, target = copy.deepcopy(model), torch.zeros_like(plain)
    packprop.extend(model)
    asked = [
        getattr(extensions, each)() for each in ("BatchGrad", "BatchL2Grad", "BatchDotGrad", "SumGradSquared")
    ]
    with packprop.backpack(*asked), packprop.record():
        F.mse_loss(model(x), target, reduction=reduction).backward()
    F.mse_loss(reference(x), target, reduction=reduction).backward()
    for (key, parameter), own in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad_batch.shape == (samples, *parameter.shape)
        assert parameter.batch_l2.shape == (samples,)
        assert parameter.batch_dot.shape == (samples, samples)
        assert parameter.sum_grad_squared.shape == parameter.shape
        assert torch.equal(parameter.grad, own.grad)
        assert_near(parameter.grad_batch.sum(0), own.grad, key)
        assert_near(parameter.sum_grad_squared, parameter.grad_batch.square().sum(0), key)


def _classifier() -> nn.Module:
    return packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def test_curvature_and_variance() -> None:
    model, done = _classifier(), []
    asked = [
        "Variance",
        "DiagGGNExact",
        "DiagGGNMC",
        "DiagHessian",
        "BatchDiagGGNExact",
        "SqrtGGNExact",
        "GGNMP",
    ]
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(
        *[getattr(extensions, name)() for name in asked], extension_hook=done.append, loss_scale=4.0
    ):
        (4 * loss(model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.int64))).backward()
    for p in model.parameters():
        assert p.variance.isnan().all()
        for value in (p.diag_ggn_exact, p.diag_ggn_mc, p.diag_h, p.ggnmp(torch.ones_like(p))):
            assert torch.equal(value, torch.zeros_like(p))
        assert p.diag_ggn_exact_batch.shape == (0, *p.shape)
        assert p.sqrt_ggn_exact.shape == (2, 0, *p.shape)
    assert {id(module) for module in done} == {id(model[0]), id(model[2])}


@pytest.mark.parametrize("per", ["all", "parameter"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipped_gradients(reduction: str, per: str) -> None:
    """Zeros, to which noise can be added: the bound is known, and no sample was clipped."""
    model = _classifier()
    loss = packprop.extend(nn.CrossEntropyLoss(reduction=reduction))
    with packprop.clipped_gradients(extensions.BatchGrad(), max_norm=0.5, per=per) as clipped:
        loss(model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.int64)).backward()
    assert clipped.norms.shape == (0,)
    assert_near(clipped.bound, torch.tensor(0.5 * (2 if per == "parameter" else 1)), "bound")
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
        assert parameter.grad_batch.shape == (0, *parameter.shape)


def test_samples_that_come_second() -> None:
    model = packprop.extend(nn.Linear(3, 2), sample_axis=1)
    with packprop.backpack(extensions.BatchGrad()), packprop.record(sample_axis=1):
        F.mse_loss(model(torch.randn(4, 0, 3)), torch.zeros(4, 0, 2), reduction="sum").backward()
    assert model.weight.grad_batch.shape == (0, 2, 3)


@pytest.mark.parametrize("name", ["KFAC", "KFLR"])
def test_what_has_no_value_for_no_samples_is_refused(name: str) -> None:
    model, loss = _classifier(), packprop.extend(nn.CrossEntropyLoss())
    with (
        packprop.backpack(getattr(extensions, name)()),
        pytest.raises(packprop.PackpropError, match="the batch is empty"),
    ):
        loss(model(torch.randn(0, 3)), torch.zeros(0, dtype=torch.int64)).backward()


def test_values_of_an_earlier_batch_are_replaced() -> None:
    model, loss = _classifier(), packprop.extend(nn.CrossEntropyLoss())
    for size in (4, 0, 3):
        with packprop.backpack(extensions.BatchGrad(), extensions.BatchL2Grad()):
            loss(model(torch.randn(size, 3)), torch.zeros(size, dtype=torch.int64)).backward()
        assert {len(p.grad_batch) for p in model.parameters()} == {size}
        assert {len(p.batch_l2) for p in model.parameters()} == {size}
