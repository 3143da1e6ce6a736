"""Products with curvature blocks and with whole matrices, against dense matrices of the oracle's kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import packprop
from packprop import extensions
from packprop.curvature import products
from packprop.errors import BadInput, PackpropError
from packprop.graph.walk import walk
from tests.cases import BY_NAME, CASES, ONE_OF_EACH, Case
from tests.cases.models.functions import Cube
from tests.references.oracle import Oracle, Problem
from tests.references.running import Row, assert_near, backward, forward, results

SMOKE = [case for case in CASES if "smoke" in case.tags]
PRODUCTS = [Row(extensions.HMP, "hmp", 1), Row(extensions.GGNMP, "ggnmp", 2)]
# PyTorch has no second derivatives of the others.
TWICE = list(
    dict.fromkeys(
        case
        for case in [*SMOKE, *ONE_OF_EACH]
        if case.name not in ("embedding-bag-sum", "multi-margin", "multilabel-margin")
    )
)
NOT_ELEMENTWISE = (
    *("mv", "tensordot", "vision-transformer-hand-written", "vision-transformer-library", "kl-divergence"),
    *("rnn", "rnn-relu", "gru", "lstm", "rnn-cell-loop", "lstm-cell-loop", "gru-cell-loop"),
    *("weight-norm", "tied-transpose", "module-twice"),
)
CHAINS = [
    *(BY_NAME[name] for name in ("linear-deep", "conv2d-deep", "autoencoder", "doubled", "mse-map")),
    *(
        case
        for case in TWICE
        if case in ONE_OF_EACH
        and case.name not in NOT_ELEMENTWISE
        and not case.refuses_curvature
        and case.order == 2
    ),
]


def block(problem: Problem, name: str) -> Tensor:
    """The dense Hessian block of one parameter, of the whole loss, row by row."""
    parameter = problem.parameters[name]
    (slope,) = torch.autograd.grad(
        problem.total(), parameter, create_graph=True, allow_unused=True, materialize_grads=True
    )
    rows = [
        torch.autograd.grad(g, parameter, retain_graph=True, allow_unused=True, materialize_grads=True)[
            0
        ].flatten()
        if slope.requires_grad
        else torch.zeros_like(slope).flatten()
        for g in slope.flatten()
    ]
    return symmetric(torch.stack(rows))


def symmetric(hessian: Tensor) -> Tensor:
    """A Hessian, which is one only if it is symmetric: not all second derivatives of PyTorch are right."""
    assert_near(hessian, hessian.T, "the transposed Hessian", 1e-9)
    return hessian


def check(product: Any, dense: Tensor, shape: torch.Size, what: str) -> None:
    vectors = torch.randn(3, *shape, dtype=torch.float64)
    expected = (vectors.flatten(1) if shape else vectors[:, None]) @ dense
    found = product(vectors)
    assert found.shape == vectors.shape
    assert_near(found, expected.view_as(vectors), what, floor=1e-3)
    assert_near(product(vectors[1]), expected.view_as(vectors)[1], f"{what}, one vector", floor=1e-3)


def products_for(case: Case) -> list[Row]:
    """The products that are defined for a case; the Hessian of normalised weights is wrong in PyTorch."""
    curved, wrong = case.order == 2 and not case.refuses_curvature, case.name == "weight-norm"
    return [row for row in PRODUCTS if (curved if row.order == 2 else not wrong)]


@pytest.mark.covers(by=products_for)
@pytest.mark.parametrize("case", TWICE, ids=lambda case: case.name)
def test_blocks_of_hessian_and_ggn(case: Case) -> None:
    problem, asked = case.problem(3, case.reductions[0]), products_for(case)
    with sdpa_kernel(SDPBackend.MATH):
        backward(problem, *(row() for row in asked), record=case.record)
        ggn = Oracle(case.problem(3, case.reductions[0]))
        for row in asked:
            for name, product in results(problem, row.attribute).items():
                dense = block(problem, name) if row.order == 1 else ggn.ggn_block[name]
                check(product, dense, problem.parameters[name].shape, f"{row.attribute} of {name}")


def test_wrong_second_derivatives_are_refused() -> None:
    problem = BY_NAME["weight-norm"].problem(3)
    backward(problem, extensions.HMP())
    weight = problem.parameters["0.parametrizations.weight.original1"]
    with pytest.raises(PackpropError, match="WeightNormInterface"):
        weight.hmp(torch.zeros_like(weight))
    with pytest.raises(PackpropError, match="WeightNormInterface"):
        backward(problem, extensions.DiagHessianMC())
    with pytest.raises(PackpropError, match="WeightNormInterface"):
        products.hvp(problem.total(), [weight], [torch.zeros_like(weight)])
    head = problem.parameters["3.weight"]
    check(head.hmp, block(problem, "3.weight"), head.shape, "hmp of the head")


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
def test_what_cannot_be_differentiated_twice_is_named_when_multiplied(make: Any) -> None:
    problem = BY_NAME["embedding-bag-sum"].problem(3)
    backward(problem, make())
    weight = problem.parameters["0.weight"]
    with pytest.raises(PackpropError, match="_embedding_bag") as caught:
        getattr(weight, make().savefield)(torch.zeros_like(weight))
    assert caught.value.where == "parameter '0.weight'"


def sign_parts(case: Case, modify: str) -> dict[str, Tensor]:
    """Blocks of ``GGN + sum_z J_z^T mod(r) J_z`` by hooks on the elementwise layers: nothing of packprop."""
    problem = case.problem(3)
    blocks = Oracle(case.problem(3)).ggn_block
    kept: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        kept.append((layer, inputs[0], output))
        return output

    layers = [layer for layer in problem.model.modules() if isinstance(layer, (nn.Sigmoid, nn.Tanh))]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    loss = problem.total()
    for handle in handles:
        handle.remove()
    for layer, z, output in kept:
        (slope,) = torch.autograd.grad(loss, output, retain_graph=True)
        entry = z.detach().requires_grad_()
        (first,) = torch.autograd.grad(layer(entry).sum(), entry, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), entry)
        r = second * slope
        r = r.clamp(min=0) if modify == "clip" else r.abs()
        for key, parameter in problem.parameters.items():
            for weight, unit in zip(r.flatten(), z.flatten(), strict=True):
                (row,) = torch.autograd.grad(unit, parameter, retain_graph=True, allow_unused=True)
                if row is not None:
                    blocks[key] = blocks[key] + weight * torch.outer(row.flatten(), row.flatten())
    return blocks


@pytest.mark.covers("PCHMP")
@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("case", CHAINS, ids=lambda case: case.name)
def test_blocks_of_the_positive_curvature_hessian(case: Case, modify: Any) -> None:
    problem = case.problem(3)
    backward(problem, extensions.PCHMP(modify=modify, savefield="positive"), record=case.record)
    for key, dense in sign_parts(case, modify).items():
        assert torch.linalg.eigvalsh(dense).min() > -1e-10
        check(results(problem, "positive")[key], dense, problem.parameters[key].shape, key)


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_positive_curvature_needs_elementwise_nonlinearities(name: str) -> None:
    problem = BY_NAME[name].problem(3)
    with pytest.raises(PackpropError, match="GGNMP"):
        backward(problem, extensions.PCHMP())


def test_what_positive_curvature_may_be_modified_to() -> None:
    with pytest.raises(BadInput, match="'clip', 'abs'"):
        extensions.PCHMP(modify="square")  # type: ignore[arg-type]


def test_products_outlive_the_pass_and_others() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    weight = problem.parameters["0.weight"]
    vectors = torch.randn(2, *weight.shape, dtype=torch.float64)
    first, kept = weight.hmp(vectors), weight.hmp
    backward(problem, extensions.HMP(), extensions.BatchGrad())
    problem.total().backward()
    assert torch.equal(kept(vectors), first)
    assert weight.hmp is not kept


def test_dropout_is_that_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Dropout(), nn.Linear(20, 2)))
    lossfunc = packprop.extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2))
    weight = model[0].weight
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    vector = torch.randn_like(weight)
    (expected,) = torch.autograd.grad(slope, weight, vector, retain_graph=True)
    with packprop.backpack(extensions.HMP()):
        loss.backward()
    assert_near(weight.hmp(vector), expected, "hmp", 1e-6)


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_old_values_are_refused(make: Any) -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    asked = make()
    backward(problem, asked)
    weight = problem.parameters["0.weight"]
    product = getattr(weight, asked.savefield)
    with torch.no_grad():
        problem.parameters["4.bias"].add_(1.0)
    with pytest.raises(PackpropError, match="changed in place"):
        product(torch.zeros_like(weight))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_values_that_were_put_elsewhere_are_refused(make: Any) -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, make())
    weight = problem.parameters["0.weight"]
    problem.parameters["4.weight"].data = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(PackpropError, match="changed in place"):
        getattr(weight, make().savefield)(torch.zeros_like(weight))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP])
def test_a_step_through_data_is_refused(make: Any) -> None:
    """As programs for the older library update parameters: PyTorch does not count such changes."""
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, make())
    weight = problem.parameters["0.weight"]
    product = getattr(weight, make().savefield)
    product(torch.zeros_like(weight))
    problem.parameters["4.weight"].data.add_(1e-3)
    with pytest.raises(PackpropError, match="changed in place"):
        product(torch.zeros_like(weight))


def test_an_optimizer_step_and_a_change_of_the_inputs_are_refused() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    weight = problem.parameters["0.weight"]
    problem.inputs.mul_(2)
    with pytest.raises(PackpropError, match="inputs or other tensors") as caught:
        weight.hmp(torch.ones_like(weight))
    assert caught.value.where == "parameter '0.weight'"
    backward(problem, extensions.HMP())
    weight.hmp(torch.ones_like(weight))
    torch.optim.SGD(problem.model.parameters(), lr=0.1).step()
    with pytest.raises(PackpropError, match="parameters were changed in place"):
        weight.hmp(torch.ones_like(weight))


class Cubic(nn.MSELoss):
    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return Cube.apply(f - y).abs().mean()


@pytest.mark.parametrize(
    "make", [extensions.DiagHessian, extensions.BatchDiagHessian, extensions.DiagHessianMC, extensions.HMP]
)
def test_functions_that_are_differentiable_once_are_named(make: Any) -> None:
    """PyTorch itself leaves the second derivative out: zeros would be a wrong answer."""
    model = packprop.extend(Between())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with pytest.raises(PackpropError, match="CubeBackward") as caught:
        with packprop.backpack(make()):
            packprop.extend(nn.MSELoss())(model(x), y).backward()
        model.below.weight.hmp(torch.ones_like(model.below.weight))
    assert "once_differentiable" in caught.value.why
    assert "below.weight" in caught.value.where
    found = packprop.coverage(model, (x, y)).parameters
    assert found["below.weight"].hessian == "refused"
    assert found["above.weight"].hessian == "swept"


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(Cube.apply(self.below(x)))


def test_products_with_functions_that_are_differentiable_once() -> None:
    model = packprop.extend(Between())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with packprop.backpack(extensions.GGNMP(), extensions.DiagGGNExact()):
        packprop.extend(nn.MSELoss())(model(x), y).backward()
    assert model.below.weight.diag_ggn_exact.any()
    head = model.above.weight
    assert_near(
        head.ggnmp(torch.eye(6).view(6, 2, 3)).flatten(1).diagonal(), head.diag_ggn_exact.flatten(), "", 1e-5
    )
    with pytest.raises(PackpropError, match="CubeBackward"):
        model.below.weight.ggnmp(torch.ones(3, 3))
    weights = [model.below.weight]
    with packprop.disable():
        output = model(x)
        loss = F.mse_loss(output, y)
    for multiply in (
        lambda: products.hvp(loss, weights, weights),
        lambda: products.jvp(output, weights, weights),
        lambda: products.ggnvp((output, loss), weights, weights),
    ):
        with pytest.raises(PackpropError, match="CubeBackward"):
            multiply()


@pytest.mark.parametrize("make", [extensions.DiagGGNExact, extensions.GGNMP])
def test_losses_that_are_differentiable_once_are_named(make: Any) -> None:
    model = packprop.extend(nn.Linear(3, 2))
    loss = packprop.extend(Cubic())(model(torch.randn(4, 3)), torch.randn(4, 2))
    with pytest.raises(PackpropError, match="CubeBackward in the loss"), packprop.backpack(make()):
        loss.backward()


def test_vectors_must_fit() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    backward(problem, extensions.HMP())
    with pytest.raises(BadInput, match=r"\[v, \*p\]"):
        problem.parameters["0.weight"].hmp(torch.zeros(7))
    with pytest.raises(BadInput, match="leading axis"):
        products.hvp(problem.total(), list(problem.parameters.values()), [torch.zeros(2)])


def test_products_belong_to_one_batch() -> None:
    model, data = nn.Linear(3, 2), [(torch.randn(2, 3), torch.randn(2, 2))] * 2
    with pytest.raises(PackpropError, match="one backward pass"):
        packprop.compute(model, nn.MSELoss(), data, [extensions.HMP()], progress=False)


# Whole matrices


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def dense_hessian(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    options: Any = dict(allow_unused=True, materialize_grads=True)
    slope = flat(torch.autograd.grad(loss, parameters, create_graph=True, **options))
    rows = [flat(torch.autograd.grad(g, parameters, retain_graph=True, **options)) for g in slope]
    return symmetric(torch.stack(rows))


class Normed(nn.Module):
    """Everything that forward over reverse gets wrong, and attention that is fused."""

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


def test_many_signs_come_near_the_diagonal() -> None:
    problem = BY_NAME["resnet"].problem(3)
    draws = 4000
    source = torch.Generator().manual_seed(0)
    backward(problem, extensions.DiagHessianMC(draws, source), extensions.DiagHessian())
    parameters = list(problem.parameters.values())
    hessian = dense_hessian(problem.total(), parameters)
    deviation = (hessian.square().sum(1) - hessian.diagonal().square()).sqrt() / draws**0.5
    error = flat([p.diag_h_mc - p.diag_h for p in parameters]).abs()
    assert bool((error <= 5 * deviation + 1e-10).all())
    assert bool((error > 0).any())


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
