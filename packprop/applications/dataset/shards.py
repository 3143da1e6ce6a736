"""Results of the batches so far for sharded parameters: each rank keeps the parts of its own shards.

# NOTE [Sums of shards]
A pass yields results of whole parameters, for this rank's samples. When it is over, packprop merges those of
all ranks, a few parameters at a time, and each rank adds the part of its shard to its kept sum over all samples
so far. It does so for results with an entry for each entry of a parameter. Each rank keeps other results, such
as Kronecker factors and rows of samples, for its own samples, and packprop merges them at the end of the run.

Each rank writes its kept sums to its file of a checkpoint, with the index at which they begin in the whole. Any
number of ranks may read them, sharded in another way, or not at all: each takes the entries that it holds from
the files of all ranks that wrote, one file after the other. So none needs memory for the sums of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.saved import ASKED, SavedShards
from packprop.applications.dataset.state import Key, MergedResults
from packprop.applications.dataset.sums import merged_with
from packprop.engine.algebra import Moments
from packprop.engine.tensors import (
    is_distributed,
    named_parameters,
    own_part,
    part_like,
    replicated_like,
    whole_from,
)
from packprop.errors import PackpropError
from packprop.types import Extension


@dataclass
class ShardedResults(MergedResults):
    """Merged partial results of the batches so far; results of the shape of a parameter are kept as shards.

    Args:
        shards: The parameters that are sharded, by name.
        arrived: Results of the current pass, for whole parameters and this rank's samples.
        kept: The parts of results of all ranks that belong to this rank's shards.
    """

    shards: Mapping[str, Tensor] = field(default_factory=dict)
    arrived: dict[Key, Any] = field(default_factory=dict)
    kept: dict[Key, Any] = field(default_factory=dict)

    def end_pass(self, ranks: Ranks) -> None:
        """Merge the results of a pass on all ranks; each keeps the parts of its own shards."""
        for key, value in ranks.merged_in_turn(self.arrived, self.monoid_of):
            self.arrived.pop(key, None)
            part = _each(value, lambda whole, shard=self.shards[key[2]]: part_like(whole, shard))
            self.kept[key] = merged_with(self.monoid_of(key), self.kept.get(key), part)

    def of_all(self, ranks: Ranks) -> MergedResults:
        """Return the results of all ranks; kept parts become a ``DTensor``, placed like the parameter."""
        found = super().of_all(ranks)
        for key, value in self.kept.items():
            shard = self.shards[key[2]]
            found.partial[key] = _each(value, lambda part, shard=shard: whole_from(part, shard), shard)
        return found

    def shards_kept(self) -> list[list[Any]]:
        """Return the kept parts with the index at which each begins, in values that files can hold."""
        return [[*key, _begin(self.shards[key[2]]), value] for key, value in self.kept.items()]

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the values of ``saved``; results of whole parameters wait for the end of a pass."""
        super().restore(saved)
        for key in [key for key, value in self.partial.items() if self._is_of_shard(key, value)]:
            self.arrived[key] = self.partial.pop(key)

    def _merge_row(self, key: Key, partial: Any) -> None:
        if self._is_of_shard(key, partial):
            before = self.arrived.get(key)
            self.arrived[key] = partial if before is None else self.monoid_of(key).merge(before, partial)
        else:
            super()._merge_row(key, partial)

    def _is_of_shard(self, key: Key, value: Any) -> bool:
        """Tell whether a result is a lone row with an entry for each entry of a sharded parameter."""
        rows, shard = self.extensions[key[0]].rows, self.shards.get(key[2])
        if shard is None or len(rows) != 1 or rows[0].whole or not rows[0].sums:
            return False
        tensor = value.mean if isinstance(value, Moments) else value
        return isinstance(tensor, Tensor) and tensor.shape == shard.shape


def results_of(model: nn.Module, extensions: Any, sharded: bool) -> MergedResults:
    """Return the object that merges results of a model."""
    if not sharded:
        return MergedResults(extensions)
    shards = {name: each.detach() for name, each in named_parameters(model) if is_distributed(each)}
    return ShardedResults(extensions, shards=shards)


