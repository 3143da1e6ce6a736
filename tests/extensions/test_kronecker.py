"""Kronecker factors beyond their definition: the empirical Fisher, and many draws."""

from __future__ import annotations

import pytest
import torch

import packprop
from packprop import extensions
from packprop.errors import BadInput, PackpropError
from tests.cases import BY_NAME
from tests.references.oracle import Oracle
from tests.references.running import assert_near, backward, forward, results


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
