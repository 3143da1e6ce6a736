"""Headers in a store's folder, one for each shard."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from packprop.engine.algebra import Projection
from packprop.errors import BadInput
from packprop.store.files import LOCK, part_of, written_whole
from packprop.store.plain import DESCRIPTIONS, dtype_of, name_of
from packprop.store.schema import LARGEST, Size, Unfit, checksum_of, fitted, parsed

ParameterFacts = tuple[list[Size], str, bool]
"""The shape and the precision of a parameter, and whether it is trained."""

FORMAT = "packprop store"
"""The kind of file that headers claim to be."""

VERSION = 2
"""The version of the format; packprop refuses others, such as 1, which had no checksums."""

HEADER, SAMPLES = "header.json", "samples.npy"
"""The files of a shard beside marks and arrays: the header, the identifiers of samples."""

MOST_SHARDS = 10**5
"""The most shards: their names have five digits."""

FILE = re.compile(r"(?!\.{1,2}/)[A-Za-z0-9._-]+/[A-Za-z0-9._-]+\.npy")
"""Names of files of arrays: a folder, and a name in it."""

MOST_AXES = 32
"""The most axes of an array in numpy and other programs; one of them is that of the samples."""


@dataclass(frozen=True)
class ArrayHeader:
    """The description of one array.

    Args:
        quantity: Attribute of the extension, or the name that the values were written under.
        parameter: Name of the parameter; ``""`` for one value for all of them together.
        file: Path of the ``.npy`` file inside the shard.
        shape: Shape of a row.
        dtype: Precision, as ``"float32"``.
        degree: The power of the loss that values grow with.
        projection: The projection of gradients: kind, dimension and seed; ``None`` if there is none.
    """

    quantity: str
    parameter: str
    file: str
    shape: tuple[Size, ...]
    dtype: str
    degree: float = 0.0
    projection: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse descriptions that no writer has written.

        Raises:
            ValueError: For a file outside the folder, an unknown precision, and rows that no file can hold.
        """
        if self.file != SAMPLES and not FILE.fullmatch(self.file):
            raise Unfit(f"file {self.file!r} is not the path of an array in this folder")
        sizes = math.prod(max(1, size) for size in self.shape)
        if len(self.shape) >= MOST_AXES or sizes * self.precision.itemsize >= LARGEST:
            raise Unfit(f"rows of shape {list(self.shape)} have too many axes or entries for a file")
        if self.projection is not None:
            dimension = fitted(Projection, self.projection, "projection").dimension
            if self.shape != (dimension,):
                raise Unfit(f"rows of shape {list(self.shape)} are not projections with {dimension} entries")

    @property
    def precision(self) -> torch.dtype:
        """Precision of the entries."""
        return dtype_of(self.dtype)

    @property
    def said(self) -> str:
        """The name of the array in messages."""
        return f"{self.quantity!r}" + (f" of {self.parameter!r}" if self.parameter else "")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.precision.itemsize


@dataclass(frozen=True)
class ShardHeader:
    """The description of one shard, and of its arrays.

    Args:
        shard: Number of the shard.
        shards: The number of shards.
        extensions: Names, options and attributes of the extensions.
        model: Parameters and their shapes.
        notes: The notes that the writer got; they are the same in all shards of a store.
        written_by: The version of packprop.
        arrays: The arrays so far.
        token: A random number that tells the shard from others: the checksums of its marks begin with it.
    """

    shard: Size
    shards: Size
    extensions: list[dict[str, Any]]
    model: dict[str, ParameterFacts]
    notes: dict[str, Any]
    written_by: str
    arrays: tuple[ArrayHeader, ...]
    token: Size = 0

    def __post_init__(self) -> None:
        """Refuse arrays if two of them are the same.

        Raises:
            ValueError: With their name.
        """
        seen: set[Any] = set()
        for each in self.arrays:
            for name in (each.file.lower(), (each.quantity, each.parameter)):
                if name in seen:
                    raise Unfit(f"array {name!r} occurs twice")
                seen.add(name)

    def difference(self, other: ShardHeader) -> str:
        """Name the difference of two headers that should belong to one store; ``""`` if there is none."""
        for name in ("shards", "extensions", "model", "notes"):
            if getattr(self, name) != getattr(other, name):
                return name
        return ""

    def save(self, folder: Path) -> None:
        """Write the header, in one step: readers find the whole old one, or the whole new one."""
        content = json.loads(json.dumps({"version": VERSION, **asdict(self)}))
        text = json.dumps({"format": FORMAT, "checksum": checksum_of(content), **content}, indent=1)
        with written_whole(folder / HEADER) as part:
            part.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, asked: str) -> ShardHeader:
        """Read the header of a shard.

        Raises:
            BadInput: For a file that is not a header, or has another version.
        """
        path = folder / HEADER
        try:
            found = parsed(path.read_bytes())
            if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
                raise Unfit("it is not the header of a packprop store")
            version, checksum = found.pop("version", None), found.pop("checksum", None)
            if version != VERSION:
                raise BadInput(
                    asked,
                    f"store {str(folder.parent)!r}",
                    f"it has version {version} of the format, and this packprop reads version {VERSION}",
                    f"read it with packprop {found.get('written_by', 'of that version')}; numpy can read its "
                    ".npy files",
                )
            header: ShardHeader = fitted(cls, found)
            if checksum != checksum_of({"version": version, **found}):
                raise Unfit("its checksum does not match its content")
            if folder != folder_of_shard(folder.parent, header.shard):
                raise Unfit(f"it is the header of shard {header.shard}")
            return header
        except BadInput:
            raise
        except (OSError, ValueError) as error:
            raise BadInput(
                asked,
                f"file {str(path)!r}",
                f"packprop cannot read this header ({error})",
                "take the file from a copy of the store, or write the store again; numpy reads the .npy files "
                "beside it",
            ) from error


def folder_of_shard(folder: Path, shard: int) -> Path:
    """Return the folder of one shard."""
    return folder / f"shard-{shard:05d}"


def is_begun(place: Path) -> bool:
    """Tell whether a shard has other files than those that a writer makes before its header."""
    return bool({path.name for path in place.iterdir()} - {LOCK, part_of(place / HEADER).name})


def described(dtype: torch.dtype) -> str:
    """Return the name of a precision.

    Raises:
        BadInput: For one that cannot be stored.
    """
    if dtype not in DESCRIPTIONS:
        raise BadInput(
            "Values of single samples were to be stored.",
            f"precision {name_of(dtype)}",
            "other programs could not read a .npy file of this precision",
            "give the writer dtype=torch.float16, torch.bfloat16 or torch.float32",
        )
    return name_of(dtype)
