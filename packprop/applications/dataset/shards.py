"""Results of the batches so far for sharded parameters: each rank keeps the parts of its own shards.

# NOTE [Sums of shards]
A pass brings results of whole parameters, for this rank's samples. When it is over, packprop merges those of
all ranks, a few parameters at a time, and each rank adds the part of its shard to its kept sum over all samples
so far. It also writes these sums to a checkpoint (NOTE [Files of shards]). That is for results with an entry
for each entry of a parameter. Every rank keeps others, such as Kronecker factors and rows of samples, for its
own samples, and packprop merges them at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.shard_files import has_saved_shards, read_back
from packprop.applications.dataset.state import Key, MergedResults
from packprop.applications.dataset.sums import begun, merged_with
from packprop.engine.algebra import Moments
from packprop.engine.tensors import is_distributed, named_parameters, part_like, replicated_like, whole_from


@dataclass
class ShardedResults(MergedResults):
    """Merged partial results of the batches so far, those of the shape of parameters as shards.

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
            self._keep(key, self._part(key, value))

    def since(self, batches: int) -> MergedResults:
        """Work as for any results; results kept as parts become a ``DTensor``, placed like the parameter."""
        return self._with_kept(super().since(batches))

    def of_all(self, ranks: Ranks) -> MergedResults:
        """Work as for any results; results kept as parts become a ``DTensor``, placed like the parameter."""
        return self._with_kept(super().of_all(ranks))

    def _with_kept(self, found: MergedResults) -> MergedResults:
        for key, value in self.kept.items():
            shard = self.shards[key[2]]
            found.partial[key] = _each(value, lambda part, shard=shard: whole_from(part, shard), shard)
        return found

    def restore(self, saved: Mapping[str, Any], pieces: Iterable[tuple[Key, Tensor]]) -> None:
        """Restore the values of ``saved``; results of whole parameters wait for the end of a pass."""
        super().restore(saved, pieces)
        for key in [key for key, value in self.partial.items() if self._is_of_shard(key, value)]:
            self.arrived[key] = self.partial.pop(key)

    def _merge_row(self, key: Key, partial: Any) -> None:
        if self._is_of_shard(key, partial):
            before = self.arrived.get(key)
            self.arrived[key] = partial if before is None else self.monoid_of(key).merge(before, partial)
        else:
            super()._merge_row(key, partial)

    def _is_of_shard(self, key: Key, value: Any) -> bool:
        """Tell whether a result has an entry for each entry of a sharded parameter, and stands alone."""
        rows, shard = self.extensions[key[0]].rows, self.shards.get(key[2])
        if shard is None or len(rows) != 1 or rows[0].whole or not rows[0].sums:
            return False
        tensor = value.mean if isinstance(value, Moments) else value
        return isinstance(tensor, Tensor) and tensor.shape == shard.shape

    def _part(self, key: Key, value: Any) -> Any:
        shard = self.shards[key[2]]
        return _each(value, lambda whole: part_like(whole, shard))

    def _keep(self, key: Key, part: Any) -> None:
        monoid, before = self.monoid_of(key), self.kept.get(key)
        self.kept[key] = begun(monoid, part) if before is None else merged_with(monoid, before, part)


def results_of(model: nn.Module, extensions: Any, sharded: bool) -> MergedResults:
    """Make the object that merges results of a model."""
    if not sharded:
        return MergedResults(extensions)
    shards = {name: each.detach() for name, each in named_parameters(model) if is_distributed(each)}
    return ShardedResults(extensions, shards=shards)


def take_up_shards(results: MergedResults, state: Mapping[str, Any], device: Any, ranks: Ranks) -> None:
    """Restore the shards of ranks, and divide results that they have written as a whole; all at once.

    Args:
        results: The results to continue.
        state: The contents of the checkpoint.
        device: The device of results.
        ranks: The ranks of the run.
    """
    shards = results.shards if isinstance(results, ShardedResults) else {}
    saved = {(position, index, name): value for position, index, name, value in state["results"]["partial"]}
    saved = {key: value for key, value in saved.items() if has_saved_shards(value)}
    found = read_back(saved, Path(state["shards"]), shards, device, ranks) if saved else {}
    for key, value in found.items():
        results.partial.pop(key, None)
        if isinstance(results, ShardedResults) and key[2] in shards:
            results.kept[key] = value
        elif ranks.rank == 0:
            results.partial[key] = value
    if isinstance(results, ShardedResults):
        results.end_pass(ranks)


def _each(value: Any, change: Any, shard: Tensor | None = None) -> Any:
    """Return a result with its tensors changed; for moments the number of rows is the same on all ranks."""
    if not isinstance(value, Moments):
        return change(value)
    number = value.samples
    if shard is not None and isinstance(number, Tensor):
        number = replicated_like(number, shard)
    return Moments(number, change(value.mean), change(value.deviation))
