"""Kronecker factors beyond their definition: the empirical Fisher, and what is done with factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import packprop
from packprop import extensions, kronecker
from packprop.errors import BadInput, PackpropError
from tests.cases import BY_NAME
from tests.oracle import Oracle
from tests.running import assert_near, backward, forward, results


@pytest.mark.parametrize(
    ("name", "reduction", "terms"),
    [
        ("linear-deep", "mean", 3),
        ("linear-deep", "sum", 1),
        ("mse-vector", "mean", 6),
        ("conv2d-deep", "mean", 3),
    ],
)
def test_the_empirical_fisher_is_the_second_moment_of_gradients(name: str, reduction: str, terms: int) -> None:
    """Rows of grad_batch carry 1/terms of a mean; the Fisher carries it once, their outer product twice."""
    problem = BY_NAME[name].problem(3, reduction)
    backward(problem, extensions.KFAC(fisher="empirical"))
    rows = Oracle(problem).grad_batch
    checked = 0
    for parameter, factors in results(problem, "kfac").items():
        if parameter.endswith("bias"):
            flat = rows[parameter].flatten(1)
            assert_near(factors[0], terms * flat.T @ flat, parameter)
            checked += 1
            bias, weight = factors[0], parameter.replace("bias", "weight")
            assert_near(results(problem, "kfac")[weight][0], bias, weight)
    assert checked > 0


def test_terms_without_weight_take_no_part_in_the_empirical_fisher() -> None:
    problem = BY_NAME["ce-ignore-default"].problem(3)
    backward(problem, extensions.KFAC(fisher="empirical"))
    for factors in results(problem, "kfac").values():
        assert all(bool(factor.isfinite().all()) for factor in factors)


def test_a_loss_of_unknown_scale_has_no_empirical_fisher() -> None:
    problem = BY_NAME["own-convex"].problem(3)
    with pytest.raises(PackpropError, match="divided by"):
        backward(problem, extensions.KFAC(fisher="empirical"))


@pytest.mark.parametrize("make", [extensions.KFAC, extensions.KFLR], ids=lambda make: make.__name__)
def test_choices_are_named(make: type) -> None:
    with pytest.raises(BadInput, match="'mixed', 'expand', 'reduce'"):
        make(approximation="all")
    with pytest.raises(BadInput, match="'sampled', 'empirical'"):
        extensions.KFAC(fisher="true")


@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
def test_many_draws_come_near_the_exact_factors(approximation: str) -> None:
    problem = BY_NAME["conv2d-deep"].problem(2)
    source = torch.Generator().manual_seed(0)
    asked = extensions.KFAC(20_000, generator=source, approximation=approximation)
    loss = forward(problem)
    with packprop.backpack(asked, extensions.KFLR(approximation=approximation)):
        loss.backward()
    for name, exact in results(problem, "kflr").items():
        for drawn, factor in zip(results(problem, "kfac")[name], exact, strict=True):
            assert_near(drawn, factor, name, 0.05)


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
