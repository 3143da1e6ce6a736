"""Hessian diagonals at their limits: functions that look like others, precision, what PyTorch gets wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases import BY_NAME
from tests.references.oracle import Oracle
from tests.references.running import assert_near, backward, results
from tests.selection import one_in


class Sigmoid(torch.autograd.Function):
    """A function of a user's own that has the name of one of torch's, and couples entries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.flip(1)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangents[0] * x.flip(1) + (cotangents[0] * x).flip(1)


def test_names_of_ones_own_functions_mean_nothing() -> None:
    torch.manual_seed(0)
    linear = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    with packprop.record():
        loss = nn.functional.mse_loss(Sigmoid.apply(linear(x)), y)
    with packprop.backpack(extensions.DiagHessian()):
        loss.backward()

    def value(weight: Tensor) -> Tensor:
        z = nn.functional.linear(x, weight, linear.bias.detach())
        return nn.functional.mse_loss(z * z.flip(1), y)

    dense = torch.autograd.functional.hessian(value, linear.weight.detach()).reshape(6, 6)
    assert_near(linear.weight.diag_h, dense.diagonal().view(2, 3), "diag_h")


@one_in(2)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("pool", [nn.Identity, lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2)])
@pytest.mark.parametrize("bend", [nn.Sigmoid, nn.ELU, nn.ReLU])
def test_create_graph_with_activations_and_pooling(bend: Any, pool: Any) -> None:
    """A root of the curvature would have no derivative where pooling lets no gradient through."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), bend(), pool(), nn.Flatten(), nn.LazyLinear(2)).double()
    x, y = torch.randn(2, 1, 5, 5, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y)  # which says how wide it is
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(nn.functional.mse_loss(model(x), y), parameters, create_graph=True)
    expected = [
        torch.stack(
            [
                torch.autograd.grad(g, p, create_graph=True)[0].flatten()[place]
                for place, g in enumerate(slope.flatten())
            ]
        )
        for p, slope in zip(parameters, slopes, strict=True)
    ]
    known = torch.autograd.grad(
        torch.cat(expected).square().sum(), parameters, allow_unused=True, materialize_grads=True
    )
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())(model(x), y)
    with packprop.backpack(extensions.DiagHessian()):
        loss.backward(create_graph=True)
    found = torch.autograd.grad(
        sum(p.diag_h.square().sum() for p in parameters),
        parameters,
        allow_unused=True,
        materialize_grads=True,
    )
    for p, diagonal, slope, wanted in zip(parameters, expected, found, known, strict=True):
        assert_near(p.diag_h.flatten(), diagonal, "diag_h", 1e-9)
        assert_near(slope, wanted, "its gradient", 1e-9)
        p.grad = None


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["linear-deep", "layernorm-shared", "tied-transpose", "conv2d-deep"])
def test_precisions(name: str, dtype: torch.dtype) -> None:
    problem = BY_NAME[name].problem(3, dtype=dtype)
    exact = Oracle(BY_NAME[name].problem(3)).diag_h_batch
    backward(problem, extensions.DiagHessian(), extensions.BatchDiagHessian())
    largest = max(value.abs().max().item() for value in exact.values())
    for key, rows in results(problem, "diag_h_batch").items():
        assert rows.dtype == results(problem, "diag_h")[key].dtype == torch.float32
        assert_near(rows, exact[key], key, 1e-4 if dtype == torch.float32 else 0.2, largest)


def test_a_branch_that_was_summed_is_refused() -> None:
    model = packprop.extend(nn.Linear(3, 2))
    outputs = model(torch.randn(4, 3))
    penalty = packprop.eager_backward(lambda f: f.square().sum(), outputs)
    loss = packprop.extend(nn.MSELoss())(outputs, torch.zeros(4, 2)) + penalty
    with pytest.raises(PackpropError, match="eager_backward"), packprop.backpack(extensions.DiagHessian()):
        loss.backward()


def test_the_second_derivative_of_normalised_weights_is_wrong_in_pytorch() -> None:
    """If this fails, PyTorch has been mended, and `is_wrong_in_second_order` can go."""
    v, g = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 1, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)

    def value(v: Tensor) -> Tensor:
        return (x @ torch._weight_norm(v, g, 0).T).tanh().square().sum()

    dense = torch.autograd.functional.hessian(value, v).reshape(12, 12)
    by_hand = torch.autograd.functional.hessian(
        lambda v: (x @ (g * v / v.norm(dim=1, keepdim=True)).T).tanh().square().sum(), v
    ).reshape(12, 12)
    assert (dense - by_hand).abs().max() > 1e-2 * by_hand.abs().max()


def test_other_layers_are_not_refused_for_a_normalised_weight() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()
    )
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    found = packprop.coverage(model, (x, y)).parameters
    assert found["2.parametrizations.weight.original1"].hessian == "refused"
    assert found["0.weight"].hessian == found["2.bias"].hessian == "swept"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("parametrizations" not in name)
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())(model(x), y)
    with packprop.backpack(extensions.DiagHessian()):
        loss.backward()
    assert model[0].weight.diag_h.shape == (4, 3)


def test_coverage_says_which_way() -> None:
    problem = BY_NAME["vision-transformer-hand-written"].problem(2)
    found = packprop.coverage(problem.model, (problem.inputs, problem.targets)).parameters
    assert found["mlp.0.weight"].hessian == "swept"
    assert found["attn.qkv.weight"].hessian == "output"
    assert found["pos_embed"].hessian == "parameter"


@pytest.mark.parametrize("extension", [extensions.DiagHessian(), extensions.BatchDiagHessian()])
def test_parameters_without_entries(extension: Any) -> None:
    model, x = packprop.extend(nn.Linear(0, 2)), torch.randn(3, 0)
    with packprop.backpack(extension):
        nn.functional.mse_loss(model(x), torch.randn(3, 2), reduction="sum").backward()
    samples = () if extension.savefield == "diag_h" else (3,)
    assert getattr(model.weight, extension.savefield).shape == (*samples, 2, 0)
    whole = 6.0 if extension.savefield == "diag_h" else 2.0
    torch.testing.assert_close(getattr(model.bias, extension.savefield), torch.full((*samples, 2), whole))
