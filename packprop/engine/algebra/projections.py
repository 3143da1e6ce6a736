"""Random projections of per-sample gradients, by matrices made from a seed, on any device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.precision import wider_dtype

# NOTE [Matrices of a seed]
#
# Entry (j, e) of a matrix comes from a 64-bit number that depends only on the seed, the name of the parameter,
# j and e: no entry has to be drawn before another, and every device makes the same ones. Integers wrap around.
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
# - "kronecker": a parameter of two or more axes is taken for the matrix [r, c] of its first axis and all the
#   others; one of p entries and fewer axes for a matrix of rows of c = ceil(sqrt(p)) entries, filled up with
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
        """Return the number that all words of a matrix begin with."""
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
    """Shift to the right and fill up with zeros, which a shift of signed whole numbers does not."""
    shifted: Tensor = (words >> bits) & (2 ** (WORD - bits) - 1)
    return shifted


def _signed(number: int) -> int:
    """Return the signed whole number that has the same 64 bits."""
    return number - 2**WORD if number >= 2 ** (WORD - 1) else number
