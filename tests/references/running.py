"""How the tests ask packprop: a table of extensions, and functions that run and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import packprop
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.engine.tensors.nesting import map_tensors, tensors_in
from packprop.errors import PackpropError
from packprop.extensions.kronecker import EIGENVALUE_DRAWS
from packprop.types import Seed
from tests.cases import BY_NAME, Case
from tests.references.oracle import Oracle, Problem

DRAWS = 2


class Counted(TorchFunctionMode):
    """Counts the calls of torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Row:
    """An extension under test: how to make it, where it saves, what it needs."""

    make: Callable[..., Any]
    attribute: str
    order: int
    sampled: bool = False
    subsampling: bool = False

    @property
    def name(self) -> str:
        return self.make.__name__

    def __call__(self, generator: torch.Generator | None = None, **options: Any) -> Any:
        if self.sampled:
            options = {"mc_samples": DRAWS, "generator": generator, **options}
        return self.make(**options)


@dataclass(frozen=True, eq=False)
class ExactEKFAC(extensions.EKFAC):
    __doc__ = extensions.EKFAC.__doc__
    fisher: Any = "exact"
    savefield = "ekfac_exact"


@dataclass(frozen=True, eq=False)
class FreshSqrtGGNMC(extensions.SqrtGGNMC):
    """The root of the draws that sampled eigenvalues come from."""

    savefield = "sqrt_ggn_mc_fresh"

    @property
    def seed(self) -> Seed:
        return replace(super().seed, mc_samples=EIGENVALUE_DRAWS * self.mc_samples, fresh=True)


ROWS = [
    Row(extensions.BatchGrad, "grad_batch", 1, subsampling=True),
    Row(extensions.BatchL2Grad, "batch_l2", 1),
    Row(extensions.SumGradSquared, "sum_grad_squared", 1),
    Row(extensions.Variance, "variance", 1),
    Row(extensions.BatchDotGrad, "batch_dot", 1),
    Row(extensions.DiagGGNExact, "diag_ggn_exact", 2),
    Row(extensions.BatchDiagGGNExact, "diag_ggn_exact_batch", 2),
    Row(extensions.SqrtGGNExact, "sqrt_ggn_exact", 2, subsampling=True),
    Row(extensions.DiagGGNMC, "diag_ggn_mc", 2, sampled=True),
    Row(extensions.BatchDiagGGNMC, "diag_ggn_mc_batch", 2, sampled=True),
    Row(extensions.SqrtGGNMC, "sqrt_ggn_mc", 2, sampled=True, subsampling=True),
    Row(extensions.KFAC, "kfac", 2, sampled=True),
    Row(extensions.KFLR, "kflr", 2),
    Row(extensions.EKFAC, "ekfac", 2, sampled=True),
    Row(ExactEKFAC, "ekfac_exact", 2),
]
# Defined for losses that curve in no useful way, too.
HESSIANS = [
    Row(extensions.DiagHessian, "diag_h", 2, subsampling=True),
    Row(extensions.BatchDiagHessian, "diag_h_batch", 2, subsampling=True),
]
FIRST_ORDER = [row for row in ROWS if row.order == 1]
SECOND_ORDER = [row for row in ROWS if row.order == 2]
BY_ATTRIBUTE = {row.attribute: row for row in [*ROWS, *HESSIANS]}


def rows_for(case: Case) -> list[Row]:
    """The extensions that are defined for a case."""
    curved = case.order == 2 and not case.refuses_curvature
    return ROWS if curved else FIRST_ORDER


def generator(seed: int = 0) -> torch.Generator:
    """A fresh source of draws."""
    return torch.Generator().manual_seed(seed)


def make_all(rows: list[Row], seed: int = 0) -> list[Any]:
    """One instance of each, all sampling from one generator, so that they share their draws.

    With sampled eigenvalues comes the root of the draws that they are made of, for ``check_sampled``.
    """
    source = generator(seed)
    made = [row(source) for row in rows]
    return [*made, FreshSqrtGGNMC(DRAWS, generator=source)] if BY_ATTRIBUTE["ekfac"] in rows else made


def extend(problem: Problem) -> None:
    """Extend the model and every loss module."""
    packprop.extend(problem.model)
    losses = problem.loss if isinstance(problem.loss, nn.ModuleList) else [problem.loss]
    for loss in losses:
        if isinstance(loss, nn.Module):
            packprop.extend(loss)


def forward(problem: Problem, record: bool = False) -> Tensor:
    """Extend everything and compute the loss, as a user would."""
    extend(problem)
    with packprop.record() if record else nullcontext():
        return problem.total()


def backward(problem: Problem, *asked: Any, record: bool = False, **options: Any) -> Tensor:
    """Forward and backward pass with extensions; ``options`` go to ``backward()``."""
    loss = forward(problem, record)
    with packprop.backpack(*asked):
        loss.backward(**options)
    return loss


