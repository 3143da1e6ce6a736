"""Files that are written as a whole or not at all, and locks of folders."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows: two writers in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]  # looked at before it is used

LOCK = "lock"
"""The name of a folder's lock."""

_OPEN: weakref.WeakSet[Lock] = weakref.WeakSet()
"""Locks of this process. A forked process closes them: it would share them, and it may outlive this one."""


class LockedElsewhere(Exception):
    """Raised if something else writes to the folder, with the holder's name."""


class Lock:
    """Keeps a second writer out of a folder, until you close it or its process is gone.

    Args:
        folder: The folder.

    Raises:
        LockedElsewhere: If there is another writer.
        OSError: If the system cannot lock the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / LOCK).open("a+b", buffering=0)
        _OPEN.add(self)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise LockedElsewhere((folder / LOCK).read_text(errors="replace") or "another process") from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}".encode())

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def _release_all() -> None:
    for lock in [*_OPEN]:
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)


def part_of(path: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return path.with_name(f"{path.name}.part")


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to; at the end, wait for the disk, and rename the file in one step.

    A reader finds the whole old file, or the whole new one.
    """
    part = part_of(path)
    part.unlink(missing_ok=True)  # packprop never writes through it, whatever it is
    yield part
    with opened(part, os.O_RDWR) as file:
        os.fsync(file)
    part.replace(path)
    if os.name == "posix":  # elsewhere folders cannot be opened
        with opened(path.parent, os.O_RDONLY) as folder:
            os.fsync(folder)


def write_all(file: int, content: bytes | memoryview, place: int) -> None:
    """Write all bytes from a place on; the system may take only a part of them in one call."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file, rest, place)
        place, rest = place + written, rest[written:]


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file inside the context, as a descriptor."""
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
