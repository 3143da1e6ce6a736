"""Linear systems with an operator, solved by conjugate gradients for all right-hand sides together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from packprop.engine.algebra.conjugate_gradients import ConjugateGradients, NotPositive
from packprop.engine.curvature.operators import Operator
from packprop.errors import BadInput, PackpropError, PackpropWarning, require_number


class Solution(NamedTuple):
    """The result of ``solve``.

    Args:
        solutions: ``[p]`` or ``[p, v]``, like the right-hand sides.
        residuals: ``|b - A x| / |b|`` of each system ``[v]``, from the recurrence of the residual.
        steps: The number of products with blocks of vectors.
    """

    solutions: Tensor
    residuals: Tensor
    steps: int


def solve(
    operator: Operator,
    right: Tensor,
    *,
    preconditioner: Operator | None = None,
    tolerance: float = 1e-6,
    steps: int = 100,
) -> Solution:
    """Solve ``A x = b`` with a positive operator, by block conjugate gradients (O'Leary 1980; Martens 2010).

    Each step is one product with a block of at most as many vectors as there are right-hand sides; an operator
    of a data set reads the data once for each step. More right-hand sides need fewer steps. The damping of the
    operator is part of A.

    Args:
        operator: A GGN, or another operator that is positive with its damping.
        right: Right-hand sides b, ``[p]`` or ``[p, v]``.
        preconditioner: A positive approximation of the inverse of A, such as ``operators.block_diagonal`` of
            inverted Kronecker factors.
        tolerance: The residual ``|b - A x| / |b|`` at which to stop.
        steps: The largest number of products. If it is not enough, a warning states the remaining residual, and
            you get the solutions found so far that are closest to the exact ones in the norm of A.

    Raises:
        BadInput: If right-hand sides do not fit or are not finite, or options are not numbers in their range.
        PackpropError: If the operator turns out to be indefinite, or its products are not finite.
    """
    asked = "operators.solve(...) was called."
    if right.dim() not in (1, 2) or len(right) != operator.shape[0]:
        raise BadInput(
            asked,
            f"right-hand sides of shape {list(right.shape)}",
            f"the operator has {operator.shape[0]} rows",
            "give [p] or [p, v], with the entries of all parameters side by side",
        )
    if preconditioner is not None and preconditioner.shape != operator.shape:
        raise BadInput(
            asked,
            f"a preconditioner with {preconditioner.shape[0]} rows",
            f"the operator has {operator.shape[0]}",
            "make both of the same parameters",
        )
    if not right.isfinite().all():
        why = "some of their entries are not finite"
        raise BadInput(asked, "right-hand sides", why, "give finite ones")
    require_tolerance(asked, tolerance, "steps", steps)
    rows = right.detach().reshape(len(right), -1).mT.to(operator.device, operator.dtype)
    given = None if preconditioner is None else _finite_rows_of(asked, preconditioner)
    iterations, product = ConjugateGradients(rows, given, tolerance), _finite_rows_of(asked, operator)
    try:
        while not iterations.is_done and iterations.steps < steps:
            iterations.step(product)
    except NotPositive as error:
        raise indefinite(asked, "the operator", error) from None
    residuals = iterations.residuals
    warn_of_residuals("operators.solve", residuals, tolerance, iterations.steps)
    return Solution(iterations.solutions.mT.reshape(right.shape).to(right.device), residuals, iterations.steps)


def _finite_rows_of(asked: str, operator: Operator) -> Callable[[Tensor], Tensor]:
    """Return the product with vectors as rows ``[m, p]``, which must be finite."""
    return lambda rows: finite(asked, (operator @ rows.mT).mT)


def finite(asked: str, products: Tensor) -> Tensor:
    """Return products of an operator, which must be finite.

    Raises:
        PackpropError: If they are not.
    """
    if not products.isfinite().all():
        raise PackpropError(
            asked,
            "a product of the operator",
            "it is not finite",
            "look at the loss and the parameters, and leave out samples whose loss is not finite",
        )
    return products


def indefinite(asked: str, where: str, error: NotPositive) -> PackpropError:
    """Return the error for a matrix with a negative eigenvalue."""
    return PackpropError(
        asked,
        where,
        f"it is indefinite: along one direction its curvature, damping included, is {error.value:.3g}, and "
        f"{error.largest:.3g} along another; conjugate gradients need a positive matrix",
        f"use the GGN, which is never negative, or add more than {-error.value:.2g} to the damping. Damping "
        'above minus the least eigenvalue is enough: packprop.operators.eigenvalues(A, which="smallest"), of A '
        "without damping, finds it",
    )


def require_tolerance(asked: str, tolerance: float, name: str, number: int) -> None:
    """Raise if a tolerance or a number of steps is not in its range.

    Raises:
        BadInput: With the first of the two.
    """
    if not (isinstance(tolerance, (int, float)) and 0 < tolerance < 1):
        instead = "give a share between 0 and 1, such as 1e-3"
        raise BadInput(asked, f"tolerance={tolerance!r}", "it is no number between 0 and 1", instead)
    require_number(asked, name, number)


def warn_of_residuals(called: str, residuals: Tensor, tolerance: float, steps: int) -> None:
    """Warn if some systems have not converged."""
    open_ones = int((~(residuals <= tolerance)).sum())
    if open_ones:
        warnings.warn(
            f"{called} has not converged for {open_ones} of {len(residuals)} systems after {steps} readings: "
            f"the largest residual is {float(residuals.max()):.2g} of the right-hand side, where "
            f"{tolerance:.2g} was asked for. You get the best solutions found; more steps, more damping or a "
            "better preconditioner make it smaller.",
            PackpropWarning,
            stacklevel=3,
        )
