"""Products with whole curvature matrices, and the Monte Carlo diagonal of the Hessian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import packprop
from packprop import backpack, extend, extensions, operators
from packprop.engine.curvature import products
from packprop.engine.graph.walk import walk
from packprop.errors import BadInput, PackpropError
from tests.cases import BY_NAME, Case
from tests.cases.models.functions import Cube
from tests.cases.models.wrapping import Apply
from tests.curvature.dense import TWICE, symmetric
from tests.references.running import assert_near, backward, forward
from tests.selection import one_in, thorough


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def dense_hessian(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    options: Any = dict(allow_unused=True, materialize_grads=True)
    slope = flat(torch.autograd.grad(loss, parameters, create_graph=True, **options))
    rows = [flat(torch.autograd.grad(g, parameters, retain_graph=True, **options)) for g in slope]
    return symmetric(torch.stack(rows))


class Normed(nn.Module):
    """A model of layers that forward-over-reverse differentiation gets wrong, and fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.batch, self.layer = nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.instance = nn.InstanceNorm1d(3, affine=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(torch.tanh(self.inner(x)))
        x = self.batch(x.flatten(0, 1)).view_as(x)
        x = self.instance(F.scaled_dot_product_attention(x, x, x))
        return self.head(x.flatten(1))


def test_parameters_as_a_model_gives_them() -> None:
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randint(2, (4,))
    vectors, outputs = [torch.ones_like(p) for p in model.parameters()], model(x)
    loss = F.cross_entropy(outputs, y)
    calls: list[Any] = [
        lambda given: products.hvp(loss, given, vectors),
        lambda given: products.ggnvp((outputs, loss), given, iter(vectors)),
        lambda given: [products.jvp(outputs, given, vectors)],
        lambda given: products.vjp(outputs, given, torch.ones(4, 2)),
    ]
    for call in calls:
        assert_near(flat(call(model.parameters())), flat(call([*model.parameters()])), "generator")
        with pytest.raises(BadInput, match="no parameters"):
            call([])
    model.bias.requires_grad_(False)
    with pytest.raises(BadInput, match=r"the tensor of shape \[2\]"):
        calls[0](model.parameters())


def test_another_output_of_one_function_is_no_output_of_the_loss() -> None:
    model = nn.Linear(3, 4)
    mean, spread = model(torch.randn(5, 3)).chunk(2, 1)
    with pytest.raises(BadInput, match="does not depend on them"):
        products.ggnvp((spread, mean.square().sum()), [model.weight], [torch.ones(4, 3)])
    both = products.ggnvp((mean, mean.square().sum()), [model.weight], [torch.ones(4, 3)])
    assert both[0].any()


def test_whole_products_through_norms_and_attention() -> None:
    torch.manual_seed(0)
    model = Normed().double().train()
    x, y = torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(2, (5,))
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
    jacobian = torch.stack(
        [flat(torch.autograd.grad(entry, parameters, retain_graph=True)) for entry in outputs.flatten()]
    )
    hessian = dense_hessian(loss, parameters)
    vectors = [torch.randn(2, *p.shape, dtype=torch.float64) for p in parameters]
    stacked = torch.cat([vector.flatten(1) for vector in vectors], 1)

    def side_by_side(found: list[Tensor]) -> Tensor:
        return torch.cat([each.flatten(1) for each in found], 1)

    found = side_by_side(products.hvp(lambda: F.cross_entropy(model(x), y), parameters, vectors))
    assert_near(found, stacked @ hessian, "hvp", 1e-9)
    assert_near(
        side_by_side(products.hvp(loss, parameters, vectors)), stacked @ hessian, "hvp of a graph", 1e-9
    )
    bare = products.hvp(loss, parameters, [vector[0] for vector in vectors])
    assert_near(flat(bare), stacked[0] @ hessian, "hvp of one vector", 1e-9)
    pushed = products.jvp(outputs, parameters, vectors)
    assert_near(pushed.flatten(1), stacked @ jacobian.T, "jvp", 1e-9)
    pulled = products.vjp(outputs, parameters, pushed)
    assert_near(side_by_side(pulled), pushed.flatten(1) @ jacobian, "vjp", 1e-9)

    p = outputs.detach().softmax(1)
    inner = torch.block_diag(*[(torch.diag(row) - torch.outer(row, row)) / 5 for row in p])
    ggn = jacobian.T @ inner @ jacobian

    def compute() -> tuple[Tensor, Tensor]:
        f = model(x)
        return f, F.cross_entropy(f, y)

    for graph in ((outputs, loss), compute):
        assert_near(side_by_side(products.ggnvp(graph, parameters, vectors)), stacked @ ggn, "ggnvp", 1e-9)


def test_a_fused_kernel_is_named() -> None:
    problem = BY_NAME["vision-transformer-scaled-dot-product"].problem(3)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = forward(problem)
    with pytest.raises(PackpropError, match="sdpa_kernel"), packprop.backpack(extensions.DiagHessian()):
        loss.backward()
    parameters = list(problem.parameters.values())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = problem.total()
    with pytest.raises(PackpropError, match="sdpa_kernel"):
        products.hvp(loss, parameters, [torch.ones_like(p) for p in parameters])


def test_parameters_without_curvature_get_zeros() -> None:
    w, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    found = products.hvp(lambda: w.sum(), [w, unused], [torch.ones(2), torch.ones(3)])
    assert [each.tolist() for each in found] == [[0, 0], [0, 0, 0]]


@thorough
def test_many_signs_come_near_the_diagonal() -> None:
    problem = BY_NAME["conv2d-deep"].problem(3)
    draws = 4000
    source = torch.Generator().manual_seed(0)
    backward(problem, extensions.DiagHessianMC(draws, source), extensions.DiagHessian())
    parameters = list(problem.parameters.values())
    hessian = dense_hessian(problem.total(), parameters)
    deviation = (hessian.square().sum(1) - hessian.diagonal().square()).sqrt() / draws**0.5
    error = flat([p.diag_h_mc - p.diag_h for p in parameters]).abs()
    assert bool((error <= 5 * deviation + 1e-10).all())
    assert bool((error > 0).any())


@one_in(5)
@pytest.mark.covers("DiagHessianMC")
@pytest.mark.parametrize("case", [c for c in TWICE if c.name != "weight-norm"], ids=lambda case: case.name)
def test_sign_columns_are_what_they_say(case: Case) -> None:
    """With the signs known, the estimate is the mean of u * H u to the last digit."""
    draws, problem = 2, case.problem(3, case.reductions[0])
    with sdpa_kernel(SDPBackend.MATH):
        asked = extensions.DiagHessianMC(draws, generator=torch.Generator().manual_seed(0))
        backward(problem, asked, record=case.record)
        source = torch.Generator().manual_seed(0)
        parameters = list(problem.parameters.values())
        in_order = walk([forward(problem, case.record)], [None], None).leaves()
        hessian = dense_hessian(problem.total(), parameters)
    expected = torch.zeros(len(hessian), dtype=torch.float64)
    for _ in range(draws):
        drawn = {id(p): 2.0 * torch.randint(0, 2, p.shape, generator=source) - 1 for p in in_order}
        signs = flat([drawn[id(p)].double() for p in parameters])
        expected += signs * (hessian @ signs) / draws
    assert_near(flat([p.diag_h_mc for p in parameters]), expected, "diag_h_mc", 1e-9)


def test_whole_numbers_as_vectors() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.GGNMP())
    weight = problem.parameters["0.weight"]
    ones = torch.ones_like(weight)
    assert_near(weight.ggnmp(ones.long()), weight.ggnmp(ones), "ggnmp")
    operator = packprop.operators.hessian(lambda: (weight**3).sum(), [weight])
    assert_near(operator @ ones.flatten().long(), operator @ ones.flatten(), "operator")


