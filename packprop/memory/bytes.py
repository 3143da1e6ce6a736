"""Numbers of bytes: how they are read and printed, and how many a process takes."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

import torch


def byte_count(memory: int | str) -> int | None:
    """Bytes of a number, or of a text such as ``"64MiB"`` or ``"1.5 GB"``; ``None`` if it is neither."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", str(memory))
    if isinstance(memory, bool) or match is None:
        return None
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def byte_text(count: float) -> str:
    """A number of bytes to three digits.

    >>> [byte_text(n) for n in (0, 1023, 1536, 600 * 2**20, 10**10)]
    ['0 B', '1023 B', '1.5 KiB', '600 MiB', '9.31 GiB']
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB" or (unit == "B" and abs(count) < 1024):
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


LARGEST_BLOCK = 2**25 - 2**16
"""The largest block that glibc learns from, less room for what glibc puts around it."""


@functools.cache
def keep_freed_pages() -> None:
    """Have the C library keep freed memory, once in a process.

    # NOTE [Freed pages]
    Sweeps make and drop tensors of some MiB by the hundred. glibc maps such blocks one by one, and hands them
    and the end of its heap back to the system, so that each is paid for page by page again; a sweep may take
    twice the time for that. glibc stops doing so once it has seen a block of their size freed, up to 32 MiB.
    From then on it keeps 64 MiB at most, as in any program that frees a tensor of that size. The storage made
    here is such a block. Nobody touches it, so it takes no memory. Under a budget it is not made.
    """
    torch.UntypedStorage(LARGEST_BLOCK)


def resident_peak() -> int | None:
    """The most bytes that this process had in memory at once; ``None`` where the system does not tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def resident_now() -> int | None:
    """Bytes that this process has in memory now; ``None`` where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not on Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
