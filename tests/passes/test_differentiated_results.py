"""Results that are differentiated: gradients of quantities, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases import BY_NAME
from tests.references.oracle import Oracle, Problem
from tests.references.running import (
    HESSIANS,
    ROWS,
    Row,
    assert_all_near,
    assert_near,
    backward,
    make_all,
    results,
    stacked,
)
from tests.selection import often, one_in

DOUBLE = [
    "linear-deep",
    "linear-3d",
    "conv2d",
    "convtranspose2d-options",
    "autoencoder",
    "layernorm-shared",
    "embedding-positions",
    "prelu-channels",
    "tied-transpose",
    "vision-transformer-hand-written",
    "bce-pos-weight",
    "ce-map-weights-ignore-smoothing",
    "own-coupled",
    "cosine-similarity",
    "gru-cell-loop",
    "lstm-projected-two-layers-both-directions",
    "gru-trained-initial-state",
]


def scalar_of(named: dict[str, Tensor], row: Row) -> Tensor:
    """Some nonlinear function of a quantity, the same whatever the columns of a square root."""
    if row.attribute == "sqrt_ggn_exact":
        root = stacked(named)
        named = {"": torch.einsum("vnp,vnq->npq", root, root)}
    return sum(
        (torch.cos(torch.arange(v.numel())).to(v.dtype) * (v + v.square()).flatten()).sum()
        for v in named.values()
    )


def expected_scalar(oracle: Oracle, row: Row) -> Tensor:
    if row.attribute == "sqrt_ggn_exact":
        block = oracle.ggn_batch
        weights = torch.cos(torch.arange(block.numel())).to(block.dtype)
        return (weights * (block + block.square()).flatten()).sum()
    return scalar_of(getattr(oracle, row.attribute), row)


# Third derivatives through torch's layer norm are wrong (differences say so), in the oracle as well.
THIRD_ORDER = ("vision-transformer-hand-written",)


@one_in(5)
@often(lambda name: not name.startswith(("lstm", "gru-trained")))
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("name", DOUBLE)
def test_gradient_of_every_quantity(name: str) -> None:
    """``create_graph=True``, then the gradient of a function of each quantity."""
    case = BY_NAME[name]
    problem, other = case.problem(2), case.problem(2)
    oracle = Oracle(other, create_graph=True)
    own = [] if name in THIRD_ORDER else HESSIANS
    rows = [row for row in [*ROWS, *own] if not row.sampled and row.attribute not in ("kflr", "ekfac_exact")]
    backward(problem, *make_all(rows), create_graph=True)
    for row in rows:
        value = scalar_of(results(problem, row.attribute), row)
        expected = expected_scalar(oracle, row)
        assert_near(value.detach(), expected.detach(), row.attribute)
        if not expected.requires_grad:
            assert not value.requires_grad or row.order == 2
            continue
        found, known = (
            torch.autograd.grad(
                scalar,
                list(each.parameters.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for scalar, each in ((value, problem), (expected, other))
        )
        assert_all_near(
            dict(zip(problem.parameters, found, strict=True)),
            dict(zip(other.parameters, known, strict=True)),
            f"gradient of {row.attribute}",
            1e-9,
        )
    for parameter in problem.parameters.values():
        parameter.grad = None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("make", [extensions.DiagHessian, extensions.DiagHessianMC])
@pytest.mark.parametrize("name", THIRD_ORDER)
def test_third_derivatives_that_are_wrong_are_refused(name: str, make: Any) -> None:
    problem = BY_NAME[name].problem(2)
    with pytest.raises(PackpropError, match="third derivative is wrong"):
        backward(problem, make(), create_graph=True)


def test_third_derivatives_through_layer_norm_are_wrong_in_torch() -> None:
    """Once this fails, `is_wrong_in_third_order` can go."""
    x, u = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def slope(x: Tensor, u: Tensor) -> Tensor:
        return torch.autograd.grad(F.layer_norm(x, (4,)), x, u, create_graph=True)[0]

    with pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(slope, (x, u))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradient_of_drawn_quantities() -> None:
    """With the draws fixed, a drawn quantity is a function of the parameters like any other."""
    epsilon = 1e-5
    case = BY_NAME["linear-deep"]

    def evaluate(shift: float, create_graph: bool) -> tuple[Tensor, Problem]:
        problem = case.problem(3)
        with torch.no_grad():
            for parameter in problem.parameters.values():
                parameter.add_(shift)
        rows = [row for row in ROWS if row.sampled]
        backward(problem, *make_all(rows, seed=5), create_graph=create_graph)
        total = torch.zeros((), dtype=torch.float64)
        for attribute in ("diag_ggn_mc", "sqrt_ggn_mc"):
            total = total + sum(
                (torch.cos(torch.arange(v.numel())).to(v.dtype) * v.square().flatten()).sum()
                for v in results(problem, attribute).values()
            )
        for factors in results(problem, "kfac").values():
            total = total + sum(f.square().sum() for f in factors)
        return total, problem

    value, problem = evaluate(0.0, True)
    gradients = torch.autograd.grad(value, list(problem.parameters.values()))
    slope = sum(g.sum() for g in gradients)
    numeric = (evaluate(epsilon, False)[0] - evaluate(-epsilon, False)[0]) / (2 * epsilon)
    assert_near(slope, numeric, "directional derivative", 1e-6)
    for parameter in problem.parameters.values():
        parameter.grad = None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradient_of_variance_as_in_the_tutorial() -> None:
    model = packprop.extend(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3)).double()
    )
    loss_function = packprop.extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(4, 1, 4, 4).double(), torch.randint(3, (4,))
    with packprop.backpack(extensions.Variance()):
        loss_function(model(x), y).backward(retain_graph=True, create_graph=True)
    total = sum(p.variance.sum() for p in model.parameters())
    found = torch.autograd.grad(total, list(model.parameters()))
    rows = []
    with packprop.disable():
        for n in range(4):
            loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
    expected = torch.autograd.grad(torch.stack(rows).var(0, correction=0).sum(), list(model.parameters()))
    for (name, parameter), a, b in zip(model.named_parameters(), found, expected, strict=True):
        assert_near(a, b, name)
        parameter.grad = None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_inputs_at_the_bend_of_a_prelu() -> None:
    """The derivative of ``grad_batch`` in an input that is zero is that of autograd's own gradient."""
    model, loss_function = packprop.extend(nn.PReLU(3)), packprop.extend(nn.MSELoss(reduction="sum"))
    x, y = torch.tensor([[0.0, 1, -1], [-1, 0, 2]], requires_grad=True), torch.randn(2, 3)
    loss = loss_function(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward(create_graph=True)
    (expected,) = torch.autograd.grad(loss, model.weight, create_graph=True)
    found, expected = (
        torch.autograd.grad(g.sum(), x, retain_graph=True)[0] for g in (model.weight.grad_batch, expected)
    )
    torch.testing.assert_close(found, expected)
    model.zero_grad()
