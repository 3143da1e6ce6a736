"""Sums of sharded parameters in a checkpoint: each rank writes and reads its own shards.

# NOTE [Files of shards]
``torch.distributed.checkpoint`` plans the writers, into a folder ``shards-<number>`` of the checkpoint: a file
of safetensors for each rank, and a description in JSON (``shard_storage.py``); no pickles. No rank puts a whole
tensor together for that. Any number of ranks may read the shards, sharded in another way, or not at all.
packprop writes the folder under another name and renames it when all ranks are done; each rank then computes
the checksums of some of its files. The JSON file, which comes last, names all of them. Before any rank reads,
the first one has compared them with their checksums.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from packprop.applications.dataset.folder import described, flush_folder, part_of, remove
from packprop.applications.dataset.ranks import OtherRankFailed, Ranks
from packprop.applications.dataset.values import SavedShards
from packprop.engine.tensors import is_distributed, is_replicated, map_instances, map_tensors, own_part
from packprop.errors import PackpropError
from packprop.store.schema import Unfit

Key = TypeVar("Key", bound="tuple[Any, ...]")


class WrittenShards(NamedTuple):
    """The outcome of an attempt to write shards.

    Args:
        files: Name, size and checksum of each file; those of all ranks.
        failure: The reason why they could not be written; empty if they were.
    """

    files: Sequence[dict[str, Any]] = ()
    failure: str = ""


def taken_out(partial: dict[Key, Any]) -> dict[str, Tensor]:
    """Return each ``DTensor`` that ranks divide, by a name that takes its place in ``partial``."""
    found: dict[str, Tensor] = {}

    def named(key: Key, tensor: Tensor) -> Any:
        if not is_distributed(tensor):
            return tensor
        if is_replicated(tensor):
            return own_part(tensor)
        name = "/".join(map(str, (*key, len(found))))
        found[name] = tensor
        return SavedShards(name, [*tensor.shape], str(tensor.dtype).removeprefix("torch."))

    for key, value in partial.items():
        partial[key] = map_tensors(functools.partial(named, key), value)
    return found


def has_saved_shards(value: Any) -> bool:
    """Tell whether ``taken_out`` has named something of a value."""
    found: list[SavedShards] = []
    map_instances(SavedShards, found.append, value)
    return bool(found)


def read_back(
    values: Mapping[Key, Any],
    folder: Path,
    shards: Mapping[str, Tensor],
    device: torch.device | str,
    ranks: Ranks,
) -> dict[Key, Any]:
    """Fill in the values that ``taken_out`` has named: this rank's part if sharded, else the whole tensor.

    All ranks must do so at once.

    Args:
        values: Values by extension, row and parameter name.
        folder: The folder of the shards.
        shards: The parameters that are sharded now, by name.
        device: The device for whole tensors.
        ranks: The ranks of the run.

    Raises:
        PackpropError: On every rank, if one of them cannot read its part.
    """
    into: dict[str, Tensor] = {}

    def make(known: Mapping[str, Any], shard: Tensor | None, saved: SavedShards) -> None:
        tensor = known.get(saved.name)
        if tensor is None or [*tensor.shape] != [*saved.shape] or tensor.dtype != saved.dtype:
            raise Unfit(f"{saved.name!r} is not there, or of another shape or precision")
        dtype = tensor.precision
        if shard is None:
            into[saved.name] = torch.empty(saved.shape, dtype=dtype, device=device)
        else:
            into[saved.name] = torch.empty_like(shard, dtype=dtype)

    def make_all() -> None:
        try:
            known = _storage().divided_tensors(folder)
            for key, value in values.items():
                map_instances(SavedShards, functools.partial(make, known, shards.get(key[-1])), value)
        except (OSError, ValueError) as error:
            raise _unreadable(folder, str(error)) from error

    ranks.attempt(make_all)
    failure = _together(ranks, lambda: _load(into, folder, ranks))
    if failure:
        raise _unreadable(folder, failure)
    return {
        key: map_instances(SavedShards, lambda saved: own_part(into[saved.name]), value)
        for key, value in values.items()
    }


def _unreadable(folder: Path, why: str) -> PackpropError:
    return PackpropError(
        "compute(..., checkpoint=...) was called.",
        f"the shards in {str(folder)!r}",
        f"they cannot be read: {why}",
        "let every rank see the folder of the checkpoint, with all of its files; or remove it to begin again",
    )


def written_shards(partial: dict[Key, Any], folder: Path | None, ranks: Ranks) -> WrittenShards:
    """Write everything that ``taken_out`` takes out of partial results; all ranks must do so at once.

    Args:
        partial: Merged results; they are without shards afterwards.
        folder: The folder, on the first rank; ``None`` on the others.
        ranks: The ranks of the run.
    """
    shards = taken_out(partial)
    if not shards:
        return WrittenShards()
    if folder is not None:
        with contextlib.suppress(OSError):  # a later write says more
            remove(part_of(folder))  # of a run that was killed
    place: Path = ranks.each(folder)[0]  # type: ignore[assignment]  # the first rank has it
    written = _written(shards, part_of(place), ranks)
    if ranks.rank == 0:
        try:
            if not written.failure:
                remove(place)  # of a checkpoint that could not be read
                os.replace(part_of(place), place)
                flush_folder(place.parent)
            remove(part_of(place))
        except OSError as error:
            return WrittenShards(failure=str(error))
    return written


def _written(shards: dict[str, Tensor], folder: Path, ranks: Ranks) -> WrittenShards:
    """Write this rank's parts of ``shards`` beside those of the others, and check some of the files."""

    def files() -> list[dict[str, Any]]:
        flush_folder(folder)
        names = sorted(os.listdir(folder))
        return [described(folder / name) for name in names[ranks.rank :: ranks.world]]

    options = {"storage_writer": _storage().Writer(folder), "process_group": ranks.group}
    failure = _together(ranks, lambda: _library().save(shards, **options))
    if failure:
        return WrittenShards(failure=failure)
    try:
        told = ranks.each(ranks.attempt(files))
    except OtherRankFailed as error:
        return WrittenShards(failure=f"{error.where}: {error.why}")
    except OSError as error:
        return WrittenShards(failure=str(error))
    return WrittenShards(sorted((file for each in told for file in each), key=itemgetter("name")))


def _load(into: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    library = _library()
    options: dict[str, Any] = {"storage_reader": _storage().Reader(folder)}
    if ranks.world > 1:
        options["process_group"] = ranks.group
    elif "no_dist" in inspect.signature(library.load).parameters:  # older ones check for a group
        options["no_dist"] = True
    with warnings.catch_warnings():  # one process alone is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        library.load(into, **options)


def _library() -> Any:
    """Import ``torch.distributed.checkpoint`` when it is needed."""
    from torch.distributed import checkpoint

    return checkpoint


def _storage() -> Any:
    """Import the storage of shards when it is needed."""
    from packprop.applications.dataset import shard_storage

    return shard_storage


def _together(ranks: Ranks, work: Callable[[], object]) -> str:
    """Return why some rank failed at ``work``, in which all ranks exchange data; empty if none did."""
    try:
        ranks.together(work)
    except _library().CheckpointException as error:
        failures = {rank: each for rank, (each, _) in error.failures.items()}
        for rank, each in failures.items():
            if not isinstance(each, Exception):
                raise (each if rank == ranks.rank else OtherRankFailed.of(rank, type(each).__name__)) from None
        rank, first = next(iter(failures.items()))
        return f"rank {rank}: {type(first).__name__}: {first}"
    return ""