def take_up_shards(
    results: MergedResults,
    shards_of_ranks: Iterable[SavedShards],
    shapes: Mapping[str, torch.Size],
    device: torch.device | str,
    ranks: Ranks,
) -> None:
    """Restore shards that any number of ranks have written; all ranks must call it together.

    Args:
        results: The results to continue.
        shards_of_ranks: The shards of each rank that wrote.
        shapes: Shapes of whole parameters.
        device: The device of results.
        ranks: The ranks of the run.

    Raises:
        PackpropError: On every rank, if one of them cannot read its entries.
    """
    shards = results.shards if isinstance(results, ShardedResults) else {}

    found = ranks.attempt(lambda: _entries(results.extensions, shards_of_ranks, shards, shapes, device))
    for key, value in found.items():
        if isinstance(results, ShardedResults) and key[2] in shards:
            results.kept[key] = value
        elif ranks.rank == 0:
            results.partial[key] = value


def _entries(
    extensions: Sequence[Extension],
    shards_of_ranks: Iterable[SavedShards],
    shards: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    device: torch.device | str,
) -> dict[Key, Any]:
    """Return the entries of results that this rank holds: for its shard of a parameter, or for all of it."""
    found: dict[Key, Any] = {}
    missing: dict[Key, int] = {}
    for position, index, name, begin, value in itertools.chain.from_iterable(shards_of_ranks):
        key, own = (position, index, name), shards.get(name)
        shape = shapes.get(name, torch.Size()) if own is None else own_part(own).shape
        is_row = position < len(extensions) and index < len(extensions[position].rows)
        is_part = all(isinstance(each, Tensor) and each.dim() == len(shape) for each in _tensors(value))
        if not (is_row and is_part and len(begin) == len(shape)):
            raise _unreadable(name, "one of them is not part of a tensor")
        if key not in found:
            found[key] = _each(value, methodcaller("new_empty", shape, device=device))
            missing[key] = shape.numel()
        start = [0] * len(shape) if own is None else _begin(own)
        for into, part in zip(_tensors(found[key]), _tensors(value), strict=True):
            copied = _copy_common(into, start, part, begin)
        missing[key] -= copied
    for key, number in missing.items():
        if number > 0:
            raise _unreadable(key[2], f"{number} of its entries are in no file")
    return found


def _copy_common(into: Tensor, start: Sequence[int], part: Tensor, begin: Sequence[int]) -> int:
    """Copy the entries that two parts of one tensor share; return their number.

    Args:
        into: The part to fill.
        start: The index in the whole tensor at which it begins.
        part: The other part.
        begin: The index at which that begins.
    """
    low = [max(pair) for pair in zip(start, begin, strict=True)]
    ends = zip(start, into.shape, begin, part.shape, strict=True)
    high = [max(least, min(a + n, b + m)) for least, (a, n, b, m) in zip(low, ends, strict=True)]

    def region(origin: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))

    into[region(start)].copy_(part[region(begin)])
    return into[region(start)].numel()


def _begin(shard: Tensor) -> list[int]:
    """Return the index in the whole tensor at which this rank's part of a ``DTensor`` begins."""
    return [*shard.__create_chunk_list__()[0].offsets]  # type: ignore[attr-defined]  # a DTensor


def _unreadable(name: str, why: str) -> PackpropError:
    return PackpropError(
        ASKED,
        f"the shards of parameter {name!r}",
        f"they cannot be read: {why}",
        "put back a copy of the folder of the checkpoint, or remove it to begin again",
    )


def _tensors(value: Any) -> list[Any]:
    """Return the tensors of a result that have the shape of a parameter."""
    return [value.mean, value.deviation] if isinstance(value, Moments) else [value]


def _each(value: Any, change: Any, shard: Tensor | None = None) -> Any:
    """Return a result with its tensors changed; with ``shard``, replicate a number of moments on all ranks."""
    if not isinstance(value, Moments):
        return change(value)
    number = value.samples
    if shard is not None and isinstance(number, Tensor):
        number = replicated_like(number, shard)
    return Moments(number, change(value.mean), change(value.deviation))
