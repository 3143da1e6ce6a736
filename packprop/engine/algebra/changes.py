"""Structures with one change: squared inputs, zeros for missing positions, factors on the samples."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from packprop.engine.algebra.structures import Dense, Lookup, Outer, Structure, with_cotangent
from packprop.engine.tensors.precision import accumulation_dtype


def with_squares(structure: Structure) -> Structure | None:
    """Return the same structure with squared inputs; ``None`` for ``Dense``, which holds no inputs.

    Each output multiplies an entry of the parameter by at most one input. So the squared Jacobian ``J * J`` is
    the Jacobian of the use with squared inputs.
    """
    if isinstance(structure, Outer):
        return replace(structure, given=structure.x.square(), moment=None, direct=None, inner=None)
    return structure if isinstance(structure, Lookup) else None


def filled_up(structure: Structure, real: Tensor) -> Structure:
    """Return the structure for samples with different numbers of positions, where zeros stand for missing ones.

    All samples together have ``real`` positions. An index of zero would be the first row of a table, so a
    look-up becomes per-sample gradients.
    """
    if isinstance(structure, Outer):
        return replace(structure, real=real)
    return Dense(structure.rows) if isinstance(structure, Lookup) else structure


def with_factors(structure: Structure, factors: Tensor) -> Structure:
    """Return the same structure, with the gradient of each sample multiplied by a factor ``[n]``."""

    def change(values: Tensor) -> Tensor:
        wide = factors.to(accumulation_dtype(values.dtype)).reshape(-1, *[1] * (values.dim() - 2))
        if values.dtype == wide.dtype:
            return values * wide
        return torch.mul(values, wide, out=torch.empty_like(values))  # rounded once, without a wide copy

    return with_cotangent(structure, change)
