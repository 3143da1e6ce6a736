"""Traces, eigenvalues and spectral densities of operators, from products with blocks of vectors."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from packprop.engine.curvature.operators import Operator
from packprop.errors import BadInput, PackpropError, PackpropWarning

RESTARTS = 50
"""The largest number of restarts of Lanczos iterations, each of some twenty products."""

READINGS = 100
"""The largest number of products with a block of vectors, for the smallest eigenvalues."""

BESIDE = 5
"""Vectors of that block beside those that you asked for: they speed up the others."""

WHICH = {"largest": "LA", "magnitude": "LM", "smallest": "SA"}
"""Ends of a spectrum, with SciPy's names for them."""


class Trace(NamedTuple):
    """An estimate of a trace.

    Args:
        value: The estimate; its expectation is the trace.
        standard_error: The standard error of the estimate, from its own draws; NaN for a single draw.
    """

    value: float
    standard_error: float


class Eigenpairs(NamedTuple):
    """Eigenvalues at one end of a spectrum.

    Args:
        values: Eigenvalues ``[k]``, in units of the curvature; the outermost first.
        vectors: Eigenvectors of length one, as columns ``[p, k]``.
    """

    values: Tensor
    vectors: Tensor


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """The distribution of the eigenvalues of a matrix: points with weights, for each random vector.

    Args:
        points: The points ``[v, m]``, in units of the curvature.
        weights: The share of all eigenvalues at each point ``[v, m]``; a row sums to one.
    """

    points: Tensor
    weights: Tensor

    def at(self, values: Tensor, width: float) -> Tensor:
        """Return the density at some values ``[x]``: each point is a Gaussian of standard deviation ``width``.

        The density is the share of all eigenvalues per unit of the curvature, averaged over the random vectors.

        Raises:
            BadInput: For a width that is not positive.
        """
        if not width > 0:
            instead = "give a positive number, in units of the curvature"
            raise BadInput("SpectralDensity.at(...) was called.", f"width={width}", "it is no width", instead)
        apart = (values[:, None, None] - self.points) / width
        bells = torch.exp(-0.5 * apart.square()) / (width * math.sqrt(2 * math.pi))
        return (bells * self.weights).sum(2).mean(1)


def trace(operator: Operator, draws: int = 32, generator: torch.Generator | None = None) -> Trace:
    """Estimate the trace from products with random signs (Hutchinson 1989), all in one block.

    Args:
        operator: Any operator; a data set is read once.
        draws: Number of random vectors; the standard error falls with its square root.
        generator: Generator of the random vectors; by default the global one of the CPU.

    Raises:
        BadInput: If ``draws`` is not a positive whole number.
    """
    _require_number("operators.trace", "draws", draws)
    signs = _signs(operator, draws, generator)
    values = (signs * (operator @ signs)).sum(0, dtype=torch.float64)
    error = float(values.std() / math.sqrt(draws)) if draws > 1 else math.nan
    return Trace(float(values.mean()), error)


def eigenvalues(
    operator: Operator,
    k: int = 1,
    which: Literal["largest", "smallest", "magnitude"] = "largest",
    tolerance: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Compute eigenvalues at one end of the spectrum, by iterations of SciPy.

    The largest, or those of the largest magnitude, take Lanczos iterations (``eigsh``): some tens of products
    with one vector. The smallest may be many times the same, such as the zeros of a GGN, and take up to 100
    products with a block of vectors (``lobpcg``: Knyazev 2001). If these are not enough, a warning gives the
    residual, and you get the best values, which are upper bounds.

    Args:
        operator: Any operator.
        k: Number of eigenvalues.
        which: The largest, the smallest, or those of the largest magnitude.
        tolerance: Relative accuracy of the eigenvalues; for the smallest the residual ``|A v - value v|``, over
            the largest magnitude.
        generator: Generator of the first vectors; by default the global one of the CPU.

    Raises:
        BadInput: If the operator does not have ``k`` eigenvalues, or ``which`` is not an end of a spectrum.
        PackpropError: If SciPy is not installed, or iterations do not converge.
    """
    _require_number("operators.eigenvalues", "k", k)
    if which not in WHICH or k > operator.shape[0]:
        wrong = f"which={which!r}" if which not in WHICH else f"k={k}"
        why = "it is no end of a spectrum" if which not in WHICH else f"there are {operator.shape[0]}"
        instead = f"give one of {', '.join(WHICH)}" if which not in WHICH else "give less"
        raise BadInput("operators.eigenvalues(...) was called.", wrong, why, instead)
    if operator.shape[0] <= max(32, 5 * (k + BESIDE)):  # too few for iterations
        dense = operator @ torch.eye(operator.shape[0], dtype=operator.dtype, device=operator.device)
        values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
    elif which == "smallest":
        values, vectors = _smallest(operator, k, tolerance, generator)
    else:
        given = operator.to_scipy()
        start = torch.randn(operator.shape[0], dtype=torch.float64, generator=generator).numpy()
        values, vectors = (torch.from_numpy(each) for each in _lanczos(given, k, which, tolerance, start))
    keys = values.abs() if which == "magnitude" else values
    order = keys.argsort(descending=which != "smallest")[:k]
    return Eigenpairs(values[order].to(operator.device), vectors[:, order].to(operator.device))


def _lanczos(given: Any, k: int, which: str, tolerance: float, start: Any) -> tuple[Any, Any]:
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    try:
        found: tuple[Any, Any] = eigsh(
            given, k=k, which=WHICH[which], tol=tolerance, v0=start, maxiter=RESTARTS
        )
    except ArpackNoConvergence as error:
        raise PackpropError(
            "operators.eigenvalues(...) was called.",
            f"k={k}, which={which!r}, tolerance={tolerance:g}",
            f"{len(error.eigenvalues)} of them have converged after all iterations",
            "ask for fewer, or give a larger tolerance",
        ) from error
    return found


def _smallest(
    operator: Operator, k: int, tolerance: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    given = operator.to_scipy(torch.float64)
    from scipy.sparse.linalg import lobpcg

    place = torch.device("cpu") if generator is None else generator.device
    shape = operator.shape[0], k + BESIDE
    start = torch.linalg.qr(torch.randn(shape, dtype=torch.float64, generator=generator, device=place).cpu()).Q
    largest = float(torch.linalg.vector_norm(torch.from_numpy(given @ start.numpy()), dim=0).max())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of too few iterations
        found = lobpcg(given, start.numpy(), tol=tolerance * largest, maxiter=READINGS, largest=False)
    values, vectors = (torch.from_numpy(each) for each in found)
    order = values.argsort()[:k]
    values, vectors = values[order], vectors[:, order]
    residuals = torch.from_numpy(given @ vectors.numpy()) - values * vectors
    residual = float(torch.linalg.vector_norm(residuals, dim=0).max())
    if residual > tolerance * largest:
        warnings.warn(
            f'operators.eigenvalues(..., k={k}, which="smallest") has not converged after {READINGS} readings: '
            f"residuals are up to {residual / largest:.1e} of the largest eigenvalue, and the values are upper "
            f"bounds. tolerance={2 * residual / largest:.0e} accepts them.",
            PackpropWarning,
            stacklevel=3,
        )
    return values, vectors


def spectral_density(
    operator: Operator, steps: int = 30, draws: int = 4, generator: torch.Generator | None = None
) -> SpectralDensity:
    """Estimate the spectral density, by stochastic Lanczos quadrature (Ghorbani, Krishnan and Xiao 2019).

    Each step is one product with a block of all draws. The function holds ``steps + 2`` times ``draws`` vectors
    in memory, to make each new vector orthogonal to all vectors before it.

    Args:
        operator: Any operator; a data set is read ``steps`` times.
        steps: Number of points of each draw, at most the rows of the operator.
        draws: Number of random vectors.
        generator: Generator of the random vectors; by default the global one of the CPU.

    Raises:
        BadInput: If ``steps`` or ``draws`` is not a positive whole number.
    """
    _require_number("operators.spectral_density", "steps", steps)
    _require_number("operators.spectral_density", "draws", draws)
    current = _signs(operator, draws, generator) / math.sqrt(operator.shape[0])
    steps = min(steps, operator.shape[0])
    basis = [current]
    diagonal = torch.zeros(draws, steps, dtype=torch.float64)
    beside = torch.zeros(draws, steps, dtype=torch.float64)
    for step in range(steps):
        following = operator @ current
        diagonal[:, step] = (following * current).sum(0, dtype=torch.float64)
        if step + 1 == steps:
            break
        for _ in range(2):
            for known in basis:
                following = following - known * (known * following).sum(0)
        norms = torch.linalg.vector_norm(following, dim=0, dtype=torch.float64)
        ended = norms <= 100 * torch.finfo(following.dtype).eps * diagonal.abs().amax(1).to(norms)
        beside[:, step] = torch.where(ended, 0.0, norms)
        current = torch.where(ended, 0.0, following / norms.to(following))  # the space is exhausted: zeros
        basis.append(current)
    between = beside[:, : steps - 1]
    matrices = diagonal.diag_embed() + between.diag_embed(1) + between.diag_embed(-1)
    points, vectors = torch.linalg.eigh(matrices)
    return SpectralDensity(points, vectors[:, 0].square())


def _signs(operator: Operator, draws: int, generator: torch.Generator | None) -> Tensor:
    place = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randint(2, (operator.shape[0], draws), generator=generator, device=place)
    return (2 * drawn - 1).to(operator.device, operator.dtype)


def _require_number(asked: str, name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        instead = "give a whole number of at least 1"
        raise BadInput(f"{asked}(...) was called.", f"{name}={value!r}", "it is no such number", instead)
