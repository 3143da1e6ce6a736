"""Checks that gradients of a store and of a model can be multiplied."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.tensors import tensor_of
from packprop.errors import BadInput, PackpropWarning
from packprop.extensions import BatchGrad, Projected
from packprop.store.describing import described_model
from packprop.store.reading import Store

GRADIENTS = (BatchGrad.savefield, Projected.savefield)
"""Attributes that hold gradients of samples, or projections of them."""


def gradients_in(asked: str, store: Store, quantity: str | None) -> str:
    """Return the name of a store's gradients: ``quantity``, or by default the first that the store has.

    Raises:
        BadInput: If the store has no gradients, or none of that name.
    """
    known = [name for name in GRADIENTS if store.arrays(name)]
    if known and quantity in (None, *known):
        return quantity or known[0]
    raise BadInput(
        asked,
        f"the store {str(store.folder)!r}" + (f", quantity {quantity!r}" if quantity else ""),
        f"it has {', '.join(store) or 'no rows'}, and no gradients of samples"
        if not known
        else f"the gradients in it are {', '.join(known)}",
        "write it with BatchGrad() or Projected(BatchGrad(), d)" if not known else "choose from these",
    )


def require_same_model(asked: str, store: Store, model: nn.Module) -> None:
    """Refuse a model if the store was written for other trained parameters.

    It cannot compare values of parameters, which a store does not hold.

    Raises:
        BadInput: With the first difference.
    """
    described = described_model(model)
    ours = {name: shape for name, (shape, _, trained) in described.items() if trained}
    known = store.headers[0].model.items()
    theirs = {name: shape for name, (shape, _, trained) in known if trained}
    for name in [*theirs, *ours]:
        if ours.get(name) == theirs.get(name):
            continue
        if name not in ours:
            why = "the model has no such parameter, or does not train it (requires_grad=False)"
        elif name not in theirs:
            why = "the store was written for a model without it, or in which it was not trained"
        else:
            why = f"it is {ours[name]} in the model, and {theirs[name]} in the store"
        raise BadInput(
            asked,
            f"parameter {name!r}, with the store {str(store.folder)!r}",
            why,
            "give the model that the store was written with, as it was then",
        )


def require_real(asked: str, arrays: Mapping[str, Any]) -> None:
    """Refuse gradients of complex parameters.

    Raises:
        BadInput: With the first complex array.
    """
    for name, array in arrays.items():
        if array.dtype.is_complex:
            raise BadInput(
                asked,
                f"parameter {name!r}, whose rows are {array.dtype}" if name else f"rows that are {array.dtype}",
                "inner products of complex rows have no order",
                "give a model with real parameters",
            )


def queries_without_gradient(rows: Mapping[str, Tensor]) -> list[int]:
    """Return the places of queries whose rows are zero in all arrays ``[q, ...]``."""
    found = torch.stack([each.reshape(len(each), -1).any(1) for each in rows.values()]).any(0)
    return (~found).nonzero()[:, 0].tolist()


def warn_of_empty(asked: str, empty: Sequence[int], queries: int) -> None:
    """Warn about queries without a gradient: their products are zero, so the order of samples means nothing.

    Raises:
        BadInput: If no query has a gradient.
    """
    if not empty:
        return
    why = "the gradient of their loss is zero in every parameter that the samples depend on"
    if len(empty) == queries:
        instead = "give targets that count in the loss, and a loss that depends on the trained parameters"
        raise BadInput(asked, "all queries", why, instead)
    shown = ", ".join(map(str, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
    warnings.warn(
        f"{asked.removesuffix(' was called.')}: for queries {shown}, {why}: their products are zero, and the "
        "order of samples means nothing.",
        PackpropWarning,
        stacklevel=3,
    )


def numbers_of_groups(
    asked: str, groups: Tensor | Sequence[int], samples: int, there_are: str = "the store has"
) -> Tensor:
    """Return the groups of rows as whole numbers ``[n]``; ``there_are`` begins the reason of the error.

    Raises:
        BadInput: If they are no whole numbers from 0 on, or if there is not one for each row.
    """
    given = tensor_of(groups).cpu()
    are_numbers = given.dtype != torch.bool and not (given.is_floating_point() or given.is_complex())
    found = given.long() if are_numbers else given
    if found.shape != (samples,) or not are_numbers or (samples and int(found.min()) < 0):
        raise BadInput(
            asked,
            f"groups of shape {list(given.shape)} and {given.dtype}",
            f"{there_are} {samples} rows, and each needs the number of its group, from 0 on",
            "give whole numbers [n] in the order of the rows",
        )
    return found