def test_functions_without_second_derivative_are_refused_at_inner_tensors_too() -> None:
    inner = torch.randn(3, requires_grad=True) * 1
    with pytest.raises(PackpropError, match="once_differentiable"):
        products.jvp(Cube.apply(inner), [inner], [torch.ones(3)])


def test_products_behind_a_function_whose_formula_has_no_slope_at_zero() -> None:
    """The backward formula of ``logcumsumexp`` takes logarithms of what is fed in."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model, loss = extend(Apply(lambda m, x: m.a(x).logcumsumexp(1), a=inner)), extend(nn.MSELoss())
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    with backpack(extensions.GGNMP(), extensions.HMP(), extensions.DiagGGNExact(), extensions.DiagHessian()):
        loss(model(x), y).backward()
    for parameter in model.parameters():
        units = torch.eye(parameter.numel()).double().view(-1, *parameter.shape)
        assert parameter.diag_ggn_exact.abs().max() > 0.01
        for product, diagonal in ((parameter.ggnmp, "diag_ggn_exact"), (parameter.hmp, "diag_h")):
            found = product(units).flatten(1).diagonal().view_as(parameter)
            torch.testing.assert_close(found, getattr(parameter, diagonal), rtol=1e-10, atol=1e-12)


class _WrongTwice(torch.autograd.Function):
    """A square whose derivative has no slope in what is fed in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * cotangent.detach() + 0 * cotangent


