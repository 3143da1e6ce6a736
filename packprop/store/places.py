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
            f"it is not empty: {others[0]!r} is there, which belongs to no store",
            "give an empty folder, or one that does not exist yet",
        )


@contextlib.contextmanager
def writable(asked: str, folder: Path, shard: Path) -> Iterator[None]:
    """Explain errors of the code inside, which begins a store in a folder and locks the folder of a shard.

    Raises:
        BadInput: If the system does not let it.
        PackpropError: If another writer has the shard.
    """
    try:
        yield
    except LockedElsewhere as error:
        raise PackpropError(
            asked,
            f"folder {str(shard)!r}",
            f"it is open for writing already, by {error}",
            "close that writer, or write to another folder; reading is possible all the while",
        ) from error
    except OSError as error:
        file = "" if error.filename is None else f" ({str(error.filename)!r})"
        raise BadInput(
            asked,
            f"folder {str(folder)!r}",
            f"nothing can be written there: {error.strerror or error}{file}",
            "give a folder that you may write to, on a disk that has room",
        ) from error


def file_name(quantity: str, parameter: str, used: set[str]) -> str:
    """Return a path for an array, in characters of every file system; ``used`` ones are noted in lower case."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", parameter)[:150] or "values"
    folder = re.sub(r"[^A-Za-z0-9._-]|^\.+$", "_", quantity)[:100]
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
