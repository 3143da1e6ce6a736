"""Vector-Jacobian products by autograd, of one column or of many."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.tensors.repeated import of_columns, one_by_one


def pull_columns(
    outputs: Sequence[Any],
    ends: Sequence[Any],
    seeds: Sequence[Tensor],
    *,
    batched: bool = True,
    create_graph: bool = False,
    retain_graph: bool = True,
) -> list[Tensor | None]:
    """Vector-Jacobian products of many columns ``[v, *y]``, one after the other where they cannot be batched.

    Args:
        outputs: Tensors or edges where the columns are fed in.
        ends: Tensors or edges where products are wanted; those that are not reached get ``None``.
        seeds: Columns for each output; without their axis unless ``batched``.
        batched: Whether there is an axis of columns.
        create_graph: Whether products shall be differentiable.
        retain_graph: Whether the graph stays; where ``batched``, it always does.
    """

    def pull(given: Sequence[Tensor], batched: bool, retain_graph: bool = True) -> list[Tensor | None]:
        products: Any = torch.autograd.grad(
            list(outputs),
            list(ends),
            list(given),
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
        return [
            product.to_dense() if product is not None and product.is_sparse else product for product in products
        ]

    if not batched:
        return pull(seeds, False, retain_graph)
    count = len(seeds[0])
    if count > 1:
        try:
            if create_graph:
                return pull(seeds, batched=True)
            return of_columns(functools.partial(pull, batched=True), seeds)
        except RuntimeError:  # a function without batching rule; any other error is raised again below
            pass
    columns = one_by_one(count, lambda place: pull([seed[place] for seed in seeds], batched=False))
    return [
        None if pieces[0] is None else torch.stack([piece for piece in pieces if piece is not None])
        for pieces in zip(*columns, strict=True)
    ]
