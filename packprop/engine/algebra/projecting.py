"""Projections of per-sample gradients: of the factors of an affine use, or of blocks of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.algebra.order import fold_swapped, fold_to
from packprop.engine.algebra.projections import Projection, matrix_shape
from packprop.engine.algebra.structures import Lookup, Outer, Structure, Tied, rows
from packprop.engine.tensors.dry import chunk_starts

BLOCK = 2**21
"""Entries of a matrix that exist at once."""


def projected(structure: Structure, projection: Projection, name: str, shape: Sequence[int]) -> Tensor:
    """Project per-sample gradients of one column: ``[n, d]``.

    Args:
        structure: Structure of the parameter, with one column.
        projection: The matrices.
        name: Name of the parameter, which chooses its matrix.
        shape: Its shape.
    """
    scale = 1 / math.sqrt(projection.dimension)
    if projection.kind == "kronecker":
        return _by_factors(structure, projection, name, shape) * scale
    return _by_blocks(structure, projection, name, shape) * scale


def _by_factors(structure: Structure, projection: Projection, name: str, shape: Sequence[int]) -> Tensor:
    """Compute ``A G B^T`` of each gradient G, from its factors if it has any: it does not form the gradient."""
    if isinstance(structure, Tied) and not structure.formed:
        both = [_by_factors(part, projection, name, shape) for part in structure.parts]
        return both[0] + both[1]
    if isinstance(structure, Lookup) and not structure.formed:
        assert structure.cotangent is not None
        left, right = projection.factors(name, shape, structure.cotangent.new_empty((), dtype=_real(structure)))
        cotangent = structure.cotangent[0]
        return _summed(left[structure.index].to(cotangent.dtype), cotangent, None, right)
    if isinstance(structure, Outer) and not structure.formed and structure.cotangent is not None:
        left, right = projection.factors(name, shape, structure.cotangent.new_empty((), dtype=_real(structure)))
        cotangent, size = structure.cotangent[0], torch.Size(shape)
        groups, fan_out = cotangent.shape[2:]
        if structure.fold is fold_to(size):
            if groups == 1:
                return _summed(cotangent[:, :, 0], structure.x[:, :, 0], left, right)
            by_group = left.to(cotangent.dtype).reshape(groups, fan_out, -1)
            outputs = torch.einsum("nsgo,goa->nsga", cotangent, by_group).flatten(1, 2)
            return _summed(outputs, structure.x.flatten(1, 2), None, right)
        if structure.fold is fold_swapped(
            size
        ):  # the fan-in of a group leads, and the kernel is part of a column
            kernel = size[2:].numel()
            inputs = structure.x.unflatten(3, (-1, kernel))
            leading = left.to(inputs.dtype).reshape(groups, -1, left.shape[1])
            inputs = torch.einsum("nsgck,gca->nsgka", inputs, leading).flatten(1, 3)
            trailing = right.to(cotangent.dtype).reshape(fan_out, kernel, -1)
            outputs = torch.einsum("nsgo,okb->nsgkb", cotangent, trailing).flatten(1, 3)
            return _summed(inputs, outputs, None, None)
    gradients, sides = rows(structure)[0], matrix_shape(shape)
    gradients = gradients.reshape(len(gradients), math.prod(shape))
    gradients = F.pad(gradients, (0, math.prod(sides) - math.prod(shape))).unflatten(1, sides)
    left, right = projection.factors(name, shape, gradients.new_empty((), dtype=gradients.dtype.to_real()))
    found: Tensor = left.to(gradients.dtype).mT @ (gradients @ right.to(gradients.dtype))
    return found.flatten(1)


def _summed(left: Tensor, right: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Compute ``sum_s (rows^T left_ns) (columns^T right_ns)^T``, row by row ``[n, a*b]``.

    A side without a matrix stays as it is. A side is projected before the sum over positions if that makes it
    smaller, and after it if not.

    Args:
        left: ``[n, s, r]``.
        right: ``[n, s, c]``.
        rows: ``[r, a]``.
        columns: ``[c, b]``.
    """
    if rows is not None:
        rows = rows.to(left.dtype)
        if rows.shape[1] < rows.shape[0]:
            left, rows = left @ rows, None
    if columns is not None:
        columns = columns.to(right.dtype)
        if columns.shape[1] < columns.shape[0]:
            right, columns = right @ columns, None
    products = left.mT @ right
    if columns is not None:
        products = products @ columns
    if rows is not None:
        products = rows.mT @ products
    return products.flatten(1)


