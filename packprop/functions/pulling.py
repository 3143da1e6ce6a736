"""Vector-Jacobian products that PyTorch itself computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.tensors.repeated import Products, of_columns, one_by_one


def pulled(outputs: Sequence[Any], parameter: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Return vector-Jacobian products of every column ``[v, *y]`` in a parameter, ``[v, *p]``.

    # NOTE [Autograd below parameters]
    PyTorch itself differentiates functions of parameters alone, because no sample enters them.
    """
    differentiable = torch.is_grad_enabled()

    def pull(vectors: Sequence[Tensor], batched: bool) -> Products:
        (product,) = torch.autograd.grad(
            outputs,
            parameter,
            [_for_output(vector, output) for vector, output in zip(vectors, outputs, strict=True)],
            is_grads_batched=batched,
            retain_graph=True,
            create_graph=differentiable,
            allow_unused=True,
        )
        if product is not None:
            return [product.to_dense() if product.is_sparse else product]
        lead = vectors[0].shape[:1] if batched else ()
        return [parameter.new_zeros((*lead, *parameter.shape))]

    try:
        batched = functools.partial(pull, batched=True)
        (product,) = batched(columns) if differentiable else of_columns(batched, columns)
        assert product is not None
        return product
    except RuntimeError:  # a user's own function without a batching rule
        pass
    pieces = one_by_one(
        len(columns[0]), lambda place: pull([column[place] for column in columns], batched=False)
    )
    return torch.stack([piece for (piece,) in pieces if piece is not None])


def _for_output(vector: Tensor, output: Any) -> Tensor:
    """Cast a vector to the dtype that autograd expects: complex if the output is complex."""
    return vector.to(output.dtype) if isinstance(output, Tensor) and output.is_complex() else vector
