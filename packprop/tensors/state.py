"""Whether a tensor was changed, is held by others, or has hooks."""

from __future__ import annotations

import sys
import weakref

import torch
from torch import Tensor


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 if that is not counted.

    ``Tensor._version`` is private, and stands here alone: nothing public tells whether a tensor still holds
    what was computed with, and a number from other values would be wrong without a sign of it.
    """
    return 0 if tensor.is_inference() else tensor._version


def is_sole(holder: list[Tensor]) -> bool:
    """Whether the one tensor of a list, and what it is stored in, are held by nothing else.

    Views, arrays and saved tensors share the storage or the tensor, references in Python are counted, too; all
    of it is compared with a tensor that was just made. Memory that belongs to an array, or that is shared with
    other processes, cannot be resized. ``Tensor._use_count`` and ``_storage_Use_Count`` are private, and stand
    here alone: nothing public tells whether memory would be free without a tensor.
    """
    storage = holder[0].untyped_storage()
    own = storage.resizable() and not storage.is_shared() and weakref.getweakrefcount(holder[0]) == 0
    del storage
    return own and _holders(holder) == _holders([torch.empty(0, device=holder[0].device)])


def _holders(holder: list[Tensor]) -> tuple[int, ...]:
    storage = holder[0].untyped_storage()
    return (
        sys.getrefcount(holder[0]),
        holder[0]._use_count(),  # type: ignore[attr-defined]  # not in torch's stubs
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )


def is_hooked(tensor: Tensor) -> bool:
    """Whether hooks of the user's see, and may change, what is fed in at a tensor.

    ``Tensor._backward_hooks`` is private: nothing public tells whether there are any.
    """
    return bool(tensor._backward_hooks)
