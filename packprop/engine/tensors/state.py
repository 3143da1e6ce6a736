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
    """Take the one tensor out of ``holder``, and return it as a new object; ``None`` if it has other users.

    Anything in Python or C++ that refers to the tensor or to its memory is a user, such as a view, an array, or
    a tensor that autograd has saved. This function drops its own reference to the tensor first: what refers to
    the memory afterwards is another user. Memory of an array, or shared by processes, cannot be resized.
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
    """Tell whether two tensors may share their memory; true if PyTorch does not know."""
    try:
        return one.untyped_storage() is other.untyped_storage()  # a storage has one such object while it lives
    except (RuntimeError, NotImplementedError):
        return True


def memory_of(tensor: Tensor) -> UntypedStorage | None:
    """Return the memory that a tensor shares with its views; ``None`` if there is none that PyTorch knows."""
    if type(tensor) not in (Tensor, nn.Parameter):  # others stand for tensors, or hold several
        return None
    try:
        memory = tensor.untyped_storage()
        return memory if memory.data_ptr() else None
    except (RuntimeError, NotImplementedError):
        return None


def storage_of(tensor: Tensor) -> int:
    """Return the address of ``memory_of`` a tensor; 0 if there is none."""
    memory = memory_of(tensor)
    return 0 if memory is None else memory.data_ptr()
