"""Traces, eigenvalues, spectral densities and solutions of operators, against dense matrices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from packprop import operators
from packprop.engine.curvature.operators import Operator
from packprop.errors import BadInput, PackpropError, PackpropWarning
from tests.references.running import assert_near
from tests.selection import one_in

SIZE = 60


def matrix(least: float = 0.01) -> Tensor:
    """Symmetric, with eigenvalues from ``least`` to 2, evenly spaced."""
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64))
    return (basis * torch.linspace(least, 2, SIZE, dtype=torch.float64)) @ basis.mT


def operator_of(dense: Tensor, dtype: torch.dtype = torch.float64) -> Operator:
    """An operator of two parameters whose product is that of a dense matrix."""
    parameters = torch.zeros(4, 5, dtype=dtype), torch.zeros(SIZE - 20, dtype=dtype)

    def product(vectors: Any) -> list[Tensor]:
        flat = torch.cat([vector.flatten(1) for vector in vectors], 1) @ dense.to(dtype)
        return [flat[:, :20].reshape(-1, 4, 5), flat[:, 20:]]

    return Operator(parameters, product)


def test_a_trace_and_its_error() -> None:
    dense, draw = matrix(), torch.Generator().manual_seed(0)
    estimates = [operators.trace(operator_of(dense), 8, draw) for _ in range(200)]
    values = torch.tensor([each.value for each in estimates])
    errors = torch.tensor([each.standard_error for each in estimates])
    assert abs(values.mean() - dense.trace()) < 4 * values.std() / math.sqrt(200)
    assert_near(errors.square().mean().sqrt(), values.std(), "standard errors", 0.2)
    assert math.isnan(operators.trace(operator_of(dense), 1).standard_error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("k", [1, 4, SIZE])
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_eigenvalues_at_each_end(which: Any, k: int, dtype: torch.dtype) -> None:
    dense = matrix(-3.0)
    values = torch.linalg.eigvalsh(dense)
    expected = {
        "largest": values.flip(0),
        "smallest": values,
        "magnitude": values[values.abs().argsort(descending=True)],
    }[which][:k]
    found = operators.eigenvalues(
        operator_of(dense, dtype), k, which, generator=torch.Generator().manual_seed(0)
    )
    assert_near(found.values.double(), expected, "values", 1e-5)
    turned = dense @ found.vectors.double()
    assert_near(turned, found.vectors.double() * expected, "vectors", 1e-3)


LARGE = 150
SPECTRA: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.cat([torch.zeros(LARGE // 2), torch.logspace(-5, 0, LARGE - LARGE // 2)]),
    "copies": lambda: torch.rand(LARGE // 10).repeat(10) - 0.3,
    "tiny": lambda: 1e-30 * torch.rand(LARGE),
    "low rank": lambda: torch.cat([-torch.rand(5) - 0.1, torch.zeros(LARGE - 10), torch.rand(5) + 0.1]),
    "one": lambda: torch.full([LARGE], 2.0),
    "nothing": lambda: torch.zeros(LARGE),
}


@one_in(3)
@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_eigenvalues_of_which_there_are_many(spectrum: str, which: Any, k: int) -> None:
    torch.manual_seed(0)
    values = SPECTRA[spectrum]().double()
    turned = torch.linalg.qr(torch.randn(LARGE, LARGE).double()).Q
    dense = turned * values @ turned.mT

    def product(vectors: Any) -> list[Tensor]:
        return [vectors[0] @ dense]

    draw = torch.Generator().manual_seed(0)
    operator = Operator([torch.zeros(LARGE).double()], product)
    found = operators.eigenvalues(operator, k, which, generator=draw)
    order = values.abs() if which == "magnitude" else values
    expected = values[order.argsort(descending=which != "smallest")][:k]
    compared = (found.values.abs(), expected.abs()) if which == "magnitude" else (found.values, expected)
    assert (compared[0] - compared[1]).abs().max() <= 2e-6 * values.abs().max()
    assert_near(found.vectors.mT @ found.vectors, torch.eye(k).double(), "vectors", 1e-9)


def test_eigenvalues_that_have_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packprop.engine.curvature.spectra.READINGS", 2)
    dense = matrix(-3.0)
    with pytest.warns(PackpropWarning, match="not converged after 2 readings: residuals are up to"):
        found = operators.eigenvalues(operator_of(dense), 4, "smallest")
    assert (found.values >= torch.linalg.eigvalsh(dense)[:4] - 1e-9).all()


def test_a_density_with_as_many_steps_as_rows_is_that_of_the_eigenvalues() -> None:
    dense = matrix()
    draw = torch.Generator().manual_seed(0)
    density = operators.spectral_density(operator_of(dense), steps=SIZE + 5, draws=40, generator=draw)
    assert density.points.shape == (40, SIZE)
    assert_near(density.weights.sum(1), torch.ones(40).double(), "shares", 1e-9)
    values = torch.linalg.eigvalsh(dense)
    grid = torch.linspace(0.2, 1.8, 5).double()
    bells = torch.exp(-0.5 * ((grid[:, None] - values) / 0.2).square()) / (0.2 * math.sqrt(2 * math.pi))
    assert_near(density.at(grid, 0.2), bells.mean(1), "density", 0.1)
    few = operators.spectral_density(operator_of(dense), steps=12, draws=40, generator=draw)
    assert_near(few.at(grid, 0.2), bells.mean(1), "density of a few steps", 0.1)
    moments = [(few.points**power * few.weights).sum(1).mean() for power in (1, 2)]
    assert_near(moments[0], dense.trace() / SIZE, "mean", 0.1)
    assert_near(moments[1], (dense @ dense).trace() / SIZE, "second moment", 0.1)


def test_a_space_that_is_exhausted() -> None:
    """A multiple of the identity: one step says all."""
    density = operators.spectral_density(operator_of(torch.eye(SIZE).double()), steps=6, draws=2)
    assert_near((density.points * density.weights).sum(1), torch.ones(2).double(), "mean", 1e-9)


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("count", [None, 1, 7])
def test_solutions(count: int | None, dtype: torch.dtype) -> None:
    dense = matrix()
    right = torch.randn(SIZE, dtype=dtype) if count is None else torch.randn(SIZE, count, dtype=dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    found = operators.solve(operator_of(dense, dtype), right, tolerance=tolerance, steps=200)
    assert_near(
        found.solutions.double(), torch.linalg.solve(dense, right.double()), "solutions", 200 * tolerance
    )
    assert found.residuals.shape == (count or 1,)
    true = torch.linalg.vector_norm(dense @ found.solutions.double() - right.double()) / right.norm()
    assert true < 10 * tolerance


def test_right_hand_sides_together_take_fewer_steps() -> None:
    """Sums of a few vectors: blocks become no wider than there are independent ones."""
    dense, right = matrix(), torch.randn(SIZE, 3, dtype=torch.float64) @ torch.randn(3, 12, dtype=torch.float64)
    alone = max(operators.solve(operator_of(dense), right[:, i]).steps for i in range(12))
    together = operators.solve(operator_of(dense), right)
    assert together.steps < alone
    assert_near(together.solutions, torch.linalg.solve(dense, right), "solutions", 1e-5)


def test_right_hand_sides_of_zero_and_of_other_sizes() -> None:
    dense, right = matrix(), torch.randn(SIZE, 3, dtype=torch.float64)
    right[:, 1] = 0
    right[:, 2] *= 1e-8
    found = operators.solve(operator_of(dense), right)
    expected = torch.linalg.solve(dense, right)
    assert torch.equal(found.solutions[:, 1], torch.zeros(SIZE).double())
    assert_near(found.solutions[:, 2], expected[:, 2], "the small one", 1e-5)
    assert operators.solve(operator_of(dense), torch.zeros(SIZE).double()).steps == 0


def test_a_preconditioner_saves_steps() -> None:
    dense, right = matrix(1e-3), torch.randn(SIZE, dtype=torch.float64)
    noisy = torch.linalg.inv(dense + 1e-3 * torch.eye(SIZE).double())
    plain = operators.solve(operator_of(dense), right, steps=300)
    found = operators.solve(operator_of(dense), right, preconditioner=operator_of(noisy))
    assert found.steps < plain.steps / 2
    assert_near(found.solutions, torch.linalg.solve(dense, right), "solutions", 1e-3)


def test_a_matrix_that_is_not_positive() -> None:
    with pytest.raises(PackpropError, match="to the damping"):
        operators.solve(operator_of(matrix(-0.5)), torch.randn(SIZE).double())


def test_too_few_steps_are_told_and_their_best_is_kept() -> None:
    dense, right = matrix(1e-3), torch.randn(SIZE, 2, dtype=torch.float64)
    expected = torch.linalg.solve(dense, right)

    def error(steps: int) -> float:
        with pytest.warns(PackpropWarning, match="has not converged for 2 of 2"):
            apart = operators.solve(operator_of(dense), right, steps=steps).solutions - expected
        return float((apart * (dense @ apart)).sum())

    errors = [error(steps) for steps in (1, 3, 9)]
    assert errors == sorted(errors, reverse=True)


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, wrong = operator_of(matrix()), cast(Any, "top")
    for call, said in [
        (lambda: operators.solve(operator, torch.ones(3)), "the operator has 60 rows"),
        (lambda: operators.solve(operator, torch.full((SIZE,), torch.inf)), "not finite"),
        (lambda: operators.solve(operator, torch.ones(SIZE), tolerance=2), "tolerance=2"),
        (lambda: operators.solve(operator, torch.ones(SIZE), steps=0), "steps=0"),
        (lambda: operators.trace(operator, 0), "draws=0"),
        (lambda: operators.eigenvalues(operator, SIZE + 1), "k=61"),
        (lambda: operators.eigenvalues(operator, which=wrong), "which='top'"),
        (lambda: operators.eigenvalues(operator, tolerance=math.nan), "tolerance=nan"),
        (lambda: operators.eigenvalues(operator, tolerance=wrong), "tolerance='top'"),
        (lambda: operators.spectral_density(operator, 0), "steps=0"),
        (lambda: operators.spectral_density(operator).at(torch.zeros(1), 0), "width=0"),
    ]:
        with pytest.raises(BadInput, match=said):
            call()
    not_finite = operator_of(torch.full((SIZE, SIZE), torch.nan).double())
    for call in (
        lambda: operators.eigenvalues(not_finite),
        lambda: operators.spectral_density(not_finite),
        lambda: operators.solve(not_finite, torch.ones(SIZE)),
        lambda: operators.solve(operator, torch.ones(SIZE), preconditioner=not_finite),
    ):
        with pytest.raises(PackpropError, match="it is not finite"):
            call()
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with pytest.raises(PackpropError, match=r"\.\[scipy\]"):
        operator.to_scipy()
