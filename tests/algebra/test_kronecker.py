"""What is done with Kronecker factors: products, inverses, damping."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.errors import BadInput, PackpropError
from tests.references.running import assert_near


def spd(size: int) -> Tensor:
    root = torch.randn(size, size + 2, dtype=torch.float64)
    return root @ root.T


@pytest.mark.parametrize("factors", [[spd(3), spd(4)], [spd(5)]], ids=["two", "one"])
def test_helpers_agree_with_the_dense_matrix(factors: list[Tensor]) -> None:
    whole = kronecker.dense(factors)
    eye = torch.eye(len(whole), dtype=torch.float64)
    shape = [len(factor) for factor in factors]
    vectors = torch.randn(6, *shape, dtype=torch.float64)
    flat = vectors.flatten(1)
    assert_near(kronecker.multiply(factors, vectors), (flat @ whole).view_as(vectors), "multiply")
    assert_near(kronecker.multiply(factors, vectors[0]), (whole @ flat[0]).view_as(vectors[0]), "one vector")
    solved = torch.linalg.solve(whole + 0.3 * eye, flat.T).T
    assert_near(kronecker.solve(factors, vectors, 0.3), solved.reshape(vectors.shape), "solve")
    assert_near(kronecker.trace(factors), whole.trace(), "trace")
    assert_near(kronecker.logdet(factors), torch.logdet(whole), "logdet")
    assert_near(kronecker.logdet(factors, 0.3), torch.logdet(whole + 0.3 * eye), "damped logdet")
    exact = kronecker.dense(kronecker.inverse(factors, 0.0))
    assert_near(exact @ whole, eye, "inverse")


def test_split_damping_keeps_the_trace_in_balance() -> None:
    factors, damping = [spd(3), 100 * spd(4)], 0.5
    inverse = kronecker.inverse(factors, damping)
    shifts = [torch.linalg.inv(i) - f for i, f in zip(inverse, factors, strict=True)]
    sizes = [shift.diagonal().mean() for shift in shifts]
    assert_near(sizes[0] * sizes[1], torch.tensor(damping, dtype=torch.float64), "the product of both shifts")
    means = [factor.diagonal().mean() for factor in factors]
    assert_near(sizes[1] / sizes[0], means[1] / means[0], "their ratio")


def test_bad_arguments_of_helpers() -> None:
    with pytest.raises(BadInput, match="square"):
        kronecker.dense([torch.zeros(2, 3)])
    with pytest.raises(BadInput, match="negative"):
        kronecker.solve([torch.eye(2)], torch.zeros(2), -1.0)
    with pytest.raises(BadInput, match="6 rows"):
        kronecker.multiply([torch.eye(2), torch.eye(3)], torch.zeros(4, 5))
    for shape in ((3, 5), (2, 9)):  # as operators take vectors; and two at once
        with pytest.raises(BadInput, match="3 rows"):
            kronecker.solve([torch.eye(3)], torch.zeros(shape), 1.0)

    for damping in (torch.inf, torch.nan):
        with pytest.raises(BadInput, match="infinite or NaN"):
            kronecker.inverse([torch.eye(2)], damping)
    whole: Any = {"weight": [torch.eye(2)], "bias": [torch.eye(2)]}
    with pytest.raises(BadInput, match="give the block of one parameter"):
        kronecker.solve(whole, torch.zeros(2), 1.0)


def test_entries_of_a_diagonal_are_no_rounding() -> None:
    diagonal, vector = torch.tensor([1.0, 1e-9]), torch.ones(2)
    assert_near(kronecker.eigen([diagonal]).values, diagonal, "eigenvalues")
    assert_near(kronecker.logdet([diagonal]), diagonal.log().sum(), "logdet")
    assert_near(kronecker.solve([diagonal], vector, 0.0), 1 / diagonal, "solve")
    two = kronecker.solve([diagonal, torch.ones(1)], vector[:, None], 0.0)
    assert_near(two, 1 / diagonal[:, None], "solve of two")


def test_the_inverse_of_rounding_is_refused() -> None:
    """As ``solve`` does: the moment of fewer inputs than entries is singular, but for rounding."""
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    singular = inputs.T @ inputs
    for factors in ([singular], [torch.eye(3), singular], [singular, torch.ones(3)]):
        with pytest.raises(PackpropError, match="4 of them are zero up to rounding"):
            kronecker.inverse(factors, 0.0)


@pytest.mark.parametrize(
    "extension", [extensions.KFLR(), extensions.EKFAC(fisher="exact")], ids=["list", "eigen"]
)
def test_no_vectors_have_no_products(extension: extensions.Extension) -> None:
    model, loss = packprop.extend(nn.Linear(3, 2)), packprop.extend(nn.MSELoss())
    with packprop.backpack(extension):
        loss(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
    block = getattr(model.weight, extension.savefield)
    assert kronecker.solve(block, torch.zeros(0, 2, 3), 1.0).shape == (0, 2, 3)


INPUTS_FIRST = [
    (nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 4)), torch.tensor([0, 2, 2, 5, 1])),
    (nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 4)), torch.ones(5, 2, 2, 2)),
]


@pytest.mark.parametrize(("model", "inputs"), INPUTS_FIRST, ids=["table", "transposed convolution"])
def test_vectors_with_inputs_first_are_refused_and_the_advice_works(model: nn.Module, inputs: Tensor) -> None:
    """A list of factors does not know its parameter: it would mix up entries, and give another number."""
    torch.manual_seed(0)
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(extensions.KFLR()):
        loss(packprop.extend(model)(inputs), torch.tensor([0, 1, 2, 3, 0])).backward()
    weight: Any = next(model.parameters())
    for vectors in (weight.grad, weight.grad[None], torch.stack([weight.grad] * 2)):
        for helper in (kronecker.multiply, functools.partial(kronecker.solve, damping=0.1)):
            with pytest.raises(BadInput, match="inputs first"):
                helper(weight.kflr, vectors)
    swapped = weight.grad.transpose(0, 1)
    solved = kronecker.solve(weight.kflr, swapped, 0.1)
    whole = kronecker.dense(weight.kflr)
    expected = torch.linalg.solve(whole + 0.1 * torch.eye(len(whole)), swapped.flatten())
    assert_near(solved.flatten(), expected, "the advice", 1e-4)


def test_flat_vectors_fit_two_factors() -> None:
    factors, vectors = [spd(3), spd(4)], torch.randn(2, 3, 2, 2, dtype=torch.float64)
    expected = kronecker.multiply(factors, vectors)
    assert_near(kronecker.multiply(factors, vectors.flatten(1)), expected.flatten(1), "many")
    assert_near(kronecker.multiply(factors, vectors[0].flatten()), expected[0].flatten(), "one")
