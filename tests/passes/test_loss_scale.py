"""Values of the loss that is meant, where a multiple of it is differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import packprop
from packprop import extensions
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import BadInput
from tests.references.running import assert_near
from tests.selection import one_in

SCALE = 8.0


def drawn(make: Any, **options: Any) -> Any:
    return lambda: make(generator=torch.Generator().manual_seed(0), **options)


ASKED = {
    "BatchGrad": extensions.BatchGrad,
    "BatchGrad-chosen": lambda: extensions.BatchGrad(subsampling=[2, 0]),
    "BatchL2Grad": extensions.BatchL2Grad,
    "Projected": extensions.Projected,
    "SumGradSquared": extensions.SumGradSquared,
    "Variance": extensions.Variance,
    "BatchDotGrad": extensions.BatchDotGrad,
    "DiagGGNExact": extensions.DiagGGNExact,
    "BatchDiagGGNExact": extensions.BatchDiagGGNExact,
    "DiagGGNMC": drawn(extensions.DiagGGNMC, mc_samples=2),
    "BatchDiagGGNMC": drawn(extensions.BatchDiagGGNMC),
    "SqrtGGNExact": extensions.SqrtGGNExact,
    "SqrtGGNMC": drawn(extensions.SqrtGGNMC),
    "KFAC": drawn(extensions.KFAC),
    "KFAC-empirical": lambda: extensions.KFAC(fisher="empirical"),
    "KFLR": extensions.KFLR,
    "KFRA": extensions.KFRA,
    "HBP": extensions.HBP,
    "HBP-chen": lambda: extensions.HBP(ea_strategy="E(J^T) E(H) E(J)"),
    "EKFAC": drawn(extensions.EKFAC, mc_samples=2),
    "EKFAC-exact": lambda: extensions.EKFAC(fisher="exact"),
    "DiagHessian": extensions.DiagHessian,
    "BatchDiagHessian": extensions.BatchDiagHessian,
    "DiagHessianMC": drawn(extensions.DiagHessianMC),
    "BatchJacobian": extensions.BatchJacobian,
    "HMP": extensions.HMP,
    "GGNMP": extensions.GGNMP,
    "PCHMP": extensions.PCHMP,
}


def test_every_extension_is_here() -> None:
    assert {name.split("-")[0] for name in ASKED} == set(extensions.__all__) - {"Extension", "Row"}


def values(make: Any, scale: float, loss_scale: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is saved where ``scale`` times the loss is differentiated, and the gradients."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    extension = make()
    value = scale * loss(model(torch.randn(5, 3).double()), torch.tensor([0, 1, 2, 1, 0]))
    with packprop.backpack(extension, loss_scale=loss_scale):
        value.backward()
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        saved = getattr(parameter, extension.savefield)
        if callable(saved):
            saved = saved(torch.arange(1.0, parameter.numel() + 1).view_as(parameter).double())
        for place, tensor in enumerate(tensors_in(saved)):
            found[f"{name}[{place}]"] = tensor
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@one_in(3)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ASKED)
def test_values_are_those_of_the_loss_that_is_meant(name: str, as_tensor: bool) -> None:
    """A power of two changes no digit but those of roots; ``.grad`` keeps the factor."""
    expected, gradients = values(ASKED[name], 1.0, 1.0)
    scale = torch.tensor(SCALE) if as_tensor else SCALE
    found, scaled = values(ASKED[name], SCALE, scale)
    assert found.keys() == expected.keys()
    assert found
    for key, value in found.items():
        assert_near(value, expected[key], key)
    for key, gradient in scaled.items():
        assert_near(gradient, SCALE * gradients[key], key)


@pytest.mark.parametrize("scale", [torch.tensor(8192.0).half(), torch.tensor(3.0).bfloat16()], ids=str)
def test_a_scale_in_sixteen_bits(scale: Tensor) -> None:
    """Its inverse and its square need more."""
    expected, _ = values(extensions.BatchL2Grad, 1.0, 1.0)
    found, _ = values(extensions.BatchL2Grad, float(scale), scale)
    for key, value in found.items():
        assert_near(value, expected[key], key, 1e-6)
    model, x = packprop.extend(nn.Linear(3, 2)), torch.randn(5, 3)
    norms = []
    for factor, told in ((1.0, 1.0), (float(scale), scale)):
        with packprop.clipped_gradients(max_norm=1.0, loss_scale=told) as clipped:
            (factor * nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 1, 0, 1]))).backward()
        norms.append(clipped.norms)
    assert_near(norms[1], norms[0], "norms", 1e-6)


class Reads(TorchDispatchMode):
    """Counts how often an entry of a tensor is brought to Python: on a device that is waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_scale_on_the_device_is_not_waited_for() -> None:
    counts = []
    for scale in (SCALE, torch.tensor([SCALE])):
        with Reads() as reads:
            values(extensions.BatchL2Grad, SCALE, scale)
        counts.append(reads.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "2", True, torch.ones(2)])
def test_other_scales_are_refused(wrong: Any) -> None:
    with pytest.raises(BadInput, match="loss_scale"):
        packprop.backpack(extensions.BatchGrad(), loss_scale=wrong)


def test_results_can_be_differentiated() -> None:
    torch.manual_seed(0)
    model, loss = packprop.extend(nn.Linear(3, 2)), packprop.extend(nn.MSELoss())
    gradients = []
    for scale in (1.0, SCALE):
        value = scale * loss(model(torch.ones(4, 3)), torch.zeros(4, 2))
        with packprop.backpack(extensions.BatchL2Grad(), loss_scale=scale):
            value.backward(create_graph=True)
        (gradient,) = torch.autograd.grad(model.weight.batch_l2.sum(), model.weight)
        gradients.append(gradient)
    assert_near(gradients[1], gradients[0], "the derivative", 1e-5)
