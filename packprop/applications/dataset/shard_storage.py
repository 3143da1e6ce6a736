"""Storage of shards for ``torch.distributed.checkpoint``: safetensors, and JSON.

PyTorch plans who writes which part, and who reads it. Its own files would be pickles, which can run any code
when they are read. So files and their description are packprop's own.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from packprop.applications.dataset.folder import apart
from packprop.store.plain import dtype_of, name_of
from packprop.store.schema import Size, Unfit, fitted, parsed

DESCRIPTION = "shards.json"
"""The file that describes the others."""

FILE = re.compile(r"__\d+_0\.safetensors")
"""The file of one rank."""


@dataclass(frozen=True)
class Part:
    """One part of a tensor.

    Args:
        offsets: The index at which it begins in the tensor.
        sizes: Its shape.
        file: Its file.
        key: Its name there.
    """

    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]
    file: str
    key: str


@dataclass(frozen=True)
class Divided:
    """A tensor that ranks have written in parts.

    Args:
        dtype: The name of its precision.
        shape: Its shape as a whole.
        parts: All parts of it.
    """

    dtype: str
    shape: tuple[Size, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        """Refuse parts that do not make up the whole.

        Raises:
            ValueError: If they lie outside of it, or have other entries together, or are in no file of a rank.
        """
        if dtype_of(self.dtype) is None:
            raise Unfit(f"unknown precision {self.dtype!r}")
        for part in self.parts:
            axes = len(part.offsets), len(part.sizes)
            ends = [offset + size for offset, size in zip(part.offsets, part.sizes, strict=False)]
            if axes != (len(self.shape),) * 2 or any(map(int.__gt__, ends, self.shape)):
                raise Unfit(f"a part {list(part.sizes)} at {list(part.offsets)} is none of {list(self.shape)}")
            if not FILE.fullmatch(part.file):
                raise Unfit(f"{part.file!r} is no file of shards")
        if sum(math.prod(part.sizes) for part in self.parts) != math.prod(self.shape):
            raise Unfit(f"there are not all parts of {list(self.shape)}")

    @property
    def precision(self) -> torch.dtype:
        """Precision of the entries."""
        dtype = dtype_of(self.dtype)
        assert dtype is not None
        return dtype


def divided_tensors(folder: Path) -> dict[str, Divided]:
    """Read the description of a folder, by name.

    Raises:
        OSError: If it cannot be read.
        ValueError: If the description is none, or says more than the files can hold.
    """
    found: dict[str, Divided] = fitted(dict[str, Divided], parsed((folder / DESCRIPTION).read_bytes()))
    needed: dict[str, int] = {}
    for tensor in found.values():
        for part in tensor.parts:
            size = math.prod(part.sizes) * tensor.precision.itemsize
            needed[part.file] = needed.get(part.file, 0) + size
    for file, size in needed.items():
        if (folder / file).stat().st_size < size:
            raise Unfit(f"{file} is too short for what is said to be in it")
    return found


class Writer(StorageWriter):
    """Writes the parts of each rank to one file, and a description of all to another.

    Args:
        folder: The folder; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Give each rank a file."""
        return [replace(plan, storage_data=f"__{rank}_0.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        tensors = {str(index): planner.resolve_data(item) for index, item in enumerate(plan.items)}
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        if tensors:
            path = self._folder / plan.storage_data
            safetensors.torch.save_file(apart(tensors), path)
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        results = [
            WriteResult(item.index, tensor.nbytes, (plan.storage_data, key))
            for item, (key, tensor) in zip(plan.items, tensors.items(), strict=True)
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the description."""
        places = {result.index: result.storage_data for each in results for result in each}
        found = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)  # nothing else is given to it
            parts = [
                Part(tuple(chunk.offsets), tuple(chunk.sizes), *places[MetadataIndex(name, chunk.offsets)])
                for chunk in tensor.chunks
            ]
            found[name] = Divided(name_of(tensor.properties.dtype), tuple(tensor.size), tuple(parts))
        with open(self._folder / DESCRIPTION, "w", encoding="utf-8") as file:
            json.dump({name: asdict(each) for name, each in found.items()}, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any folder."""
        return True


class Reader(StorageReader):
    """Reads the files of ``Writer``.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = divided_tensors(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description, as PyTorch has it."""
        found = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=tensor.precision),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                    for part in tensor.parts
                ],
            )
            for name, tensor in self._known.items()
        }
        return Metadata(dict(found))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: each rank has read the description itself."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Accept any plan."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Accept any plans."""
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read this rank's share of each part."""
        parts = {(name, part.offsets): part for name, each in self._known.items() for part in each.parts}
        for item in plan.items:
            part = parts[item.storage_index.fqn, tuple(item.storage_index.offset)]
            region = tuple(
                slice(start, start + length)
                for start, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            with safetensors.safe_open(self._folder / part.file, framework="pt") as file:
                stored = file.get_slice(part.key)
                if tuple(stored.get_shape()) != part.sizes:
                    raise Unfit(f"{part.file} holds {stored.get_shape()}, not {list(part.sizes)}")
                tensor = stored[region]
            target = planner.resolve_tensor(item).detach()
            if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
                raise Unfit(f"{part.file} holds {tensor.dtype}, not {target.dtype}")
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any folder."""
        return True


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
