"""Quantities of the whole batch, where batch normalisation mixes the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.curvature import operators
from packprop.engine.curvature.products import ggnvp, hvp
from tests.curvature.dense import check, symmetric
from tests.references.refusals import check as check_error
from tests.references.refusals import refused
from tests.references.running import assert_near
from tests.selection import thorough


def ready() -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Tanh(), nn.Linear(4, 3)
    return packprop.extend(nn.Sequential(*layers).double()), torch.randn(5, 3).double(), torch.randint(3, (5,))


def dense_hessian(model: Any, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), p, create_graph=True)
    rows = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in slope.flatten()]
    return symmetric(torch.stack(rows))


def dense_ggn(model: Any, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    out = model(x)
    rows = [torch.autograd.grad(f, p, retain_graph=True)[0].flatten() for f in out.flatten()]
    leaf = out.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(leaf, y), leaf, create_graph=True)
    curved = [torch.autograd.grad(g, leaf, retain_graph=True)[0].flatten() for g in slope.flatten()]
    jacobian = torch.stack(rows)
    return jacobian.T @ torch.stack(curved) @ jacobian


def test_products_with_blocks() -> None:
    model, x, y = ready()
    with packprop.backpack(extensions.HMP(), extensions.GGNMP()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    found = {name: (p.hmp, p.ggnmp) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if name == "0.bias":  # the mean over the batch takes it off again
            continue
        check(found[name][0], dense_hessian(model, x, y, p), p.shape, name)
        check(found[name][1], dense_ggn(model, x, y, p), p.shape, name)


@thorough
def test_estimated_diagonals() -> None:
    """One draw is `u * (H u)` with the Hessian of the batch."""
    model, x, y = ready()
    with packprop.backpack(extensions.DiagHessianMC(2000, torch.Generator().manual_seed(0))):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    p = model[3].bias
    assert_near(p.diag_h_mc, dense_hessian(model, x, y, p).diagonal(), "the mean over draws", 0.1)


@pytest.mark.parametrize("weighted", [True, False])
def test_whole_products(weighted: bool) -> None:
    model, x, y = ready()
    p = model[3].weight if weighted else model[0].weight
    vector = torch.randn(p.shape).double()

    def evaluate() -> tuple[Tensor, Tensor]:
        out = model(x)
        return out, F.cross_entropy(out, y)

    hessian, ggn = dense_hessian(model, x, y, p), dense_ggn(model, x, y, p)
    assert_near(hvp(evaluate()[1], [p], [vector])[0].flatten(), hessian @ vector.flatten(), "hvp")
    assert_near(ggnvp(evaluate, [p], [vector])[0].flatten(), ggn @ vector.flatten(), "ggnvp")
    assert_near(operators.ggn(evaluate, [p]) @ vector.flatten(), ggn @ vector.flatten(), "operator")


@pytest.mark.parametrize(
    "asked", [extensions.BatchGrad, extensions.DiagGGNExact, extensions.DiagHessian, extensions.PCHMP]
)
def test_what_is_made_of_samples_is_refused(asked: Any) -> None:
    model, x, y = ready()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    check_error(refused(loss, extensions.HMP(), asked(), model=model), "'1' (BatchNorm1d)")
