"""The state of a tensor: its in-place changes, and the references to it."""

from __future__ import annotations

import functools
import sys
import weakref

import torch
from torch import Tensor, UntypedStorage, nn


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if PyTorch does not count that.

    Only this function uses ``Tensor._version``. Nothing else tells whether a tensor still has its recorded
    values, and results from other values would be wrong without any sign of it.
    """
    return 0 if tensor.is_inference() else tensor._version


def taken_over(holder: list[Tensor]) -> Tensor | None:
    """Return the one tensor of ``holder``, which loses it, as a new object; ``None`` if it has other users.

    A reference counts to the tensor or to its memory, from Python or from C++. Views, arrays and autograd's
    saved tensors hold the memory, and show when the tensor itself is gone, and with it what refers to the
    tensor alone. Memory that belongs to an array, or that other processes share, cannot be resized.
    """
    tensor = holder.pop()
    storages = [tensor.untyped_storage()]
    is_own = storages[0].resizable() and not storages[0].is_shared() and weakref.getweakrefcount(tensor) == 0
    place, like = (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.new_empty(0)
    del tensor
    alone = [torch.empty(0, device=like.device).untyped_storage()]
    if not is_own or not _storages_count() or _references(storages) != _references(alone):
        return None
    return like.set_(storages[0], *place)


def _references(holder: list[UntypedStorage]) -> int:
    """Count the references to a storage, to which PyTorch adds one if anything in C++ holds it."""
    return sys.getrefcount(holder[0])


@functools.cache
def _storages_count() -> bool:
    """Tell whether this version of PyTorch counts references to a storage from C++."""
    tensor = torch.empty(0, device="cpu")
    storages = [tensor.untyped_storage()]
    held = _references(storages)
    del tensor
    return held > _references(storages)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors may share their memory: those that do not say may."""
    try:
        return one.untyped_storage() is other.untyped_storage()  # a storage has one such object while it lives
    except (RuntimeError, NotImplementedError):
        return True


def storage_of(tensor: Tensor) -> int:
    """Return where the memory begins that a tensor shares with its views; 0 for tensors that do not say."""
    if type(tensor) not in (Tensor, nn.Parameter):  # others stand for tensors, or hold several
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
