"""What is done with corrected eigenvalues."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.engine.algebra.factors import Approximation, correlations, homogeneous_sum, input_gram
from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.structures import Outer
from packprop.errors import BadInput, PackpropWarning
from tests.cases import BY_NAME
from tests.references.running import assert_near, backward


def test_helpers_agree_with_the_dense_matrix() -> None:
    problem = BY_NAME["conv2d-deep"].problem(3)
    backward(problem, extensions.EKFAC(fisher="exact"))
    for name, parameter in [*problem.parameters.items(), *transposed()]:
        found = parameter.ekfac
        whole = kronecker.dense(found)
        eye = torch.eye(len(whole), dtype=whole.dtype)
        vectors = torch.randn(4, *parameter.shape, dtype=whole.dtype)
        flat = vectors.flatten(1)
        assert_near(kronecker.multiply(found, vectors), (flat @ whole).view_as(vectors), name)
        assert_near(kronecker.multiply(found, vectors[0]), (whole @ flat[0]).view_as(vectors[0]), name)
        solved = torch.linalg.solve(whole + 0.3 * eye, flat.T).T
        assert_near(kronecker.solve(found, vectors, 0.3), solved.reshape(vectors.shape), name)
        inverse = kronecker.inverse(found, 0.3)
        assert isinstance(inverse, kronecker.Eigen)
        assert_near(kronecker.dense(inverse) @ (whole + 0.3 * eye), eye, name)
        assert_near(kronecker.trace(found), whole.trace(), name)
        assert_near(kronecker.logdet(found, 0.3), torch.logdet(whole + 0.3 * eye), name)
        assert kronecker.eigen(found) is found
        with pytest.raises(BadInput, match="negative"):
            kronecker.inverse(found, -1.0)
        with pytest.raises(BadInput, match="rows"):
            kronecker.multiply(found, torch.zeros(7919, dtype=whole.dtype))


def transposed() -> list[tuple[str, Tensor]]:
    """Square in fan-in and fan-out, so that shapes do not tell which is which."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    packprop.extend(model.double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(extensions.EKFAC(fisher="exact")):
        loss(model(torch.randn(5, 4, 3, dtype=torch.float64)), torch.randint(2, (5,))).backward()
    return [(f"transposed {name}", parameter) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("factors", [1, 2])
def test_eigendecompositions_of_plain_factors(factors: int) -> None:
    roots = [torch.randn(size, size + 2, dtype=torch.float64) for size in (3, 4)[:factors]]
    given = [root @ root.T for root in roots]
    found = kronecker.eigen(given)
    assert_near(kronecker.dense(found), kronecker.dense(given), "eigen")
    vectors = torch.randn(2, *(len(each) for each in given), dtype=torch.float64)
    assert_near(kronecker.multiply(found, vectors), kronecker.multiply(given, vectors), "multiply")


def test_results_are_copied_and_pickled() -> None:
    for _, parameter in transposed():
        for again in (copy.deepcopy(parameter.ekfac), pickle.loads(pickle.dumps(parameter.ekfac))):
            assert_near(kronecker.dense(again), kronecker.dense(parameter.ekfac), "again")


def test_null_spaces_have_a_basis_that_rounding_does_not_choose() -> None:
    root = torch.randn(8, 3, dtype=torch.float64)
    factor = root @ root.T
    first = kronecker.eigenvectors(factor)
    noise = torch.randn(8, 8, dtype=torch.float64) * 1e-16 * factor.abs().max()
    second = kronecker.eigenvectors(factor + noise + noise.T)
    assert_near(second, first, "eigenvectors", 1e-11)
    assert_near(first.T @ first, torch.eye(8, dtype=torch.float64), "orthonormal")
    assert_near(
        factor @ first[:, :5], torch.zeros(8, 5, dtype=torch.float64), "null space", floor=factor.norm()
    )


def test_what_is_not_finite_is_warned_of() -> None:
    model, loss = packprop.extend(nn.Linear(2, 2)), packprop.extend(nn.MSELoss())
    x = torch.tensor([[1.0, float("inf")], [0.0, 1.0]])
    with pytest.warns(PackpropWarning, match="NaN or infinite"), packprop.backpack(extensions.EKFAC()):
        loss(model(x), torch.zeros(2, 2)).backward()
    assert model.weight.ekfac.values.isnan().all()


@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
@pytest.mark.parametrize("groups", [1, 2])
def test_inputs_with_a_one_are_summed_as_their_moment_is(approximation: Approximation, groups: int) -> None:
    x = torch.randn(4, 3, groups, 5, dtype=torch.float64)
    with_one = torch.cat([x, x.new_ones(4, 3, groups, 1)], -1)
    moment = input_gram(Outer(with_one, None, fold_to(torch.Size([groups, 6]))), approximation)
    found = homogeneous_sum(Outer(x, None, fold_to(torch.Size([groups, 5]))), approximation)
    assert found is not None
    assert moment is not None
    assert torch.allclose(found, moment[-1])


class TwoExperts(nn.Module):
    """Each position goes through the expert that the sign of its first entry chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, s, 3]`` to ``[n, s, 2]``."""
        rows = x.flatten(0, 1)
        out = rows.new_zeros(len(rows), 2)
        for number, expert in enumerate(self.experts):
            chosen = ((rows[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(rows[chosen]))
        return out.view(*x.shape[:2], 2)


def test_zeros_that_fill_samples_up_are_no_inputs() -> None:
    """Experts get different numbers of positions of each sample: zeros stand for the missing ones."""
    torch.manual_seed(0)
    model, x = packprop.extend(TwoExperts().double()), torch.randn(4, 5, 3).double()
    with packprop.backpack(extensions.EKFAC(fisher="exact")):
        nn.functional.mse_loss(model(x), torch.zeros(4, 5, 2).double()).backward()
    for number, expert in enumerate(model.experts):
        inputs = x[(x[..., 0] > 0) == bool(number)]
        along = inputs @ expert.weight.ekfac.vectors[1]
        expected = along.sum(0) / (along.square().sum(0) * len(inputs)).sqrt()
        torch.testing.assert_close(expert.weight.ekfac.correlations, expected)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_correlations_have_no_unit(scale: float) -> None:
    """What is rounding of the inputs' moment depends on the largest entry alone."""
    x = torch.randn(7, 3).double()
    x[:, 2] = x[:, 0]  # an eigenvector of zero
    moment, total = x.T @ x, torch.cat([x.sum(0), torch.tensor([7.0]).double()])
    vectors = torch.linalg.eigh(moment).eigenvectors
    expected = (x.sum(0) @ vectors) / ((x @ vectors).square().sum(0) * 7).sqrt()
    expected[0] = 0.0
    total[:-1] *= scale
    found = correlations(scale**2 * moment, vectors, total)
    assert found is not None
    torch.testing.assert_close(found, expected)
