"""Random projections of per-sample gradients, by matrices made from a seed, on any device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.algebra.order import fold_swapped, fold_to
from packprop.engine.algebra.structures import Dense, Lookup, Outer, Structure, Tied, rows
from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.dry import chunk_starts
from packprop.engine.tensors.precision import wider_dtype

# NOTE [Matrices of a seed]
#
# Entry (j, e) of a matrix comes from a 64-bit number that depends only on the seed, the name of the parameter,
# j and e: no entry has to be drawn before another, and every device makes the same. Integers wrap around.
#
#     key     = first 8 bytes, little-endian, of sha256(f"{seed}/{parameter}/{part}")
#     word w  of entry e, w = 0 ... W - 1:   mix(key + (e * W + w + 1) * 0x9E3779B97F4A7C15)
#     mix(z):  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB;  z ^ z >> 31
#
# (Steele, Lea and Flood 2014: SplitMix64.) Entries of a parameter count in the order of its memory.
#
# - "rademacher", part "entries": W = ceil(d / 64), and S[j, e] = 1 where bit j % 64 of word j // 64 is set,
#   else -1. The projection is S / sqrt(d).
# - "gaussian", part "entries": W = ceil(d / 2). With u = (upper 32 bits + 1) / 2^32 and t = lower 32 bits of
#   word j // 2 over 2^32, S[j, e] = sqrt(-2 ln u) cos(2 pi t) for even j, and sin in place of cos for odd j.
# - "kronecker": a parameter of two or more axes counts as the matrix G [r, c] of its first axis and all other
#   axes; one of p entries and fewer axes, as a matrix with rows of c = ceil(sqrt(p)) entries, filled up with
#   zeros. With d = a * b, a <= b as near to each other as they can be, the matrices of signs A [a, r] (part
#   "rows") and B [b, c] (part "columns") project it to A G B^T / sqrt(d), whose entries come row by row.

Kind = Literal["rademacher", "gaussian", "kronecker"]
"""The kind of random numbers in a projection's matrix."""

WORD = 64
"""Bits of a word."""


