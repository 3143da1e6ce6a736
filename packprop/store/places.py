"""Checks of the place of a store, and the names of its files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from packprop.errors import BadInput, PackpropError
from packprop.store.files import LockedElsewhere
from packprop.store.marks import Marks


def rank_of_process() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def require_place(asked: str, folder: Path) -> None:
    """Refuse a folder that holds anything but shards.

    Raises:
        BadInput: With the first other file.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(asked, f"path {str(folder)!r}", "it is a file", "give a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if others := [name for name in names if not re.fullmatch(r"shard-\d{5}", name)]:
        raise BadInput(
            asked,
            f"folder {str(folder)!r}",
            f"it is not empty: it contains {others[0]!r}, which does not belong to a store",
            "give an empty folder, or one that does not exist yet",
        )


@contextlib.contextmanager
def writable(asked: str, folder: Path, shard: Path) -> Iterator[None]:
    """Explain errors of the code inside, which begins a store in a folder and locks the folder of a shard.

    Raises:
        BadInput: If the system does not allow it.
        PackpropError: If another writer has the shard.
    """
    try:
        yield
    except LockedElsewhere as error:
        raise PackpropError(
            asked,
            f"folder {str(shard)!r}",
            f"{error} has already opened it for writing",
            "close that writer, or write to another folder; you can read the store at any time",
        ) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({str(error.filename)!r})"
        raise BadInput(
            asked,
            f"folder {str(folder)!r}",
            f"packprop cannot write there: {error.strerror or error}{file}",
            "give a folder that you may write to, on a disk with enough space",
        ) from error


def closed(folder: Path) -> PackpropError:
    """Return the error for a writer that is closed."""
    return PackpropError(
        f"Values were to be written to the store {str(folder)!r}.",
        "the writer",
        "it is closed",
        "write inside `with StoreWriter(...)`, or open it again with resume=True",
    )


@contextlib.contextmanager
def taken_by_disk(folder: Path, shard: Path, marks: Marks) -> Iterator[None]:
    """Explain errors of the code inside, which writes the files of a shard.

    Raises:
        PackpropError: If the disk does not take them.
    """
    try:
        yield
    except OSError as error:
        raise PackpropError(
            f"Values were to be written to the store {str(folder)!r}.",
            f"file {error.filename or str(shard)!r}",
            f"writing failed: {error.strerror or error}",
            f"free some space and continue: the first {marks.last.samples} samples are safe, and resume=True "
            "continues after them",
        ) from error


def require_held(asked: str, place: Path, marks: Marks, held: int, samples: int, checksum: int | None) -> None:
    """Refuse a shard that does not hold the first samples that a checkpoint was made with.

    Args:
        asked: The call of the user, for messages.
        place: The folder of the shard.
        marks: Its marks.
        held: Its samples, including those that have no mark yet.
        samples: The samples of the checkpoint.
        checksum: The checksum of the marks at the checkpoint, if it is known.

    Raises:
        BadInput: If it holds fewer, never had the checksum, or lost some of these rows since.
    """
    if samples > held:
        raise BadInput(
            asked,
            f"folder {str(place)!r}",
            f"it holds {held} samples, and the checkpoint was made after {samples}",
            "resume from a checkpoint that is as old as the store, or start both again",
        )
    if checksum is not None and held and not marks.keep(samples, checksum):
        raise BadInput(
            asked,
            f"folder {str(place)!r}",
            "the checkpoint was made with another store, or its rows were replaced since; nothing has changed",
            "give the store that the checkpoint was made with, or start both again in new folders",
        )


def file_name(quantity: str, parameter: str, used: set[str]) -> str:
    """Return a path for an array that every file system allows, and add it to ``used`` in lower case."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", parameter)[:150] or "values"
    folder = re.sub(r"[^A-Za-z0-9._-]|^\.+$", "_", quantity)[:100] or "values"
    name = f"{folder}/{plain}.npy"
    number = 2
    while name.lower() in used:
        name, number = f"{folder}/{plain}-{number}.npy", number + 1
    used.add(name.lower())
    return name


def short(value: Any) -> str:
    """Describe a value for messages, in a line or two."""
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}..."
