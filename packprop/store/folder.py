"""What a store's folder holds beside its arrays: a header for each shard, and marks of finished chunks."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from packprop.errors import BadInput, PackpropError
from packprop.store.plain import DESCRIPTIONS, dtype_of, name_of

FORMAT = "packprop store"
"""What headers say they are."""

VERSION = 1
"""The version of the format; others are refused."""

HEADER, CHUNKS, LOCK, SAMPLES = "header.json", "chunks.jsonl", "lock", "samples.npy"
"""The files of a shard: what it holds, finished chunks, who writes, the identifiers of samples."""


@dataclass(frozen=True)
class ArrayHeader:
    """What one array holds.

    Args:
        quantity: Attribute of the extension, or the name that the values were written under.
        parameter: Name of the parameter; ``""`` for one value for all of them together.
        file: Path of the ``.npy`` file inside the shard.
        shape: Shape of a row.
        dtype: Precision, as ``"float32"``.
        degree: The power of the loss that values grow with.
        projection: What gradients were projected by: kind, dimension and seed; ``None`` if by nothing.
    """

    quantity: str
    parameter: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    degree: float = 0.0
    projection: dict[str, Any] | None = None

    @property
    def precision(self) -> torch.dtype:
        """Precision of the entries."""
        dtype = dtype_of(self.dtype)
        assert dtype is not None
        return dtype

    @property
    def numpy_dtype(self) -> str:
        """Precision of the entries, as the file says it."""
        return DESCRIPTIONS[self.precision]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.precision.itemsize


@dataclass(frozen=True)
class ShardHeader:
    """What one shard is, and the arrays that it holds.

    Args:
        shard: Number of the shard.
        shards: How many there are.
        extensions: Names, options and attributes of the extensions.
        model: Parameters and their shapes.
        notes: What the writer was told to keep: the shards of a store agree in it.
        written_by: The version of packprop.
        arrays: The arrays so far.
    """

    shard: int
    shards: int
    extensions: list[dict[str, Any]]
    model: dict[str, Any]
    notes: dict[str, Any]
    written_by: str
    arrays: tuple[ArrayHeader, ...] = ()

    def with_arrays(self, added: Sequence[ArrayHeader]) -> ShardHeader:
        """The same header with more arrays."""
        return replace(self, arrays=(*self.arrays, *added))

    def difference(self, other: ShardHeader) -> str:
        """What two headers that should be of one store differ in; ``""`` if in nothing."""
        for name in ("shards", "extensions", "model", "notes"):
            if getattr(self, name) != getattr(other, name):
                return name
        return ""

    def save(self, folder: Path) -> None:
        """Write the header, in one step: whoever reads finds all of the old one or of this one."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)
        write_whole(folder / HEADER, text)

    @classmethod
    def load(cls, folder: Path, asked: str) -> ShardHeader:
        """Read the header of a shard.

        Raises:
            BadInput: For a header that is not one, or of another version.
        """
        path = folder / HEADER
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ValueError("it is no header of a packprop store")
            version = found.pop("version")
            if version != VERSION:
                raise BadInput(
                    asked,
                    f"store {str(folder.parent)!r}",
                    f"it was written in version {version} of the format, and this is version {VERSION}",
                    f"read it with packprop {found.get('written_by', 'of that version')}; its .npy files can "
                    "be read by numpy",
                )
            arrays = [
                ArrayHeader(**{**each, "shape": tuple(map(int, each["shape"]))}) for each in found["arrays"]
            ]
            header = cls(**{**found, "arrays": tuple(arrays)})
            unknown = [each.dtype for each in arrays if dtype_of(each.dtype) is None]
            if unknown:
                raise ValueError(f"unknown precision {unknown[0]!r}")
            return header
        except BadInput:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(
                asked,
                f"file {str(path)!r}",
                f"it is no header that can be read ({type(error).__name__}: {error})",
                "take the file from a copy of the store, or write the store again; numpy reads the .npy files "
                "beside it",
            ) from error


@dataclass(frozen=True)
class Mark:
    """What was safe when a chunk was finished.

    Args:
        samples: Samples up to the end of the chunk.
        terms: What the losses of their batches were divided by, added up.
        finished: Whether the writer was closed after it, with nothing left to write.
    """

    samples: int = 0
    terms: float = 0.0
    finished: bool = False


def marks(folder: Path, asked: str) -> list[Mark]:
    """The marks of a shard; a last line that was cut off is none.

    Raises:
        BadInput: For a line that is no mark.
    """
    path = folder / CHUNKS
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            mark = Mark(**json.loads(line))
            if type(mark.samples) is not int or mark.samples < 0:
                raise ValueError(f"{mark.samples!r} samples")
        except (ValueError, TypeError) as error:
            raise BadInput(
                asked,
                f"line {number} of file {str(path)!r}",
                f"it does not say what was finished ({type(error).__name__}: {error})",
                "take the file from a copy of the store, or write the store again; numpy reads the .npy files "
                "beside it",
            ) from error
        found.append(mark)
    return found


def add_mark(folder: Path, mark: Mark) -> None:
    """Append a mark, and wait until it is on the disk."""
    file = os.open(folder / CHUNKS, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = os.pread(file, os.fstat(file).st_size, 0).rfind(b"\n") + 1
        os.ftruncate(file, end)  # a line that was cut off
        line = json.dumps(asdict(mark)).encode() + b"\n"
        os.pwrite(file, line, end)
        os.fsync(file)
    finally:
        os.close(file)


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def folder_of_shard(folder: Path, shard: int) -> Path:
    """Where one shard lies."""
    return folder / f"shard-{shard:05d}"


def is_begun(place: Path) -> bool:
    """Whether a shard has more than a writer that has just come."""
    return bool({path.name for path in place.iterdir()} - {LOCK, f"{HEADER}.draft"})


class WriterLock:
    """Keeps a second writer out of a shard, until this one is closed or its process is gone.

    Args:
        folder: Folder of the shard.
        asked: What the user asked for, for messages.

    Raises:
        PackpropError: If there is another writer.
    """

    def __init__(self, folder: Path, asked: str) -> None:
        self._file = (folder / LOCK).open("a+b", buffering=0)
        if importlib.util.find_spec("fcntl") is None:  # no POSIX
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = (folder / LOCK).read_text(errors="replace") or "another process"
            self._file.close()
            raise PackpropError(
                asked,
                f"folder {str(folder)!r}",
                f"it is open for writing already, by {holder}",
                "close that writer, or write to another folder; reading is possible all the while",
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}".encode())

    def release(self) -> None:
        """Let others write."""
        self._file.close()


def described(dtype: torch.dtype) -> str:
    """The name of a precision.

    Raises:
        BadInput: For one that cannot be stored.
    """
    name = name_of(dtype)
    if dtype_of(name) is None:
        raise BadInput(
            "Values of single samples were to be stored.",
            f"precision {name}",
            "there is no array of it that others could read",
            "give the writer dtype=torch.float16, torch.bfloat16 or torch.float32",
        )
    return name
