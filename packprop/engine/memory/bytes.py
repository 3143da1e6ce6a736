"""Numbers of bytes: reading them, printing them, and measuring a process."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path


def byte_count(memory: float | str) -> int | None:
    """Return the bytes that a number, or a text such as ``"64MiB"``, stands for; ``None`` for other values."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", str(memory))
    if isinstance(memory, bool) or match is None:
        return None
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def byte_text(count: float) -> str:
    """Format a number of bytes to three digits.

    >>> [byte_text(n) for n in (0, 1023, 1536, 600 * 2**20, 10**10)]
    ['0 B', '1023 B', '1.5 KiB', '600 MiB', '9.31 GiB']
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB" or (unit == "B" and abs(count) < 1024):
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def enough_text(count: int) -> str:
    """Format a number of bytes as ``byte_text`` does, but rounded up: a budget of this text holds them.

    >>> [enough_text(n) for n in (1023, 1537, 600 * 2**20, 600 * 2**20 + 1)]
    ['1023 B', '1.51 KiB', '600 MiB', '601 MiB']
    """
    text, more = byte_text(count), count
    while (byte_count(text) or 0) < count:
        more += max(1, count // 1000)
        text = byte_text(more)
    return text


def resident_peak() -> int | None:
    """Return the most bytes that this process had in memory at once; ``None`` if the system does not tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def resident_now() -> int | None:
    """Return the bytes that this process has in memory now; ``None`` if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not on Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