def test_wrong_second_derivatives_are_refused() -> None:
    weight = torch.randn(3, requires_grad=True)
    output: Any = _WrongTwice.apply(weight)
    with pytest.raises(PackpropError, match="contradict"):
        products.jvp(output, [weight], [torch.ones(3)])


def test_a_graph_is_outputs_and_loss() -> None:
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randint(2, (4,))
    parameters, loss = [*model.parameters()], nn.CrossEntropyLoss()

    def graph() -> tuple[Tensor, Tensor]:
        return (outputs := model(x), loss(outputs, y))

    wrong: list[Any] = [lambda: graph()[1], graph()[1], (graph()[1],), lambda: (graph()[1], None)]
    for given in wrong:
        with pytest.raises(BadInput, match="needs the model's output and the loss"):
            operators.ggn(given, parameters)
    with pytest.raises(BadInput, match="loss does not depend on them"):
        products.ggnvp(lambda: (model(x), loss(model(x), y)), parameters, parameters)
    assert operators.ggn(graph, parameters).shape == (8, 8)


@pytest.mark.parametrize("make", [operators.ggn, operators.hessian])
def test_operators_of_a_changed_frozen_parameter_are_refused(make: Any) -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)))
    model[2].requires_grad_(False)
    outputs = model(torch.randn(4, 3))
    loss = nn.functional.cross_entropy(outputs, torch.ones(4).long())
    matrix = make(loss if make is operators.hessian else (outputs, loss), [model[0].weight])
    assert (matrix @ torch.ones(6)).isfinite().all()
    model[2].weight.data.mul_(2)
    with pytest.raises(PackpropError, match="changed in place"):
        matrix @ torch.ones(6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maps_of_nothing_but_rounding_are_right(dtype: torch.dtype) -> None:
    """A bias in front of batch normalisation moves nothing: both products are zero up to rounding."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = extend(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype))
        loss = extend(nn.MSELoss())
        x, y = torch.randn(6, 4, dtype=dtype), torch.randn(6, 3, dtype=dtype)
        with backpack(extensions.GGNMP()):
            loss(model(x), y).backward()
        for parameter in model.parameters():
            product = parameter.ggnmp(torch.ones_like(parameter)[None])
            assert product.isfinite().all()
        assert model[0].bias.ggnmp(torch.ones(1, 5, dtype=dtype)).abs().max() < torch.finfo(dtype).eps ** 0.5
