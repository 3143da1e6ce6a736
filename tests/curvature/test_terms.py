"""Second derivatives where the loss has a term that no sample enters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.curvature.dense import check
from tests.references.running import assert_near
from tests.selection import one_in

TERMS: dict[str, Callable[[Any], Tensor]] = {
    "squares": lambda m: sum((p**2).sum() for p in m.parameters()),
    "smooth l1": lambda m: sum(((p - 0.1).square() * 2 + 1).sqrt().mean() for p in m.parameters()),
    "one vector": lambda m: (nn.utils.parameters_to_vector(m.parameters()) ** 4).sum(),
    "halves": lambda m: (lambda a, b: (a * b).sum())(*m[0].weight.reshape(-1).chunk(2)),
    "norm": lambda m: m[0].weight.norm(),
    "orthogonality": lambda m: (m[0].weight @ m[0].weight.T).square().sum(),
    "entropy": lambda m: (m[2].weight.softmax(1) * m[2].weight.log_softmax(1)).sum(),
    "two of a kind": lambda m: (m[0].bias ** 3).sum() + F.mse_loss(m[0].bias, torch.ones(4).double()),
    "flipped": lambda m: (m[0].bias * m[0].bias.flip(0)).sum() + m[2].bias.sum(),
    "cubes of a row": lambda m: (m[0].weight[0] * m[0].weight[0] * m[0].weight[0]).sum(),
    "product of parameters": lambda m: (m[0].bias * m[2].weight[0]).square().sum(),
    "linear": lambda m: m[0].bias.sum(),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "swept": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "output": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
    "gauss-newton": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
}


def hessian_diagonal(value: Tensor, p: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(value, p, create_graph=True, allow_unused=True, materialize_grads=True)
    if not slope.requires_grad:
        return torch.zeros_like(p).detach()
    entries = [
        torch.autograd.grad(g, p, retain_graph=True, allow_unused=True, materialize_grads=True)[0].flatten()[i]
        for i, g in enumerate(slope.flatten())
    ]
    return torch.stack(entries).view_as(p)


def ready(kind: str) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    return packprop.extend(MODELS[kind]().double()), torch.randn(5, 3).double(), torch.randint(3, (5,))


@one_in(5)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS.keys())
def test_diagonals_of_the_whole_loss_and_of_samples(term: Callable[[Any], Tensor], kind: str) -> None:
    """`DiagHessian` has both terms; rows of `BatchDiagHessian` sum to that of the data alone."""
    model, x, y = ready(kind)
    asked = extensions.DiagHessian(), extensions.DiagGGNExact()
    with packprop.backpack(*asked):
        (packprop.extend(nn.CrossEntropyLoss())(model(x), y) + term(model)).backward()
    alone = {name: p.diag_h for name, p in model.named_parameters()}
    with packprop.backpack(*asked, extensions.BatchDiagHessian()):
        (packprop.extend(nn.CrossEntropyLoss())(model(x), y) + term(model)).backward()
    with packprop.disable():
        data = F.cross_entropy(model(x), y)
        whole = data + term(model)
    for name, p in model.named_parameters():
        expected = hessian_diagonal(whole, p)
        assert_near(alone[name], expected, name)
        assert_near(p.diag_h, expected, f"{name} beside the rows")
        assert_near(p.diag_h_batch.sum(0), hessian_diagonal(data, p), f"{name} of samples")
    with packprop.backpack(extensions.DiagGGNExact()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()


def test_chosen_samples_have_no_share_in_the_term() -> None:
    model, x, y = ready("swept")
    with packprop.backpack(extensions.DiagHessian(subsampling=[0, 2])):
        (packprop.extend(nn.CrossEntropyLoss())(model(x), y) + TERMS["squares"](model)).backward()
    with packprop.disable():
        data = F.cross_entropy(model(x[[0, 2]]), y[[0, 2]], reduction="sum") / 5
    for name, p in model.named_parameters():
        assert_near(p.diag_h, hessian_diagonal(data, p), name)


@pytest.mark.parametrize("term", [TERMS["squares"], TERMS["norm"], TERMS["one vector"]])
def test_products(term: Callable[[Any], Tensor]) -> None:
    """The Hessian is that of the whole loss; the GGN that of the data."""
    model, x, y = ready("swept")
    with packprop.backpack(
        extensions.HMP(), extensions.GGNMP(), extensions.PCHMP(), extensions.DiagHessianMC()
    ):
        (packprop.extend(nn.CrossEntropyLoss())(model(x), y) + term(model)).backward()
    found = {name: (p.hmp, p.ggnmp, p.pchmp) for name, p in model.named_parameters()}
    with packprop.disable():
        whole = F.cross_entropy(model(x), y) + term(model)
    for name, p in model.named_parameters():
        (slope,) = torch.autograd.grad(whole, p, create_graph=True)
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in slope.flatten()]
        check(found[name][0], torch.stack(rows), p.shape, name)
    with packprop.backpack(extensions.GGNMP(), extensions.PCHMP()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    for name, p in model.named_parameters():
        vectors = torch.randn(2, *p.shape).double()
        assert_near(found[name][1](vectors), p.ggnmp(vectors), f"{name} GGN")
        assert_near(found[name][2](vectors), p.pchmp(vectors), f"{name} positive")


def test_differentiable_diagonals() -> None:
    """Under `create_graph=True` the term is differentiated along."""
    model, x, y = ready("swept")
    with packprop.backpack(extensions.DiagHessian()):
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y) + sum(
            (p**4).sum() for p in model.parameters()
        )
        loss.backward(create_graph=True)
    with packprop.disable():
        data = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    p = model[2].bias
    (slope,) = torch.autograd.grad(data, p, create_graph=True)
    own = torch.stack([torch.autograd.grad(g, p, create_graph=True)[0][i] for i, g in enumerate(slope)])
    (expected,) = torch.autograd.grad((own + 12 * p**2).sum(), p)
    (found,) = torch.autograd.grad(p.diag_h.sum(), p)
    assert_near(found, expected, "third derivatives")
