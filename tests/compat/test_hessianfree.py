"""Products with curvature matrices and Jacobians against dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from packprop.compat.hessianfree import (
    L_op,
    R_op,
    ggn_vector_product,
    ggn_vector_product_from_plist,
    hessian_vector_product,
    jacobian_vector_product,
    transposed_jacobian_vector_product,
)
from packprop.errors import BadInput, PackpropError
from tests.selection import one_in


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def flat(tensors: object) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])  # type: ignore[attr-defined]  # any sequence does


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(0, (2, 3)).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).flatten(0, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)),
    "batch norm in training mode": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    "attention": Attention,
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor, Tensor, list[Tensor]]:
    model = MODELS[name]().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    with sdpa_kernel(SDPBackend.MATH):
        output = model(x)
    return model, output, F.cross_entropy(output, y), y, list(model.parameters())


def rows(outputs: Tensor, inputs: list[Tensor], **options: bool) -> Tensor:
    """The Jacobian of ``outputs``, a backward pass for each row."""
    found = [
        flat(torch.autograd.grad(entry, inputs, retain_graph=True, materialize_grads=True, **options))
        for entry in outputs.reshape(-1)
    ]
    return torch.stack(found)


@one_in(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [False, True])
def test_hessian(name: str, given: bool) -> None:
    _, _, loss, _, parameters = problem(name)
    slope = torch.autograd.grad(loss, parameters, create_graph=True)
    hessian = rows(flat(slope), parameters)
    vectors = [torch.randn_like(p) for p in parameters]
    found = hessian_vector_product(loss, parameters, vectors, grad_params=slope if given else None)
    near(flat(found), hessian @ flat(vectors))
    assert not any(tensor.requires_grad for tensor in found)
    (part,) = hessian_vector_product(loss, parameters[0], vectors[0])
    size = parameters[0].numel()
    near(part.flatten(), hessian[:size, :size] @ vectors[0].flatten())


@pytest.mark.parametrize("name", MODELS)
def test_generalized_gauss_newton(name: str) -> None:
    """The product is that of the whole batch, also if samples are mixed."""
    model, output, loss, _, parameters = problem(name)
    jacobian = rows(output, parameters)
    slope = torch.autograd.grad(loss, output, create_graph=True)[0]
    matrix = jacobian.T @ rows(slope, [output]) @ jacobian
    vectors = [torch.randn_like(p) for p in parameters]
    near(flat(ggn_vector_product(loss, output, model, vectors)), matrix @ flat(vectors))
    size = parameters[0].numel()
    (part,) = ggn_vector_product_from_plist(loss, output, parameters[:1], vectors[:1])
    near(part.flatten(), matrix[:size, :size] @ vectors[0].flatten())
    parameters[0].requires_grad_(False)
    found = ggn_vector_product(loss, output, model, vectors[1:])
    near(flat(found), matrix[size:, size:] @ flat(vectors[1:]))


def test_jacobians() -> None:
    _, output, _, _, parameters = problem("layer norm")
    jacobian = rows(output, parameters)
    vectors, columns = [torch.randn_like(p) for p in parameters], torch.randn_like(output)
    for multiply in (R_op, jacobian_vector_product):
        (found,) = multiply(output, parameters, vectors)
        near(found.flatten(), jacobian @ flat(vectors))
    for multiply in (L_op, transposed_jacobian_vector_product):
        near(flat(multiply([output], parameters, [columns])), columns.flatten() @ jacobian)


def test_differentiable_products() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(4, dtype=torch.float64)
    (found,) = hessian_vector_product((x**4).sum(), x, v, detach=False)
    near(torch.autograd.grad(found.sum(), x)[0], 24 * x.detach() * v)
    (found,) = L_op(x**3, x, v, detach=False)
    near(torch.autograd.grad(found.sum(), x)[0], 6 * x.detach() * v)
    (found,) = R_op(x**3, x, v, detach=False)
    near(torch.autograd.grad(found.sum(), x)[0], 6 * x.detach() * v)


def test_what_does_not_depend_is_zero() -> None:
    x, other = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    ones = [torch.ones(3), torch.ones(2)]
    for product in hessian_vector_product(x.sum() + other.sum(), [x, other], ones):
        assert not product.any()
    alone = torch.tensor(1.0, requires_grad=True)
    (product,) = hessian_vector_product(x.sum() + alone, [alone], [torch.ones(())])
    assert product.shape == ()
    assert not product
    constant, moving = R_op([torch.ones(2), 2 * x], [x], [torch.ones(3)])
    assert not constant.any()
    assert torch.equal(moving, torch.full((3,), 2.0))


def test_shapes_that_do_not_match() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(BadInput, match=r"hessian_vector_product\(f, params, v\) was called") as error:
        hessian_vector_product(x.square().sum(), [x], [torch.ones(2)])
    assert "vectors of shapes [(2,)]" in str(error.value)
    with pytest.raises(BadInput, match=r"they do not match \[\(3,\)\]"):
        R_op(2 * x, [x], [torch.ones(3), torch.ones(3)])
    with pytest.raises(BadInput, match=r"ggn_vector_product_from_plist\(loss, output, plist, v\) was called"):
        ggn_vector_product_from_plist(x.square().sum(), 2 * x, [x], [])


def test_a_fused_kernel_that_cannot_be_differentiated_twice() -> None:
    q = torch.randn(2, 2, 5, 4, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        value = F.scaled_dot_product_attention(q, q, q).square().sum()
    with pytest.raises(PackpropError) as error:
        hessian_vector_product(value, q, torch.ones_like(q))
    assert "scaled_dot_product" in error.value.why
    assert "SDPBackend.MATH" in error.value.instead


def test_a_freed_graph_is_named() -> None:
    x = torch.randn(3, requires_grad=True)
    value = x.square().sum()
    value.backward()
    with pytest.raises(PackpropError, match="freed the graph"):
        hessian_vector_product(value, x, torch.ones(3))


def test_other_errors_stay() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of luck")

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^out of luck"):
        hessian_vector_product(Broken.apply(x).square().sum(), x, torch.ones(3))


def test_graphs_are_kept_or_freed_as_asked() -> None:
    x = torch.randn(3, requires_grad=True)
    for multiply in (L_op, R_op):
        output = x.exp() * x
        multiply(output, x, torch.ones(3))
        multiply(output, x, torch.ones(3), retain_graph=False)
        with pytest.raises(PackpropError, match="freed the graph"):
            multiply(output, x, torch.ones(3))


@pytest.mark.parametrize("sparse", [False, True])
def test_tables_of_embeddings(sparse: bool) -> None:
    table = nn.Embedding(4, 2, sparse=sparse).double()
    output = table(torch.tensor([1, 3, 1])).square()
    slope = torch.randn_like(output)
    (found,) = L_op(output, table.weight, slope)
    expected = torch.zeros(4, 2, dtype=torch.float64).index_add(
        0, torch.tensor([1, 3, 1]), 2 * table.weight.detach()[[1, 3, 1]] * slope
    )
    near(found, expected)


def test_a_gradient_without_a_graph_is_taken_again() -> None:
    x = torch.randn(3, requires_grad=True)
    value = x.pow(3).sum()
    (slope,) = torch.autograd.grad(value, x, retain_graph=True)
    (found,) = hessian_vector_product(value, x, torch.ones(3), grad_params=slope)
    torch.testing.assert_close(found, 6 * x.detach())