def _real(structure: Outer | Lookup) -> torch.dtype:
    assert structure.cotangent is not None
    return structure.cotangent.dtype.to_real()


class _Sum:
    """The projection of gradients of a parameter, some entries at a time."""

    def __init__(self, projection: Projection, name: str) -> None:
        self._projection, self._name = projection, name
        self.total: Tensor | None = None

    def add(self, gradients: Tensor, start: int) -> None:
        """Add the entries from ``start`` on, ``[n, e]``."""
        like = gradients.new_empty((), dtype=gradients.dtype.to_real())
        step = max(1, BLOCK // self._projection.dimension)
        for first in chunk_starts(gradients.shape[1], step):
            last = min(first + step, gradients.shape[1])
            entries = torch.arange(start + first, start + last, device=gradients.device)
            columns = self._projection.columns(self._name, entries, like).to(gradients.dtype)
            part = gradients[:, first:last] @ columns
            self.total = part if self.total is None else self.total + part


def _by_blocks(structure: Structure, projection: Projection, name: str, shape: Sequence[int]) -> Tensor:
    """Multiply gradients by a matrix, both made a block of entries at a time."""
    total = _Sum(projection, name)
    if isinstance(structure, Tied) and not structure.formed:
        both = [_by_blocks(part, projection, name, shape) for part in structure.parts]
        return both[0] + both[1]
    if isinstance(structure, Lookup) and not structure.formed:
        assert structure.cotangent is not None
        cotangent, index = structure.cotangent[0], structure.index
        samples, positions, width = cotangent.shape
        if samples * positions < structure.entries:
            return _of_few_rows(cotangent, index, projection, name)
        step = max(1, BLOCK // max(1, samples * width))
        for first in chunk_starts(structure.entries, step):
            number = min(step, structure.entries - first)
            here = ((index >= first) & (index < first + number))[..., None]
            place = (index - first).clamp(0, number - 1)[..., None].expand_as(cotangent)
            table = cotangent.new_zeros(samples, number, width)
            total.add(table.scatter_add(1, place, cotangent * here).flatten(1), first * width)
    elif (
        isinstance(structure, Outer)
        and not structure.formed
        and structure.cotangent is not None
        and structure.fold is fold_to(torch.Size(shape))
        and not structure.by_groups
    ):
        samples, _, groups, fan_out = structure.cotangent[0].shape
        fan_in = structure.shape[3]
        left = structure.cotangent[0].permute(2, 0, 3, 1)  # g n o s
        right = structure.x.permute(2, 0, 1, 3)  # g n s i
        step = max(1, BLOCK // max(1, samples * fan_in))
        for group in range(groups):
            for first in chunk_starts(fan_out, step):
                block = left[group, :, first : first + step] @ right[group]
                total.add(block.flatten(1), (group * fan_out + first) * fan_in)
    else:
        gradients = rows(structure)[0]
        total.add(gradients.reshape(len(gradients), math.prod(shape)), 0)
    if total.total is None:  # a parameter without entries
        like = rows(structure)
        return like.new_zeros(like.shape[1], projection.dimension)
    return total.total


def _of_few_rows(cotangent: Tensor, index: Tensor, projection: Projection, name: str) -> Tensor:
    """Project gradients of a table in which few rows were looked up, making only the columns of these rows."""
    samples, positions, width = cotangent.shape
    like = cotangent.new_empty((), dtype=cotangent.dtype.to_real())
    inside = torch.arange(width, device=index.device)
    step = max(1, BLOCK // max(1, width * projection.dimension))
    found = []
    for sample in chunk_starts(samples, 1):
        total = cotangent.new_zeros(projection.dimension)
        for first in chunk_starts(positions, step):
            entries = (index[sample, first : first + step, None] * width + inside).flatten()
            columns = projection.columns(name, entries, like).to(cotangent.dtype)
            total = total + cotangent[sample, first : first + step].reshape(-1) @ columns
        found.append(total)
    while len(found) < samples:  # in a dry run few stand for all
        found.append(found[0])
    return torch.stack(found)
