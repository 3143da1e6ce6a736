"""Short texts that stand for tensors."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from packprop.engine.tensors import apart, tensors_in, whole_tensor

PIECE = 2**24
"""Bytes of a tensor that are read at once."""

SPOTS = 1024
"""The least number of entries that stand for a long tensor, to notice a change of the data."""


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes, in the order of its entries; it is the same on every device.

    For a ``DTensor``, all ranks must call it together, and get the same digest.
    """
    found = hashlib.blake2b(digest_size=8)
    for part in _dense_parts(whole_tensor(tensor.detach())):
        flat = part.contiguous().view(-1)
        step = max(1, PIECE // max(1, flat.element_size()))
        for start in range(0, len(flat), step):
            found.update(_bytes_of(flat[start : start + step]))
    return found.hexdigest()


def spot_check(values: Any) -> str:
    """Return a digest of the shapes and types of tensors, and of some of their entries.

    The tensors may be anywhere in collections and objects.
    """
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors_in(apart(values)):
        found.update(kind_of(tensor).encode())
        for part in _dense_parts(tensor.detach()):
            flat = part.reshape(-1)
            found.update(_bytes_of(flat[:: max(1, len(flat) // SPOTS)]))
    return found.hexdigest()


def bytes_digest(content: bytes) -> str:
    """Return a digest of bytes."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def seed_from(content: bytes) -> int:
    """Return a seed that these bytes determine."""
    return int(bytes_digest(content), 16) >> 1


def kind_of(tensor: Tensor) -> str:
    """Return shape and precision of a tensor, and whether it is trained."""
    trained = ", trained" if tensor.requires_grad else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{trained}"


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a dense tensor itself, and indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    sparse = tensor.to_sparse().coalesce()
    return sparse.indices(), sparse.values()


def _bytes_of(flat: Tensor) -> Any:
    # a copy: PyTorch never again resizes memory that numpy has seen, and fully_shard resizes that of parameters
    own = flat.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return own.view(torch.uint8).numpy() if len(flat) else b""
