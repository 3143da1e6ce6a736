"""Drawn quantities: repeatable, near the exact ones, shared within one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.cases import BY_NAME
from tests.references.oracle import Oracle
from tests.references.running import ROWS, Row, as_tensors, assert_near, backward, generator, results
from tests.selection import one_in

SAMPLED = [row for row in ROWS if row.sampled]
each_row = pytest.mark.parametrize("row", SAMPLED, ids=lambda row: row.name)
LOSSES = ["ce-weights-ignore-smoothing", "ce-probabilities-weights", "mse-vector", "bce-pos-weight"]


def tensors(row: Row, name: str, seed: int | None, **options: Any) -> list[Tensor]:
    """What an extension saves, all parameters in order; ``None``: the global random state."""
    problem = BY_NAME[name].problem(3)
    source = None if seed is None else generator(seed)
    backward(problem, row(source, **options))
    return [t for v in results(problem, row.attribute).values() for t in as_tensors(v)]


@one_in(3)
@pytest.mark.parametrize("name", ["linear-deep", "mse-vector", "bce-vector", "own-coupled"])
@each_row
def test_a_generator_makes_draws_repeatable(row: Row, name: str) -> None:
    first, again = tensors(row, name, 1), tensors(row, name, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = tensors(row, name, 2)
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@one_in(2)
@pytest.mark.parametrize("name", ["linear-deep", "mse-vector", "bce-vector", "own-coupled"])
@each_row
def test_the_global_random_state_is_left_alone(row: Row, name: str) -> None:
    torch.manual_seed(3)
    tensors(row, name, 1)
    drawn = torch.rand(5)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(5))


@each_row
def test_without_a_generator_the_global_seed_decides(row: Row) -> None:
    torch.manual_seed(3)
    first = tensors(row, "linear-deep", None)
    torch.manual_seed(3)
    again = tensors(row, "linear-deep", None)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = tensors(row, "linear-deep", None)
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_number_of_draws() -> None:
    for draws in (1, 5):
        problem = BY_NAME["linear-deep"].problem(3)
        backward(problem, extensions.SqrtGGNMC(mc_samples=draws))
        for name, root in results(problem, "sqrt_ggn_mc").items():
            assert root.shape == (draws, 3, *problem.parameters[name].shape)


@one_in(3)
@pytest.mark.parametrize("name", [*LOSSES, "linear-deep", "language-model", "own-convex"])
def test_many_draws_come_near_the_exact_diagonal(name: str) -> None:
    """The sampler itself, by statistics: 20000 draws within 5 standard errors of the exact value.

    The standard error is measured: each row of the drawn root is one independent estimate.
    """
    draws = 20_000
    problem = BY_NAME[name].problem(2, BY_NAME[name].reductions[0])
    oracle = Oracle(problem)
    backward(problem, extensions.SqrtGGNMC(mc_samples=draws, generator=generator()))
    for parameter, root in results(problem, "sqrt_ggn_mc").items():
        estimates = draws * root.square().sum(1)
        error = (estimates.mean(0) - oracle.diag_ggn_exact[parameter]).abs()
        bound = 5 * estimates.std(0) / draws**0.5 + 1e-12
        assert (error <= bound).all(), (parameter, (error / bound).max())


def test_many_draws_come_near_the_expected_kronecker_factors() -> None:
    for name in ("linear-3d", "conv2d-deep"):
        problem = BY_NAME[name].problem(2)
        expected = Oracle(problem).kfac
        backward(problem, extensions.KFAC(mc_samples=20_000, generator=generator()))
        assert expected
        for parameter, known in expected.items():
            factors = problem.parameters[parameter].kfac
            assert_near(factors[0], known[0], f"B of {parameter}", 0.05)
            for factor, value in zip(factors[1:], known[1:], strict=True):
                assert_near(factor, value, f"A of {parameter}")


@pytest.mark.parametrize("name", ["linear-deep", "ce-map-interacting", "ce-sequence"])
def test_every_categorical_draw_is_the_gradient_at_some_label(name: str) -> None:
    """A drawn column is ``J^T u`` with ``u = sqrt(scale) (p - e_y)``; solving for ``u`` gives ``y``."""
    draws, size = 40, 2
    problem = BY_NAME[name].problem(size)
    backward(problem, extensions.SqrtGGNMC(mc_samples=draws, generator=generator()))
    root = torch.cat([s.flatten(2) for s in results(problem, "sqrt_ggn_mc").values()], 2)
    for n, jacobian in enumerate(Oracle(problem).jacobians):
        p = problem.output(n).detach().softmax(1)[0]
        terms = size * p[0].numel()
        u = torch.linalg.lstsq(jacobian.T, root[:, n].T).solution.T.reshape(draws, *p.shape)
        labels = p - u * (draws * terms) ** 0.5
        assert_near(labels, labels.round().clamp(0, 1), "one-hot labels", 1e-9)
        assert_near(labels.sum(1), torch.ones_like(labels[:, 0]), "one label each", 1e-9)
        assert len(labels.round().unique(dim=0)) > 1


def test_draws_of_one_backward_pass_are_shared_and_of_two_are_not() -> None:
    model = packprop.extend(nn.Linear(3, 2).double())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(6, 3).double(), torch.randint(2, (6,))
    found = []
    for _ in range(2):
        with packprop.backpack(extensions.DiagGGNMC(), extensions.SqrtGGNMC()):
            loss_function(model(x), y).backward()
        root = model.weight.sqrt_ggn_mc
        assert_near(model.weight.diag_ggn_mc, root.square().sum((0, 1)), "the shared draw")
        found.append(root)
    assert not torch.equal(*found)