def results(problem: Problem, attribute: str) -> dict[str, Any]:
    """What was saved under an attribute, by parameter name, on the CPU; every parameter must have it."""
    missing = [k for k, p in problem.parameters.items() if not hasattr(p, attribute)]
    assert not missing, f"{attribute} is missing on {missing}"
    found = {k: getattr(p, attribute) for k, p in problem.parameters.items()}
    gaps = [
        k
        for k, value in found.items()
        for tensor in ([] if callable(value) else tensors_in(value))
        if not tensor.is_contiguous()
    ]
    assert not gaps, f"{attribute} is not contiguous on {gaps}"
    return {k: map_tensors(Tensor.cpu, value) for k, value in found.items()}


@contextmanager
def right_or_refused(*words: str) -> Iterator[None]:
    """What happens inside gives right numbers, or an error that says one of the words."""
    try:
        yield
    except PackpropError as error:
        if not any(word in str(error) for word in words):
            raise


@cache
def reference(name: str, size: int, reduction: str | None) -> Oracle:
    """The oracle of a case, computed once and shared by all tests of a worker."""
    return Oracle(BY_NAME[name].problem(size, reduction, device=torch.device("cpu")))


def assert_near(
    actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10, floor: float = 0.0
) -> None:
    """Equal up to ``tolerance`` times the largest entry (or ``floor``, if that is larger)."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    if expected.numel() == 0:
        return
    error = (actual.to(expected) - expected).abs().max().item()
    scale = max(expected.abs().max().item(), floor, 1e-12)
    assert error <= tolerance * scale, f"{what}: off by {error:.3g}, largest entry {scale:.3g}"


def assert_all_near(
    actual: dict[str, Tensor], expected: dict[str, Tensor], what: str, tolerance: float = 1e-10
) -> None:
    """The same for every parameter; entries far below all others' may be off by those' rounding."""
    assert actual.keys() == expected.keys()
    largest = max((t.abs().max().item() for t in expected.values() if t.numel()), default=0.0)
    for name, value in expected.items():
        floor = largest * (1e-4 if tolerance < 1e-6 else 0.1)
        assert_near(actual[name], value, f"{what} of {name}", tolerance, floor)


def stacked(named: dict[str, Tensor]) -> Tensor:
    """Square roots ``[v, n, *p]`` of all parameters side by side: ``[v, n, P]``."""
    return torch.cat([flattened(s) for s in named.values()], dim=2)


def flattened(root: Tensor) -> Tensor:
    """``[v, n, *p] -> [v, n, P]``, also for parameters without axes."""
    return root.reshape(*root.shape[:2], -1)


def check_exact(
    problem: Problem, oracle: Oracle, row: Row, tolerance: float = 1e-10, dense: tuple[str, ...] = ()
) -> None:
    """Compare what an extension without draws has saved with the oracle."""
    saved = results(problem, row.attribute)
    if row.attribute == "kflr":
        largest = max(block.abs().max().item() for block in oracle.ggn_block.values() if block.numel())
        for name, factors in saved.items():
            known = None if name in dense else oracle.kfac.get(name)
            if known is None and len(factors) == 1:  # the exact block
                known = [oracle.ggn_block[name]]
            for factor, expected in zip(factors, known or factors, strict=True):
                assert_near(factor, expected, f"kflr of {name}", tolerance, 1e-4 * largest)
        return
    if row.attribute == "ekfac_exact":
        largest = max(block.abs().max().item() for block in oracle.ggn_block.values() if block.numel())
        for name, found in saved.items():
            factors = None if name in dense else oracle.kfac.get(name)
            floor = 1e-4 * largest
            check_eigen(found, oracle.ggn_block[name], factors, f"ekfac of {name}", tolerance, floor)
        return
    if row.attribute != "sqrt_ggn_exact":
        assert_all_near(saved, getattr(oracle, row.attribute), row.attribute, tolerance)
        return
    root = stacked(saved)
    assert root.shape[1] == problem.size
    # A square root is known up to a rotation of its columns; what it is the root of is unique, also
    # between parameters.
    products = torch.einsum("vnp,vnq->npq", root, root)
    assert_near(products, oracle.ggn_batch, "sqrt_ggn_exact^T sqrt_ggn_exact", tolerance)


def check_sampled(
    problem: Problem, oracle: Oracle, dense: tuple[str, ...] = (), tolerance: float = 1e-10
) -> None:
    """Compare what the extensions with draws have saved with each other and with the oracle.

    All came from one backward pass and one draw, eigenvalues from another. A drawn column is ``J_n^T u`` for
    some ``u``: it lies in the row space of the Jacobian, for all parameters at once; the other quantities
    follow from the columns. How ``u`` is distributed is tested in tests/functions/test_draws.py.
    """
    saved, fresh = results(problem, "sqrt_ggn_mc"), results(problem, "sqrt_ggn_mc_fresh")
    root = stacked(saved)
    for each, draws in ((root, DRAWS), (stacked(fresh), EIGENVALUE_DRAWS * DRAWS)):
        assert each.shape[:2] == (draws, problem.size)
        for n, jacobian in enumerate(oracle.jacobians):
            columns = each[:, n].T.to(jacobian.dtype)
            solution = torch.linalg.pinv(jacobian.T) @ columns
            assert_near(jacobian.T @ solution, columns, f"a drawn column of sample {n}", 10 * tolerance)
    squares = {k: s.square() for k, s in saved.items()}
    batch = {k: s.sum(0) for k, s in squares.items()}
    assert_all_near(results(problem, "diag_ggn_mc_batch"), batch, "diag_ggn_mc_batch", tolerance)
    whole = {k: s.sum((0, 1)) for k, s in squares.items()}
    assert_all_near(results(problem, "diag_ggn_mc"), whole, "diag_ggn_mc", tolerance)
    sampled_factors = results(problem, "kfac")
    for name, block in results(problem, "ekfac").items():
        flat = flattened(fresh[name])
        factors, floor = sampled_factors[name], 1e-4 * root.abs().max().item() ** 2
        check_eigen(
            block, torch.einsum("vnp,vnq->pq", flat, flat), factors, f"ekfac of {name}", tolerance, floor
        )
    for name, factors in sampled_factors.items():
        flat = flattened(saved[name])
        known = None if name in dense else oracle.kfac.get(name)
        if known is not None:
            assert len(factors) == len(known), name
        if len(factors) == 1:
            block = torch.einsum("vnp,vnq->pq", flat, flat)
            assert_near(factors[0], block, f"kfac of {name}", tolerance)
            continue
        output_factor, input_factor = factors
        if known is not None:
            assert output_factor.shape == known[0].shape
            assert_near(input_factor, known[1], f"kfac A of {name}", tolerance)
        bias = name.removesuffix("weight") + "bias"
        if known is not None and bias in oracle.kfac:
            shared = flattened(saved[bias])
            block = torch.einsum("vnp,vnq->pq", shared, shared)
            assert_near(output_factor, block, f"kfac B of {name}", tolerance)


def check_eigen(
    found: kronecker.Eigen,
    block: Tensor,
    factors: list[Tensor] | None,
    what: str,
    tolerance: float,
    floor: float,
) -> None:
    """Eigenvectors must be those of the factors; eigenvalues what the block has on its diagonal in their basis.

    Eigenvectors of equal eigenvalues may be any of their span, so that no list of them is compared.
    """
    block = block.to(torch.float64)
    vectors = [v.to(torch.float64) for v in found.vectors]
    for side, columns in enumerate(vectors):
        unit = torch.eye(len(columns), dtype=columns.dtype)
        assert_near(columns.T @ columns, unit, f"orthonormal columns of {what}", tolerance)
        if factors is not None and side < len(factors):
            rotated = columns.T @ factors[side].to(torch.float64) @ columns
            scale = floor if side == 0 else 0.0  # A has no scale of the loss
            assert_near(rotated.diagonal().diag(), rotated, f"eigenvectors of {what}", tolerance, scale)
    assert factors is None or len(factors) == len(vectors)
    basis = basis_of(found)
    eigenvalues = ((basis @ block) * basis).sum(1)
    floor = max(floor, block.abs().max().item())
    assert_near(found.values.flatten().to(torch.float64), eigenvalues, f"eigenvalues, {what}", tolerance, floor)
    whole = (basis.T * found.values.flatten()) @ basis
    assert_near(kronecker.dense(found).to(torch.float64), whole, f"dense matrix, {what}", tolerance, floor)


def basis_of(found: kronecker.Eigen) -> Tensor:
    """An eigenvector in each row ``[p, p]``, in the order of the parameter."""
    vectors = [v.to(torch.float64) for v in found.vectors]
    if len(vectors) == 2:
        pairs = torch.einsum("ab,cd->bdac", *vectors).flatten(0, 1)
        pairs = pairs if found.order is None else found.order.to_parameter(pairs)
    else:
        pairs = vectors[0].T
    return pairs.reshape(len(pairs), -1)


def as_tensors(value: Any) -> list[Tensor]:
    """What is compared of a result: a list of Kronecker factors, the matrix of eigenvectors, or one tensor."""
    if isinstance(value, kronecker.Eigen):
        return [kronecker.dense(value)]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def rows_of_terms(terms: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Gradients ``[n, *p]`` of each sample's own terms of a loss ``[n, ...]``, one sample after the other."""
    parameters = list(parameters)
    each = [
        torch.autograd.grad(own.sum(), parameters, retain_graph=True, materialize_grads=True) for own in terms
    ]
    return [torch.stack(rows) for rows in zip(*each, strict=True)]


def assert_rows_of_terms(
    terms: Tensor, loss: Tensor, parameters: Iterable[Tensor], tolerance: float = 1e-10
) -> None:
    """Gradients of samples are those of the terms of ``loss``, which is their sum."""
    parameters = list(parameters)
    expected = rows_of_terms(terms, parameters)
    with packprop.backpack(packprop.extensions.BatchGrad()):
        loss.backward()
    for parameter, rows in zip(parameters, expected, strict=True):
        assert_near(parameter.grad_batch, rows, "rows of the loss", tolerance)
