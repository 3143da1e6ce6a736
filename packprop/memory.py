"""Numbers of bytes; tensors without their data, or changed since; dry passes; what is alive in a pass."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packprop.types import tensors_in

_DRY: ContextVar[str | None] = ContextVar("packprop_dry", default=None)
"""The type of the device that is pretended to be there."""


def byte_count(memory: int | str) -> int | None:
    """Bytes of a number, or of a text such as ``"64MiB"`` or ``"1.5 GB"``; ``None`` if it is neither."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*", str(memory))
    if isinstance(memory, bool) or found is None:
        return None
    number, prefix, binary = found.groups()
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


LARGEST_BLOCK = 2**25 - 2**16
"""The largest that glibc learns from, with room for what it puts around it."""


@functools.cache
def keep_freed_pages() -> None:
    """Have the C library keep what is freed, once in a process.

    # NOTE [Freed pages]
    Sweeps make and drop tensors of some MiB by the hundred. glibc maps such blocks one by one, and hands them
    and the end of its heap back to the system, so that each is paid for page by page again; a sweep may take
    twice the time for that. It stops once it has seen a block of their size freed, up to 32 MiB, and then keeps
    64 MiB at most, as in any program that frees a tensor of that size. This is such a block; nobody touches it,
    so it takes no memory. Where a budget is given it is left out.
    """
    torch.UntypedStorage(LARGEST_BLOCK)


def is_hooked(tensor: Tensor) -> bool:
    """Whether hooks of the user's see, and may change, what is fed in at a tensor.

    ``Tensor._backward_hooks`` is private: nothing public tells whether there are any.
    """
    return bool(tensor._backward_hooks)


class Spec(NamedTuple):
    """A tensor without its data."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """What there is to know of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self, device: torch.device) -> Tensor:
        """A tensor like it, whose data mean nothing."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)


@contextlib.contextmanager
def pretending(device: str = "cpu") -> Iterator[None]:
    """Inside, tensors have no data but a device. What must be looked at is taken to be in order."""
    token = _DRY.set(device)
    try:
        yield
    finally:
        _DRY.reset(token)


def is_dry() -> bool:
    """Whether tensors have no data."""
    return _DRY.get() is not None


def device_kind(tensor: Tensor) -> str:
    """The type of a tensor's device, or of the one that is pretended."""
    return _DRY.get() or tensor.device.type


def found_fault(condition: Tensor) -> bool:
    """Whether a fault is there, by a condition of one entry; none is seen where there are no data."""
    return not is_dry() and bool(condition)


def free_bytes(device: torch.device) -> int | None:
    """What is free on an accelerator, with what PyTorch keeps there for itself; ``None`` if it is not known."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    if not module.is_available() or not hasattr(module, "mem_get_info"):
        return None
    kept: int = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + kept


def resident_peak() -> int | None:
    """The most bytes of this process that were in memory at once; ``None`` where nobody knows."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensor storage that are alive: ``now``, at the ``peak``, and after each operation.

    Counted are tensors made while it is on, and those given to ``own``; what else operations are given has been
    there before. What a kernel allocates inside of itself is not seen.

    >>> before = torch.zeros(1000)
    >>> with LiveBytes() as live:
    ...     x = before.view(10, 100) + 1
    ...     y = x[2:]
    ...     del x, y
    >>> live.peak, live.now, live.history
    (4000, 0, [0, 4000, 4000])

    Args:
        block: What each storage is rounded up to.
        at_peak: Called at each new peak that is higher than the last by a noticeable part.
    """

    def __init__(self, block: int = 1, at_peak: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.now = self.peak = 0
        self.history: list[int] = []
        self.phase = ""
        self.labels: dict[int, tuple[str, str]] = {}
        self.sizes: dict[int, int] = {}
        self._block, self._at_peak, self._told, self._dry = block, at_peak, 0.0, is_dry()

    def restart(self) -> None:
        """Look for the peak of what comes from now on."""
        self.peak, self._told = self.now, 0.0
        if self._at_peak is not None:
            self._at_peak()

    def own(self, tensors: Iterable[Tensor], label: str) -> None:
        """Count tensors that have been there before."""
        for tensor in tensors:
            self._meet(tensor, label, str([*tensor.shape]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            if tensor.untyped_storage().device.type == "meta" and not self._dry:
                continue  # a dry run inside of what is counted takes nothing
            if (key := storage_key(tensor)) in self.sizes or key not in given:
                self._meet(tensor, self.phase, f"{func.overloadpacket.__name__} {[*tensor.shape]}")
        self.history.append(self.now)
        if self.now > self.peak:
            self.peak = self.now
            if self._at_peak is not None and self.now > self._told:
                self._told = 1.002 * self.now
                self._at_peak()
        return out

    def _meet(self, tensor: Tensor, label: str, detail: str) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        size = -(-storage.nbytes() // self._block) * self._block
        if key not in self.sizes:
            self.labels[key] = (label, detail)
            weakref.finalize(storage, self._part, key)
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def _part(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
        del self.labels[key]


def storage_key(tensor: Tensor) -> int:
    """What tells storages apart while they are alive."""
    return id(tensor.untyped_storage())  # the wrapper of a storage lives as long as the storage
