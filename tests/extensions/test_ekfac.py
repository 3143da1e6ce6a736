"""Corrected eigenvalues beyond the case list: eigenvectors, draws, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.engine.algebra.factors import rotated_sum_sq
from packprop.errors import BadInput, PackpropError
from packprop.types import EXACT, INPUTS, Row
from tests.cases import BY_NAME
from tests.references.eigenvalues import step
from tests.references.oracle import Oracle
from tests.references.running import assert_near, backward, basis_of, check_eigen, results
from tests.selection import one_in, thorough

STRUCTURES = [
    *("linear-deep", "linear-3d-square", "matmul-x-w", "matmul-w-xt-square", "einsum-heads", "tied-transpose"),
    *("conv2d-deep", "conv2d-groups", "conv2d-depthwise", "convtranspose2d-options", "convolution-twice"),
    *("embedding-grid", "embedding-bag-sum", "layernorm", "module-twice", "language-model", "lstm"),
]
APPROXIMATIONS = ["mixed", "expand", "reduce"]


@one_in(3)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_approximation_chooses_the_eigenvectors(name: str, approximation: Any) -> None:
    problem = BY_NAME[name].problem(3)
    backward(
        problem,
        extensions.EKFAC(approximation=approximation, fisher="exact"),
        extensions.KFLR(approximation=approximation),
    )
    factors = results(problem, "kflr")
    for parameter, block in Oracle(BY_NAME[name].problem(3)).ggn_block.items():
        found = problem.parameters[parameter].ekfac
        check_eigen(found, block, factors[parameter], parameter, 1e-9, 1e-6)
        assert_near(kronecker.trace(found), block.trace(), "trace")


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", ["linear-deep", "conv2d-deep"])
def test_the_empirical_fisher(name: str, approximation: Any) -> None:
    """Rows of grad_batch carry 1/3 of the mean; the Fisher carries it once, their outer product twice."""
    problem = BY_NAME[name].problem(3)
    options = {"approximation": approximation, "fisher": "empirical"}
    backward(problem, extensions.EKFAC(**options), extensions.KFAC(**options))
    for parameter, rows in Oracle(BY_NAME[name].problem(3)).grad_batch.items():
        flat = rows.flatten(1)
        found = problem.parameters[parameter]
        check_eigen(found.ekfac, 3 * flat.T @ flat, found.kfac, parameter, 1e-9, 1e-6)


@pytest.mark.parametrize("name", ["linear-deep", "conv2d-deep"])
def test_nothing_with_these_eigenvectors_is_nearer(name: str) -> None:
    problem = BY_NAME[name].problem(4)
    backward(problem, extensions.EKFAC(fisher="exact"), extensions.KFLR())
    better = 0
    for parameter, block in Oracle(BY_NAME[name].problem(4)).ggn_block.items():
        found = problem.parameters[parameter]
        corrected = (kronecker.dense(found.ekfac) - block).norm()
        plain = (kronecker.dense(found.kflr) - block).norm()
        assert corrected <= plain + 1e-12
        better += bool(corrected < 0.99 * plain)
    assert better > 0


def test_many_draws_come_near_the_exact_eigenvalues() -> None:
    drawn, exact = BY_NAME["linear-deep"].problem(2), BY_NAME["linear-deep"].problem(2)
    backward(drawn, extensions.EKFAC(20_000, generator=torch.Generator().manual_seed(0)))
    backward(exact, extensions.EKFAC(fisher="exact"))
    for name, found in results(drawn, "ekfac").items():
        expected = kronecker.dense(exact.parameters[name].ekfac)
        assert_near(kronecker.dense(found), expected, name, 0.05)


@thorough
def test_eigenvalues_are_unbiased_given_the_eigenvectors() -> None:
    """Over many draws, they are off by what the exact block has in the same basis by nothing but chance.

    Draws that the eigenvectors come from would be too large along the first of them, by half their size here.
    """
    problem = BY_NAME["linear-deep"].problem(3)
    blocks = Oracle(BY_NAME["linear-deep"].problem(3)).ggn_block
    source = torch.Generator().manual_seed(0)
    off: dict[str, list[torch.Tensor]] = {name: [] for name in blocks}
    for _ in range(200):
        backward(problem, extensions.EKFAC(generator=source))
        for name, found in results(problem, "ekfac").items():
            basis = basis_of(found)
            values = ((basis @ blocks[name]) * basis).sum(1)
            off[name].append(found.values.flatten() - values)
    for name, each in off.items():
        errors = torch.stack(each)
        chance = errors.std(0) / len(errors) ** 0.5
        assert (errors.mean(0).abs() <= 5 * chance + 1e-12).all(), name


# What is refused


def test_choices_are_named() -> None:
    with pytest.raises(BadInput, match="'mixed', 'expand', 'reduce'"):
        extensions.EKFAC(approximation="all")
    with pytest.raises(BadInput, match="'sampled', 'empirical', 'exact'"):
        extensions.EKFAC(fisher="true")


def test_data_that_are_read_once_have_no_second_pass() -> None:
    data = iter([(torch.randn(4, 3), torch.randint(2, (4,)))])
    with pytest.raises(BadInput, match="these data can be read once"):
        packprop.compute(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, [extensions.EKFAC()])
    assert len(list(data)) == 1


def test_a_matrix_that_would_not_fit_is_refused() -> None:
    model, loss = packprop.extend(nn.Linear(1, 20_000)), packprop.extend(nn.CrossEntropyLoss())
    value = loss(model(torch.ones(2, 1)), torch.tensor([0, 1]))
    with (
        pytest.raises(PackpropError, match=r"'(weight|bias)'.* 20000 rows"),
        packprop.backpack(extensions.EKFAC(otherwise="error")),
    ):
        value.backward()


def test_a_large_table_has_unit_vectors_for_its_inputs() -> None:
    model, loss = packprop.extend(nn.Embedding(20_000, 2)), packprop.extend(nn.CrossEntropyLoss())
    value = loss(model(torch.tensor([3, 4])), torch.tensor([0, 1]))
    with packprop.backpack(extensions.EKFAC()):
        value.backward()
    assert model.weight.ekfac.vectors[1].shape == (20_000,)


def test_a_second_pass_is_over_the_columns_of_the_first() -> None:
    after = Row(EXACT, rotated_sum_sq, after=list)
    drawn = Row(extensions.EKFAC().rows[0].seed, rotated_sum_sq)
    for rows in ((after, drawn), (drawn, after), (Row(INPUTS, rotated_sum_sq, after=list),)):

        class Wrong(extensions.Extension):
            savefield = "wrong"

        Wrong.rows = rows
        with pytest.raises(BadInput, match="make it the last row"):
            step(Wrong())
