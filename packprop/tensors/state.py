"""The state of a tensor: whether it was changed, who else refers to it."""

from __future__ import annotations

import sys
import weakref

import torch
from torch import Tensor


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 if PyTorch does not count that.

    ``Tensor._version`` is used here alone. Nothing else tells whether a tensor still has the values that it was
    recorded with, and results from other values would be wrong without any sign of it.
    """
    return 0 if tensor.is_inference() else tensor._version


def is_sole(holder: list[Tensor]) -> bool:
    """Whether nothing else refers to the one tensor in ``holder``, or to its storage.

    Views, arrays and saved tensors share the storage or the tensor. References from Python are counted, too,
    which is why the tensor comes in a list. The counts are compared with those of a tensor that was just made.
    Memory that belongs to an array, or that is shared with other processes, cannot be resized.
    ``Tensor._use_count`` and ``_storage_Use_Count`` are private, and used here alone: nothing public tells
    whether memory would be free without a tensor.
    """
    storage = holder[0].untyped_storage()
    own = storage.resizable() and not storage.is_shared() and weakref.getweakrefcount(holder[0]) == 0
    del storage
    return own and _reference_counts(holder) == _reference_counts([torch.empty(0, device=holder[0].device)])


def _reference_counts(holder: list[Tensor]) -> tuple[int, ...]:
    """References to a tensor and to its storage, from Python and from C++."""
    storage = holder[0].untyped_storage()
    return (
        sys.getrefcount(holder[0]),
        holder[0]._use_count(),  # type: ignore[attr-defined]  # not in torch's stubs
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )
