"""Structures, in which a parameter meets a cotangent: ``Outer``, ``Lookup``, ``Dense``.

A structure holds the tensors of some samples and some columns of a seed, in the canonical axes
``v n s g o`` and ``n s g i``. It does not know which function they come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.engine.algebra.choices import Extents, convolved_by_groups
from packprop.engine.algebra.kernels import outer_products
from packprop.engine.algebra.order import EntryOrder, Fold
from packprop.engine.tensors.device import device_kind
from packprop.engine.tensors.precision import accumulation_dtype, widened


class LazyTensor(NamedTuple):
    """A tensor that is made on demand, and its shape."""

    shape: Sequence[int]
    make: Callable[[], Tensor]


class _Formed:
    """A structure whose per-sample gradients, ``rows``, are formed at most once."""

    @property
    def formed(self) -> bool:
        """Tell whether per-sample gradients were computed already."""
        return "rows" in vars(self)


class _OfUse(_Formed):
    """A structure with a cotangent, unless it was built for the inputs alone."""

    cotangent: Tensor | None

    @property
    def given_cotangent(self) -> Tensor:
        """The cotangent in the precision that it was given in."""
        assert self.cotangent is not None, "this structure was built without a cotangent"
        return self.cotangent

    @cached_property
    def wide_cotangent(self) -> Tensor:
        """The cotangent in at least single precision."""
        return widened(self.given_cotangent)


@dataclass(eq=False)  # a frozen one takes six times as long to make, and each use makes some in each pass
class Outer(_OfUse):
    """An affine use, ``y[n,s,g,o] = sum_i W[g,o,i] x[n,s,g,i]``.

    Args:
        given: Inputs ``[n, s, g, i]``, as a tensor or as the function that makes it; read them from ``x``.
        cotangent: Cotangent at the output ``[v, n, s, g, o]``; ``None`` if only inputs are needed. It and
            ``given`` may have sixteen bits, for products; ``wide_cotangent`` and ``x`` are in single precision.
        fold: Maps ``[..., g, o, i]`` to ``[..., *p]``; a linear rearrangement of entries.
        moment: Computes ``sum_nsg x x^T``, ``[i, i]``, if that takes less than making the inputs.
        out: The memory for per-sample gradients ``[1, n, *p]``, in the order ``g o i``; else ``None``.
        direct: Computes per-sample gradients ``[1, n, *p]`` without inputs by position; ``None`` where no
            function does.
        inner: Computes inner products of per-sample gradients with a direction, ``[*p] -> [n]``, without inputs
            by position; ``None`` where no function does.
        channels: Channels of a group of the images that inputs by position are unfolded from.
        held: The bytes of one sample that an algorithm may hold; one that holds more is taken only if no other
            holds less. ``None`` for no limit.
        real: The number of inputs that samples have, if some have fewer positions, and zeros in place of the
            others; ``None`` if all have the same positions.
    """

    given: Tensor | LazyTensor
    cotangent: Tensor | None
    fold: Fold
    moment: Callable[[], Tensor] | None = None
    out: Tensor | None = None
    direct: Callable[[], Tensor] | None = None
    inner: Callable[[Tensor], Tensor] | None = None
    channels: int = 0
    held: int | None = None
    real: Tensor | None = None

    @cached_property
    def x(self) -> Tensor:
        """Inputs ``[n, s, g, i]``, in at least single precision."""
        return widened(self.given) if isinstance(self.given, Tensor) else self.given.make()

    @property
    def given_inputs(self) -> Tensor:
        """Inputs ``[n, s, g, i]``, in the precision that they were given in."""
        return self.given if isinstance(self.given, Tensor) else self.x

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Cotangent and inputs for products: as they were given, if they have one precision."""
        cotangent, inputs = self.given_cotangent, self.given_inputs
        return (cotangent, inputs) if cotangent.dtype == inputs.dtype else (self.wide_cotangent, self.x)

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the inputs, without making them."""
        return self.given.shape

    @cached_property
    def extents(self) -> Extents:
        """The sizes that choose algorithms."""
        cotangent = self.given_cotangent
        _, positions, groups, fan_in = self.shape
        fans = groups, fan_in, cotangent.shape[4], 0 if self.direct is None else self.channels
        dtype = accumulation_dtype(cotangent.dtype)
        return Extents(positions, *fans, dtype, device_kind(cotangent), self.held)

    @cached_property
    def by_groups(self) -> bool:
        """Tell whether ``direct`` computes per-sample gradients."""
        return self.cotangent is not None and self.direct is not None and convolved_by_groups(self.extents)

    @cached_property
    def rows(self) -> Tensor | None:
        """Per-sample gradients ``[v, n, *p]``: products summed over positions."""
        cotangent = self.cotangent
        if cotangent is None:
            return None
        if self.direct is not None and self.by_groups:
            gradients = self.direct()
            return gradients if self.out is None else self.out.copy_(gradients)
        columns, samples, positions, groups, fan_out = cotangent.shape
        if positions == 1:
            left, right = self.wide_cotangent[:, :, 0, ..., None], self.x[:, 0, :, None, :]
            if self.out is None:
                return self.fold(left * right)
            torch.mul(left, right, out=self.out.view(1, samples, groups, fan_out, -1))
            return self.out
        if self.out is not None:
            outer_products(*self.matrices, out=self.out.view(samples * groups, fan_out, -1))
            return self.out
        products = outer_products(*self.matrices)
        if columns == 1:
            return self.fold(products.reshape(1, samples, groups, fan_out, -1))
        return self.fold(products.reshape(samples, groups, columns, fan_out, -1).permute(2, 0, 1, 3, 4))

    @cached_property
    def total(self) -> Tensor:
        """Per-sample gradients of the first column, summed ``[*p]``."""
        return rows(self)[0].sum(0)

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Cotangents ``[n*g, v*o, s]`` and inputs ``[n*g, i, s]``."""
        cotangent, x = self.factors
        columns, samples, positions, groups, fan_out = cotangent.shape
        left = cotangent.permute(1, 3, 0, 4, 2).reshape(samples * groups, columns * fan_out, positions)
        return left, x.permute(0, 2, 3, 1).reshape(samples * groups, x.shape[3], positions)


