"""The matrices of projections as they are documented, entry by entry; nothing here knows packprop."""

from __future__ import annotations

import hashlib
import math
from functools import cache

import numpy as np
import torch
from torch import Tensor


@cache
def matrix(kind: str, dimension: int, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """``[d, *p]`` in double precision."""
    if kind == "kronecker":
        a = max(a for a in range(1, math.isqrt(dimension) + 1) if dimension % a == 0)
        entries = math.prod(shape)
        columns = math.prod(shape[1:]) if len(shape) > 1 else max(1, math.ceil(math.sqrt(entries)))
        rows = shape[0] if len(shape) > 1 else math.ceil(entries / columns)
        left = _signs(_key(seed, name, "rows"), rows, a)
        right = _signs(_key(seed, name, "columns"), columns, dimension // a)
        found = np.kron(left, right)[:, :entries]
    else:
        make = _normals if kind == "gaussian" else _signs
        found = make(_key(seed, name, "entries"), math.prod(shape), dimension)
    return torch.from_numpy(found / math.sqrt(dimension)).reshape(dimension, *shape)


def _key(seed: int, name: str, part: str) -> np.uint64:
    digest = hashlib.sha256(f"{seed}/{name}/{part}".encode()).digest()
    return np.frombuffer(digest[:8], "<u8")[0]


def _words(key: np.uint64, entries: int, number: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        count = np.arange(1, entries * number + 1, dtype=np.uint64)
        z = key + count * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))).reshape(entries, number)


def _signs(key: np.uint64, entries: int, dimension: int) -> np.ndarray:
    """``[d, e]``."""
    words = _words(key, entries, -(-dimension // 64))
    j = np.arange(dimension)
    bits = (words[:, j // 64] >> (j % 64).astype(np.uint64)) & np.uint64(1)
    return (2.0 * bits - 1.0).T


def _normals(key: np.uint64, entries: int, dimension: int) -> np.ndarray:
    """``[d, e]``."""
    words = _words(key, entries, -(-dimension // 2))
    j = np.arange(dimension)
    word = words[:, j // 2]
    u = ((word >> np.uint64(32)).astype(float) + 1) / 2**32
    angle = 2 * np.pi * (word & np.uint64(0xFFFFFFFF)).astype(float) / 2**32
    return (np.sqrt(-2 * np.log(u)) * np.where(j % 2 == 0, np.cos(angle), np.sin(angle))).T
