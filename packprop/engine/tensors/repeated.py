"""Repeated work in a dry run: packprop runs it a few times, and counts its memory in full.

# NOTE [Repeated columns]
Most functions have no batching rule in PyTorch's vectorised backward pass: PyTorch calls each once for each
column, and stacks the results. A call without data can take as long as a call with data. So two columns stand
for all. Everything made of them counts as many times as there are pairs of columns; everything else counts
once. The products get their full size at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from packprop.engine.tensors.dry import chunk_starts, is_dry_run, storage_key
from packprop.engine.tensors.setting import setting

STANDING = 2
"""Columns that stand for all: one alone would not show how columns lie in memory."""


@dataclass
class Repeated:
    """A few tensors that stand for more tensors.

    Args:
        times: The number of times that their memory counts.
        keys: Storages, by ``storage_key``, that were made from repeated columns.
    """

    times: float = 1.0
    keys: set[int] = field(default_factory=set)


_REPEATED: ContextVar[Repeated | None] = ContextVar("packprop_repeated", default=None)


def counting_repeated() -> AbstractContextManager[Repeated]:
    """Let columns stand for others inside; code that counts memory reads the result."""
    return setting(_REPEATED, Repeated())


Products = list[Tensor | None]
"""One tensor ``[v, ...]`` for each end; ``None`` for an end that is not reached."""


def of_columns(pull: Callable[[Sequence[Tensor]], Products], columns: Sequence[Tensor]) -> Products:
    """Return the products ``[v, ...]`` of columns ``[v, ...]``; see NOTE [Repeated columns]."""
    repeated, count = _REPEATED.get(), len(columns[0])
    if repeated is None or not is_dry_run() or repeated.keys or count <= STANDING + 1:
        return pull(columns)
    few = [column[:STANDING] for column in columns]
    given = set(map(storage_key, few))
    repeated.times, repeated.keys = count / STANDING, set(given)
    try:
        products = pull(few)
    finally:
        repeated.times, repeated.keys = 1.0, set()
    return _full_size(products, given, count)


def one_by_one(count: int, make: Callable[[int], Products]) -> list[Products]:
    """Call ``make`` for each number; in a dry run only for a few, but count the memory of all results."""
    made: list[Products] = []
    for place in chunk_starts(count, 1):
        while len(made) < place:
            made.append([None if piece is None else torch.empty_like(piece) for piece in made[-1]])
        made.append(make(place))
    return made


def _full_size(products: Products, given: set[int], count: int) -> Products:
    """Return products of ``count`` columns in place of the few that stand for them, which it drops."""
    places = [None if product is None else _Place.of(product, given, count) for product in products]
    products.clear()
    made: dict[int, Tensor] = {}
    return [None if place is None else place.make(made) for place in places]


@dataclass
class _Place:
    """The place of a product of all columns: in memory of its own, or in the memory of another tensor."""

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    like: Tensor
    base: Tensor | None

    @classmethod
    def of(cls, product: Tensor, given: set[int], count: int) -> _Place:
        """Make the place from the product of a few columns, which is dropped unless its memory stays."""
        key, step = storage_key(product), product.stride(0)
        shape, stride = (count, *product.shape[1:]), product.stride()
        own = key not in given and step != 0  # no columns that pass through, and not one product for all
        if own:
            stride = tuple(each * count // STANDING if each > step else each for each in stride)
        like = torch.empty(0, dtype=product.dtype, device=product.device)
        return cls(key, shape, stride, like, None if own else product)

    def make(self, made: dict[int, Tensor]) -> Tensor:
        """Return the product; products that shared memory still share it."""
        if self.base is not None:
            return self.base.as_strided(self.shape, self.stride, self.base.storage_offset())
        if self.key in made and made[self.key].shape == self.shape and made[self.key].dtype == self.like.dtype:
            return made[self.key]
        made[self.key] = self.like.new_empty_strided(self.shape, self.stride)
        return made[self.key]