@dataclass(frozen=True)
class Lookup(_OfUse):
    """A table look-up, ``y[n,s] = W[index[n,s]]``.

    Args:
        index: Rows to look up ``[n, s]``.
        cotangent: Cotangent at the output ``[v, n, s, o]``; ``None`` if only inputs are needed.
        entries: Number of rows of the table.
        dtype: Precision of the table.
        shared: The node that looked the rows up once for all samples, if several functions may take these rows;
            else ``None``.
    """

    index: Tensor
    cotangent: Tensor | None
    entries: int
    dtype: torch.dtype
    shared: Any = None

    @cached_property
    def rows(self) -> Tensor | None:
        """Per-sample gradients ``[v, n, *p]``: cotangents, added up by the row that was looked up."""
        if self.cotangent is None:
            return None
        columns, samples, _, width = self.cotangent.shape
        table = self.cotangent.new_zeros(columns, samples, self.entries, width)
        index = self.index[None, :, :, None].expand_as(self.cotangent)
        return table.scatter_add(2, index, self.cotangent)

    def added_up(self, values: Tensor) -> Tensor:
        """Add up values ``[n, s, o]`` by the rows that were looked up: ``[e, o]``."""
        table = values.new_zeros(self.entries, values.shape[2])
        return table.index_add(0, self.index.flatten(), values.flatten(0, 1))

    @property
    def is_large(self) -> bool:
        """Tell whether the table has more rows than a sample looks up."""
        return self.entries > self.index.shape[1]

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """The gradients of the rows that each sample looks up, each at the first position that looks it up.

        They are ``[v, n, s, o]``, zero at other positions. The second tensor is a mask of the first ``[n, s]``.
        """
        cotangent, index = self.wide_cotangent, self.index
        in_order, order = index.sort(dim=1, stable=True)
        begins = torch.ones_like(in_order, dtype=torch.bool)
        begins[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
        place = torch.arange(index.shape[1], device=index.device).expand_as(index)
        begin = torch.where(begins, place, 0).cummax(1).values
        first = torch.empty_like(order).scatter(1, order, order.gather(1, begin))
        into = first[None, :, :, None].expand_as(cotangent)
        return torch.zeros_like(cotangent).scatter_add(2, into, cotangent), first == place


@dataclass(frozen=True)
class Dense(_Formed):
    """Per-sample gradients that exist already ``[v, n, *p]``; every structure can become this one.

    Args:
        rows: ``None`` if only inputs are needed.
    """

    rows: Tensor | None


class Tied(Dense):
    """A table whose rows are looked up, and which is also an affine map: a head tied to its embedding.

    Per-sample gradients are formed only where a statistic needs them.

    Args:
        parts: One structure of each kind, of the same entries ``[o, i]``.
    """

    parts: tuple[Outer, Lookup]

    def __init__(self, parts: Iterable[Any]) -> None:
        object.__setattr__(self, "parts", tuple(parts))

    @cached_property
    def rows(self) -> Tensor | None:
        """Per-sample gradients ``[v, n, *p]``, added up over both uses."""
        return rows(self.parts[0]) + rows(self.parts[1])


@dataclass(frozen=True)
class Product:
    """Two sets of columns: products of their per-sample gradients, entry by entry, take the place of squares.

    Args:
        left: The first set.
        right: The second set; ``None`` for ``left`` again.
        weights: A factor for each column and sample ``[v, n]``, of either sign.
    """

    left: Outer | Lookup | Dense
    right: Outer | Lookup | Dense | None = None
    weights: Tensor | None = None

    @cached_property
    def products(self) -> Tensor:
        """Products of rows ``[v, n, *p]``."""
        left = rows(self.left)
        products = left.square() if self.right is None else left * rows(self.right)
        if self.weights is None:
            return products
        return products * self.weights.reshape(*self.weights.shape, *[1] * (products.dim() - 2))


@dataclass(frozen=True)
class ByToken:
    """Columns that belong to tokens: each token has the same number of consecutive columns.

    Args:
        source: A structure with ``v = t * k`` columns.
        tokens: The number of tokens, ``t``.
        counted: The tokens of each sample that count, as a mask ``[t, n]``.
    """

    source: Structure
    tokens: int
    counted: Tensor

    @cached_property
    def folded(self) -> Structure:
        """Put each token of a sample in a sample's place: ``k`` columns of ``t * n`` samples."""
        return tokens_as_samples(self.source, self.tokens)


@dataclass(frozen=True)
class Diagonal:
    """Diagonals that need no squaring: for each sample, or for all samples together.

    Args:
        source: The structure whose rows ``[1, n, *p]`` are the diagonals.
    """

    source: Outer | Lookup | Dense


Structure = Outer | Lookup | Dense

Quadratic = Structure | Product | Diagonal
"""The arguments of ``sum_sq`` and ``batch_sq``: rows to square, rows to multiply, or diagonals."""

Statistical = Quadratic | ByToken
"""The arguments of statistics."""


def rows(structure: Structure) -> Tensor:
    """Return per-sample gradients ``[v, n, *p]`` of a structure with a cotangent; computed only once."""
    gradients = structure.rows
    assert gradients is not None, "this structure was built without a cotangent"
    return gradients


def fold_matrix(structure: Outer, matrix: Tensor) -> Tensor:
    """Map ``[o, i]`` to ``[*p]``: a matrix for a parameter without groups."""
    return structure.fold(matrix.unsqueeze(-3))


def fold_table(gradient: Tensor) -> Tensor:
    """Map ``[..., 1, o, i]`` to ``[..., i, o]``: a matrix for a table, whose rows one-hot inputs choose."""
    return gradient.squeeze(-3).mT


def entry_order_of(structure: Structure) -> EntryOrder | None:
    """Return the order of entries ``[g, o, i]``; ``None`` if no input multiplies the parameter."""
    if isinstance(structure, Dense):
        return None
    fans = structure.given_cotangent.shape[3:]
    if isinstance(structure, Lookup):
        return EntryOrder(fold_table, (1, *fans, structure.entries))
    return EntryOrder(structure.fold, (*fans, structure.shape[3]))


def tokens_as_samples(structure: Structure, tokens: int) -> Structure:
    """Turn a structure of ``t * k`` columns and n samples into one of ``k`` columns and ``t * n`` samples."""

    def repeated(inputs: Tensor) -> Tensor:
        return inputs.expand(tokens, *inputs.shape).flatten(0, 1)

    if isinstance(structure, Tied):
        return Tied(tokens_as_samples(part, tokens) for part in structure.parts)
    changed = with_cotangent(structure, functools.partial(_tokens_to_samples, tokens=tokens))
    if isinstance(structure, Outer) and isinstance(changed, Outer):
        samples, *rest = structure.shape
        given = LazyTensor([tokens * samples, *rest], lambda: repeated(structure.x))
        return replace(changed, given=given, moment=None)
    return replace(changed, index=repeated(changed.index)) if isinstance(changed, Lookup) else changed


def _tokens_to_samples(columns: Tensor, tokens: int) -> Tensor:
    """Map ``[t * k, n, ...]`` to ``[k, t * n, ...]``."""
    by_token: Tensor = columns.unflatten(0, (tokens, -1))
    return by_token.transpose(0, 1).flatten(1, 2)


def with_cotangent(structure: Structure, change: Callable[[Tensor], Tensor]) -> Structure:
    """Return the same structure with another cotangent, or with other rows if it is ``Dense``."""
    if isinstance(structure, Tied):
        return Tied(with_cotangent(part, change) for part in structure.parts)
    if isinstance(structure, Dense):
        return Dense(change(rows(structure)))
    changed = change(structure.given_cotangent)
    if isinstance(structure, Lookup):
        return replace(structure, cotangent=changed)
    return replace(structure, cotangent=changed, direct=None, inner=None, out=None)
