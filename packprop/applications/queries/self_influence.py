"""The influence of each stored sample on itself: large for samples that nothing else explains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packprop.applications.dataset.result import Result
from packprop.applications.queries.blocks import Curvature
from packprop.applications.queries.checks import gradients_in, require_real
from packprop.applications.queries.preconditioning import Preconditioner, preconditioner_of, together
from packprop.engine.memory import budget_of
from packprop.engine.tensors import accumulation_dtype, as_matrix
from packprop.errors import BadInput
from packprop.store.reading import BLOCK, Store
from packprop.store.search import bytes_of_a_row

ASKED = "self_influence(...) was called."


def self_influence(
    store: Store | str | Path,
    *,
    curvature: Result | Mapping[str, Any] | str | Path | None = None,
    damping: float | None = None,
    quantity: str | None = None,
    memory: int | str | None = "500MiB",
) -> Tensor:
    """Return ``<g_z, (F + damping I)^-1 g_z>`` of each stored sample z ``[n]``, in the order of rows.

    To first order, the loss of z grows by this, divided as ``influence`` says, if you train again without z
    (Koh and Liang 2017). It is large for memorised samples, such as samples with wrong labels (Feldman and
    Zhang 2020).

    Args:
        store: A store of ``BatchGrad``, or its folder; without ``curvature``, also one of projected gradients.
        curvature: As for ``influence``, but not two factors, because a store does not know the order of a
            parameter's entries. Without it, the result is squared norms of gradients.
        damping: As for ``influence``.
        quantity: The gradients of the store; the first by default.
        memory: Bytes for current rows.

    Raises:
        BadInput: For a store without gradients, or with complex ones, curvature that does not fit or is not
            positive, missing damping, or a budget that is too small.
    """
    opened = store if isinstance(store, Store) else Store(store)
    name = gradients_in(ASKED, opened, quantity)
    arrays = opened.arrays(name)
    require_real(ASKED, arrays)
    preconditioner = _preconditioner(curvature, damping, arrays)
    budget = budget_of(memory)
    row = 4 * bytes_of_a_row(arrays, 1)  # as stored, widened, and multiplied
    if budget is not None and budget < row:
        why = f"a row of the store takes {row} bytes while it is multiplied"
        raise BadInput(ASKED, f"memory={memory!r}", why, f"give at least {row}")
    step = max(1, min(BLOCK, budget or BLOCK) // row)
    found = torch.zeros(opened.samples, dtype=torch.float64, device="cpu")
    lists = together(preconditioner, arrays)
    for start in range(0, opened.samples, step):
        for names in lists:
            lent = {name: arrays[name].lent(start, start + step) for name in names}
            rows = {name: each.to(accumulation_dtype(each.dtype)) for name, each in lent.items()}
            turned = rows if preconditioner is None else preconditioner(ASKED, rows, {})
            for name in names:
                products = as_matrix(rows[name] * turned[name])
                found[start : start + step] += products.sum(1, dtype=torch.float64)
    return found


def _preconditioner(
    curvature: Curvature | None, damping: float | None, arrays: Mapping[str, Any]
) -> Preconditioner | None:
    if curvature is None:
        if damping is not None:
            why = "there is no matrix to add it to"
            raise BadInput(
                ASKED, f"damping={damping!r} without curvature", why, "give curvature, or leave it out"
            )
        return None
    if "" in arrays:
        raise BadInput(
            ASKED,
            "curvature, with a store of projected gradients",
            "the inverse belongs between gradients, not between their projections",
            "write the store with BatchGrad(), or leave curvature out",
        )
    shapes = {parameter: torch.Size(array.shape[1:]) for parameter, array in arrays.items()}
    made = preconditioner_of(ASKED, curvature, damping, False, shapes)
    if made.as_factors:
        raise BadInput(
            ASKED,
            f"{made.name} of parameter {min(made.as_factors)!r}",
            "two factors do not say where the parameter keeps its entries",
            "compute EKFAC, which does, or a diagonal",
        )
    return made