@dataclass(frozen=True)
class Projection:
    """A random matrix for each parameter; see NOTE [Matrices of a seed].

    Args:
        kind: The kind of its entries.
        dimension: Rows of each matrix, d.
        seed: Chooses the matrices.
    """

    kind: Kind
    dimension: int
    seed: int

    @property
    def sides(self) -> tuple[int, int]:
        """The two factors of the dimension, ``(a, b)``: as near to each other as they can be, ``a <= b``."""
        first = next(a for a in range(math.isqrt(self.dimension), 0, -1) if self.dimension % a == 0)
        return first, self.dimension // first

    def factors(self, name: str, shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """The signs ``A [r, a]`` and ``B [c, b]`` of a Kronecker product, transposed."""
        rows, columns = matrix_shape(shape)
        a, b = self.sides
        return (
            signs(self.key(name, "rows"), _counted(rows, like), a, like),
            signs(self.key(name, "columns"), _counted(columns, like), b, like),
        )

    def columns(self, name: str, entries: Tensor, like: Tensor) -> Tensor:
        """Columns ``[e, d]`` of a matrix that is no Kronecker product, not scaled yet."""
        make = normals if self.kind == "gaussian" else signs
        return make(self.key(name, "entries"), entries, self.dimension, like)

    def matrix(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """The matrix for a parameter ``[d, *p]``, in the precision and on the device of ``like``."""
        scale = 1 / math.sqrt(self.dimension)
        if self.kind == "kronecker":
            rows, columns = self.factors(name, shape, like)
            product = torch.einsum("ra,cb->abrc", rows, columns).reshape(self.dimension, -1)
            return product[:, : math.prod(shape)].reshape(self.dimension, *shape) * scale
        entries = _counted(math.prod(shape), like)
        return self.columns(name, entries, like).mT.reshape(self.dimension, *shape) * scale

    def key(self, name: str, part: str) -> int:
        """Return the number that all words of a matrix are computed from."""
        digest = hashlib.sha256(f"{self.seed}/{name}/{part}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of the matrix that a parameter counts as."""
    if len(shape) > 1:
        return shape[0], math.prod(shape[1:])
    entries = math.prod(shape)
    columns = math.isqrt(max(entries, 1) - 1) + 1
    return -(-entries // columns), columns


def signs(key: int, entries: Tensor, dimension: int, like: Tensor) -> Tensor:
    """Return signs ``[e, d]`` for some entries ``[e]``, looked up eight at a time."""
    words = _words(key, entries, -(-dimension // WORD))
    bits = torch.arange(8, device=like.device)
    table = ((torch.arange(256, device=like.device)[:, None] >> bits) & 1).to(like.dtype) * 2 - 1
    found = table.index_select(0, words.view(torch.uint8).flatten().to(torch.int32))
    whole: Tensor = found.reshape(len(entries), words.shape[1] * WORD)
    return whole[:, :dimension]


def normals(key: int, entries: Tensor, dimension: int, like: Tensor) -> Tensor:
    """Return normal numbers ``[e, d]`` for some entries ``[e]``, by Box and Muller (1958)."""
    words = _words(key, entries, -(-dimension // 2))
    wide = wider_dtype(torch.float32, device_kind(like)) or torch.float32
    upper = (_shifted(words, 32) + 1).to(wide) / 2**32
    turns = (words & (2**32 - 1)).to(wide) * (2 * math.pi / 2**32)
    radius = (-2 * upper.log()).clamp_(min=0).sqrt_()
    pairs: Tensor = torch.stack([radius * turns.cos(), radius * turns.sin()], -1)
    return pairs.flatten(1)[:, :dimension].to(like.dtype)


def _counted(number: int, like: Tensor) -> Tensor:
    return torch.arange(number, device=like.device)


def _words(key: int, entries: Tensor, number: int) -> Tensor:
    """Return words ``[e, w]`` of some entries."""
    places = entries[:, None] * number + torch.arange(1, number + 1, device=entries.device)
    mixed = places * _signed(0x9E3779B97F4A7C15) + _signed(key)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    words: Tensor = mixed ^ _shifted(mixed, 31)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill up with zeros, unlike a shift of signed whole numbers."""
    shifted: Tensor = (words >> bits) & (2 ** (WORD - bits) - 1)
    return shifted


def _signed(number: int) -> int:
    """Return the signed whole number that has the same 64 bits."""
    return number - 2**WORD if number >= 2 ** (WORD - 1) else number


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
    project = _by_factors if projection.kind == "kronecker" else _by_blocks
    scale = 1 / math.sqrt(projection.dimension)
    if isinstance(structure, Tied) and not structure.formed:
        one, other = (project(part, projection, name, shape) for part in structure.parts)
        return (one + other) * scale
    return project(structure, projection, name, shape) * scale


def _by_factors(structure: Structure, projection: Projection, name: str, shape: Sequence[int]) -> Tensor:
    """Compute ``A G B^T`` of each gradient G, from its factors if it has any: it does not form the gradient."""
    size = torch.Size(shape)
    if not isinstance(structure, Dense) and not structure.formed and structure.cotangent is not None:
        cotangent = structure.wide_cotangent[0]
        left, right = projection.factors(name, shape, _real_like(cotangent))
        if isinstance(structure, Lookup):
            return _summed(left[structure.index].to(cotangent.dtype), cotangent, None, right)
        groups, fan_out = cotangent.shape[2:]
        if structure.fold is fold_to(size):
            if groups == 1:
                return _summed(cotangent[:, :, 0], structure.x[:, :, 0], left, right)
            by_group = left.to(cotangent.dtype).reshape(groups, fan_out, -1)
            outputs = torch.einsum("nsgo,goa->nsga", cotangent, by_group).flatten(1, 2)
            return _summed(outputs, structure.x.flatten(1, 2), None, right)
        if structure.fold is fold_swapped(size):  # the fan-in of a group leads, the kernel is part of a column
            kernel = size[2:].numel()
            inputs = structure.x.unflatten(3, (-1, kernel))
            leading = left.to(inputs.dtype).reshape(groups, -1, left.shape[1])
            inputs = torch.einsum("nsgck,gca->nsgka", inputs, leading).flatten(1, 3)
            trailing = right.to(cotangent.dtype).reshape(fan_out, kernel, -1)
            outputs = torch.einsum("nsgo,okb->nsgkb", cotangent, trailing).flatten(1, 3)
            return _summed(inputs, outputs, None, None)
    gradients, sides = rows(structure)[0], matrix_shape(shape)
    gradients = gradients.reshape(len(gradients), size.numel())
    gradients = F.pad(gradients, (0, math.prod(sides) - size.numel())).unflatten(1, sides)
    left, right = projection.factors(name, shape, _real_like(gradients))
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


def _real_like(tensor: Tensor) -> Tensor:
    """Return a tensor without entries, of the real precision and the device of another."""
    return tensor.new_empty(0, dtype=tensor.dtype.to_real())


def _by_blocks(structure: Structure, projection: Projection, name: str, shape: Sequence[int]) -> Tensor:
    """Multiply gradients by a matrix, both made a block of entries at a time."""
    if isinstance(structure, Lookup) and not structure.formed:
        samples, positions, _ = structure.wide_cotangent[0].shape
        if samples * positions < structure.entries:
            return _of_few_rows(structure.wide_cotangent[0], structure.index, projection, name)
    total: Tensor | None = None
    step = max(1, BLOCK // projection.dimension)
    for start, gradients in _blocks(structure, torch.Size(shape)):
        for first in chunk_starts(gradients.shape[1], step):
            part = gradients[:, first : first + step]
            entries = torch.arange(start + first, start + first + part.shape[1], device=part.device)
            part = part @ projection.columns(name, entries, _real_like(part)).to(part.dtype)
            total = part if total is None else total + part
    if total is None:  # a parameter without entries
        return rows(structure).new_zeros(rows(structure).shape[1], projection.dimension)
    return total


def _blocks(structure: Structure, shape: torch.Size) -> Iterator[tuple[int, Tensor]]:
    """Yield gradients ``[n, e]`` of some entries at a time, each with the number of its first entry."""
    if isinstance(structure, Lookup) and not structure.formed:
        cotangent, index = structure.wide_cotangent[0], structure.index
        samples, _, width = cotangent.shape
        step = max(1, BLOCK // max(1, samples * width))
        for first in chunk_starts(structure.entries, step):
            number = min(step, structure.entries - first)
            here = ((index >= first) & (index < first + number))[..., None]
            place = (index - first).clamp(0, number - 1)[..., None].expand_as(cotangent)
            table = cotangent.new_zeros(samples, number, width)
            yield first * width, table.scatter_add(1, place, cotangent * here).flatten(1)
        return
    forms_blocks = isinstance(structure, Outer) and not structure.formed and not structure.by_groups
    if isinstance(structure, Outer) and forms_blocks and structure.fold is fold_to(shape):
        cotangent, fan_in = structure.wide_cotangent[0], structure.shape[3]
        samples, _, groups, fan_out = cotangent.shape
        left = cotangent.permute(2, 0, 3, 1)  # g n o s
        right = structure.x.permute(2, 0, 1, 3)  # g n s i
        step = max(1, BLOCK // max(1, samples * fan_in))
        for group in range(groups):
            for first in chunk_starts(fan_out, step):
                block = left[group, :, first : first + step] @ right[group]
                yield (group * fan_out + first) * fan_in, block.flatten(1)
        return
    yield 0, rows(structure)[0].reshape(rows(structure).shape[1], shape.numel())


def _of_few_rows(cotangent: Tensor, index: Tensor, projection: Projection, name: str) -> Tensor:
    """Project gradients of a table in which few rows were looked up, making only the columns of these rows."""
    samples, positions, width = cotangent.shape
    inside = torch.arange(width, device=index.device)
    step = max(1, BLOCK // max(1, width * projection.dimension))
    found = []
    for sample in chunk_starts(samples, 1):
        total = cotangent.new_zeros(projection.dimension)
        for first in chunk_starts(positions, step):
            entries = (index[sample, first : first + step, None].long() * width + inside).flatten()
            columns = projection.columns(name, entries, _real_like(cotangent)).to(cotangent.dtype)
            total = total + cotangent[sample, first : first + step].reshape(-1) @ columns
        found.append(total)
    while len(found) < samples:  # in a dry run, a few samples stand for all
        found.append(found[0])
    return torch.stack(found)
