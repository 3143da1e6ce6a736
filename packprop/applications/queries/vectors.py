"""Vectors that stand for queries in inner products: their gradients, perhaps times the inverse of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from packprop.applications.dataset.batches import Data
from packprop.applications.dataset.given import Objective
from packprop.applications.dataset.products import ROOM
from packprop.applications.queries.blocks import Curvature
from packprop.applications.queries.checks import require_real
from packprop.applications.queries.gradients import QueryGradients
from packprop.applications.queries.preconditioning import Preconditioner, preconditioner_of, require_damping
from packprop.applications.queries.refining import Refinement, Refiner
from packprop.errors import BadInput
from packprop.store.reading import StoredArray


@dataclass(frozen=True)
class Inverse:
    """The matrix whose damped inverse multiplies gradients of queries, as ``influence`` takes it.

    Args:
        curvature: The preconditioner; ``None`` for none.
        damping: Added to the diagonal of the matrix.
        factored: Let two factors share the damping.
        refine: The data to refine by; ``None`` for none.
    """

    curvature: Curvature | None = None
    damping: float | None = None
    factored: bool = False
    refine: Data | Refinement | None = None


def vectors_of(
    objective: Objective, arrays: Mapping[str, StoredArray | Tensor], inverse: Inverse, budget: int
) -> tuple[QueryGradients, Refiner | None]:
    """Return the maker of queries' gradients, and the refiner if there is one.

    Args:
        objective: The model and the loss.
        arrays: The rows that the vectors multiply, by parameter; under ``""`` if they join all parameters.
        inverse: The matrix.
        budget: Bytes for current vectors.

    Raises:
        BadInput: For complex arrays, or an inverse that does not fit.
    """
    require_real(objective.asked, arrays)
    raw = inverse.refine is not None  # the matrix of the data may couple parameters that no row depends on
    names = None if raw or "" in arrays else [*arrays]
    preconditioner = _preconditioner(objective, inverse, names)
    gradients = QueryGradients(objective, arrays, preconditioner, raw=raw)
    if inverse.refine is None:
        return gradients, None
    assert inverse.damping is not None
    refinement = inverse.refine if isinstance(inverse.refine, Refinement) else Refinement(inverse.refine)
    room, damping = min(budget // 4, ROOM), inverse.damping
    refiner = Refiner(objective, refinement, gradients.names, preconditioner, damping, room)
    return gradients, refiner


def joined(waiting: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join all batches, array by array; release them."""
    return {name: torch.cat([rows.pop(name) for rows in waiting]) for name in list(waiting[0])}


def rows_like(objective: Objective) -> dict[str, Tensor]:
    """Return empty rows of gradients by trained parameter: shapes and precisions without data."""
    return {
        name: torch.empty(0, *p.shape, dtype=p.dtype, device="meta") for name, p in objective.trained.items()
    }


def _preconditioner(objective: Objective, inverse: Inverse, names: list[str] | None) -> Preconditioner | None:
    """Return the preconditioner of gradients, if there is one."""
    asked, damping, factored = objective.asked, inverse.damping, inverse.factored
    if inverse.refine is not None:
        require_damping(asked, damping, "the matrix of the data")
    if inverse.curvature is None:
        if factored or (damping is not None and inverse.refine is None):
            raise BadInput(
                asked,
                f"damping={damping!r}, factored={factored!r} without curvature",
                "there is no matrix that they belong to",
                "give curvature=..., such as packprop.compute(..., [EKFAC()]), or leave both out",
            )
        return None
    shapes = {each: p.shape for each, p in objective.trained.items() if names is None or each in names}
    return preconditioner_of(asked, inverse.curvature, damping, factored, shapes)
