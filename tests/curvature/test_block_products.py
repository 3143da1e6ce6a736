"""Products with curvature blocks of single parameters, against dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import packprop
from packprop import extensions
from packprop.engine.curvature import products
from packprop.errors import BadInput, PackpropError
from tests.cases import BY_NAME, Case
from tests.curvature.dense import CHAINS, NOT_ELEMENTWISE, TWICE, block, check, products_for
from tests.references.oracle import Oracle
from tests.references.running import backward, results
from tests.selection import often, one_in


@one_in(5)
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


@one_in(3)
@often(lambda case, modify: modify == "clip" or case.name.endswith("deep"))
@pytest.mark.covers("PCHMP")
@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("case", CHAINS, ids=lambda case: case.name)
def test_blocks_of_the_positive_curvature_hessian(case: Case, modify: Any) -> None:
    problem = case.problem(3)
    backward(problem, extensions.PCHMP(modify=modify, savefield="positive"), record=case.record)
    for key, dense in sign_parts(case, modify).items():
        assert torch.linalg.eigvalsh(dense).min() > -1e-10
        check(results(problem, "positive")[key], dense, problem.parameters[key].shape, key)


@one_in(2)
@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_positive_curvature_needs_elementwise_nonlinearities(name: str) -> None:
    problem = BY_NAME[name].problem(3)
    with pytest.raises(PackpropError, match="GGNMP"):
        backward(problem, extensions.PCHMP())


def test_what_positive_curvature_may_be_modified_to() -> None:
    with pytest.raises(BadInput, match="'clip', 'abs'"):
        extensions.PCHMP(modify="square")  # type: ignore[arg-type]  # wrong on purpose


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
