"""Bytes of tensor storage, counted as a program runs; see NOTE [Which peak] in ``benchmarks.measure``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Counts bytes of tensor storage created while it is on: ``now``, and at the ``peak``.

    >>> with TensorBytes() as counted:
    ...     x = torch.ones(1000)
    ...     y = x + 1
    ...     del x
    ...     z = y.view(10, 100)[2:]
    >>> counted.peak, counted.now
    (8000, 4000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What goes in and was never seen before has been there before the start.
        for storage in _storages((args, kwargs)):
            self._meet(storage, born=False)
        out = func(*args, **(kwargs or {}))
        for storage in _storages((args, kwargs, out)):
            self._meet(storage, born=True)
        self.peak = max(self.peak, self.now)
        return out

    def _meet(self, storage: torch.UntypedStorage, *, born: bool) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._part, key)
            self._sizes[key] = 0 if born else -1
        # Storages grow and shrink under ``out=`` and ``resize_``; -1 marks those of others.
        known = self._sizes[key]
        if known >= 0:
            self.now += storage.nbytes() - known
            self._sizes[key] = storage.nbytes()

    def _part(self, key: int) -> None:
        self.now -= max(0, self._sizes.pop(key))


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        # A library's dry run under fake tensors takes no memory.
        if isinstance(leaf, Tensor) and leaf.untyped_storage().device.type != "meta":
            yield leaf.untyped_storage()


def size_of(results: Any) -> int:
    """Return the bytes of all results, those that share storage once."""
    return sum({storage._cdata: storage.nbytes() for storage in _storages(results)}.values())
