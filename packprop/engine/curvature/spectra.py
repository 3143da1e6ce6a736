"""Traces, eigenvalues and spectral densities of operators, from products with blocks of vectors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from packprop.engine.curvature.operators import Operator
from packprop.engine.curvature.solving import finite, require_tolerance
from packprop.errors import BadInput, PackpropWarning, require_number

READINGS = 100
"""The largest number of products with a block of vectors, for eigenvalues."""

BESIDE = 5
"""Vectors in a block in addition to the requested number: they speed up the iterations."""

BLOCKS = 6
"""Blocks of vectors in the largest basis; beyond it, packprop restarts from the best vectors."""

WHICH = ("largest", "smallest", "magnitude")
"""Ends of a spectrum."""


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
    require_number("operators.trace(...) was called.", "draws", draws)
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
    """Compute eigenvalues at one end of the spectrum, by block Lanczos iterations with restarts.

    Each iteration is one product with a block of ``k + 5`` vectors; a few eigenvalues take some tens of
    iterations. A block finds all copies of an eigenvalue, such as the zeros of a GGN. The function holds some
    twenty blocks, in double precision, on the CPU. If 100 products are not enough, a warning gives the
    residual, and you get the best values: the true values lie as far out, or further.

    Args:
        operator: Any operator.
        k: Number of eigenvalues.
        which: The largest, the smallest, or those of the largest magnitude.
        tolerance: The residual ``|A v - value v|``, over the largest magnitude of an eigenvalue, at which a
            value is done. Its error is at most the residual, and mostly much smaller.
        generator: Generator of the first vectors; by default the global one of the CPU.

    Raises:
        BadInput: If the operator does not have ``k`` eigenvalues, ``which`` is not an end of a spectrum, or the
            tolerance is not between 0 and 1.
        PackpropError: If products are not finite.
    """
    asked = "operators.eigenvalues(...) was called."
    require_tolerance(asked, tolerance, "k", k)
    if which not in WHICH:
        instead = f"give one of {', '.join(WHICH)}"
        raise BadInput(asked, f"which={which!r}", "it is no end of a spectrum", instead)
    if k > operator.shape[0]:
        raise BadInput(asked, f"k={k}", f"the operator has {operator.shape[0]} eigenvalues", "give a smaller k")
    size, block = operator.shape[0], k + BESIDE
    place = torch.device("cpu") if generator is None else generator.device
    kind = operator.device, operator.dtype
    if size <= BLOCKS * block:  # too few for iterations
        dense = finite(asked, operator @ torch.eye(size, dtype=torch.float64, device="cpu"))
        values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
        order = _outermost(values, which)[:k]
        return Eigenpairs(values[order].to(*kind), vectors[:, order].to(*kind))

    def drawn(count: int) -> Tensor:
        return torch.randn(size, count, dtype=torch.float64, generator=generator, device=place).cpu()

    basis = torch.linalg.qr(drawn(block)).Q
    products = finite(asked, operator @ basis)
    for reading in range(1, READINGS + 1):
        projected = basis.mT @ products
        values, mixtures = torch.linalg.eigh((projected + projected.mT) / 2)
        largest = float(values.abs().max())
        order = _outermost(values, which)
        values, mixtures = values[order[:block]], mixtures[:, order]
        vectors = basis @ mixtures[:, :block]
        rests = products @ mixtures[:, :block] - values * vectors
        residual = float(torch.linalg.vector_norm(rests[:, :k], dim=0).max())
        if residual <= tolerance * largest or reading == READINGS:
            break
        if basis.shape[1] + block > BLOCKS * block:  # restart from the best vectors
            basis, products = (each @ mixtures[:, : 2 * block] for each in (basis, products))
        following = _beside(basis, rests, largest, drawn)
        basis = torch.cat([basis, following], 1)
        products = torch.cat([products, finite(asked, operator @ following)], 1)
    if residual > tolerance * largest:
        warnings.warn(
            f'operators.eigenvalues(..., k={k}, which="{which}") has not converged after {READINGS} readings: '
            f"residuals are up to {residual / largest:.1e} of the largest magnitude. The true values lie as "
            "far out as these, or further; a larger tolerance accepts less accurate values.",
            PackpropWarning,
            stacklevel=2,
        )
    return Eigenpairs(values[:k].to(*kind), vectors[:, :k].to(*kind))


def _outermost(values: Tensor, which: str) -> Tensor:
    """Return the indices that sort eigenvalues, the outermost at an end first."""
    return (values.abs() if which == "magnitude" else values).argsort(descending=which != "smallest")


def _beside(basis: Tensor, rests: Tensor, largest: float, drawn: Callable[[int], Tensor]) -> Tensor:
    """Return orthonormal vectors, orthogonal to a basis: of rests, or random ones where these are zero."""
    norms = torch.linalg.vector_norm(rests, dim=0)
    found: Tensor = rests / norms.clamp(min=torch.finfo(rests.dtype).tiny)
    if bool((spent := norms <= 1e-14 * largest).any()):
        found = torch.where(spent, drawn(rests.shape[1]), found)
    for _ in range(3):  # what is left of nearly dependent vectors is not orthogonal the first time
        found = torch.linalg.qr(found - basis @ (basis.mT @ found)).Q
    return found


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
        PackpropError: If products are not finite.
    """
    asked = "operators.spectral_density(...) was called."
    require_number(asked, "steps", steps)
    require_number(asked, "draws", draws)
    current = _signs(operator, draws, generator) / math.sqrt(operator.shape[0])
    steps = min(steps, operator.shape[0])
    basis = [current]
    diagonal = torch.zeros(draws, steps, dtype=torch.float64, device="cpu")
    beside = torch.zeros(draws, steps, dtype=torch.float64, device="cpu")
    for step in range(steps):
        following = finite(asked, operator @ current)
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
