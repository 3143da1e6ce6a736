"""Counting the bytes of tensors that are alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packprop.engine.tensors.dry import is_dry_run, storage_key
from packprop.engine.tensors.nesting import tensors_in, tensors_of_call
from packprop.engine.tensors.repeated import Repeated


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensor storage that are alive: ``now``, at the ``peak``, and after each operation.

    It counts tensors made while it is on, and those given to ``own``; other tensors that existed before do not
    count. It does not see memory inside a kernel.

    >>> import torch
    >>> before = torch.zeros(1000)
    >>> with LiveBytes() as live:
    ...     x = before.view(10, 100) + 1
    ...     y = x[2:]
    ...     del x, y
    >>> live.peak, live.now, live.history
    (4000, 0, [0, 4000, 4000])

    Args:
        block: The size of each storage is rounded up to a multiple of this.
        at_peak: Called at a new peak, if it is at least 0.2 % above the peak of the last call.
    """

    def __init__(self, block: int = 1, at_peak: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.now = self.peak = 0
        self.history: list[int] = []
        self.phase = ""
        self.labels: dict[int, tuple[str, str]] = {}
        self.sizes: dict[int, int] = {}
        self.repeated = Repeated()
        self.settle: Callable[[], None] | None = None
        """Run after each operation, before the bytes are read."""
        self.of_batch: set[int] = set()
        """Storages put here, and those that operations made from them, by ``storage_key``."""
        self.saved: dict[int, float] = {}
        """Storages of saved results: the share of each that is left when the pass is over."""
        self._times: dict[int, float] = {}
        self._itself = weakref.ref(self)
        self._block, self._at_peak, self._told, self._dry = block, at_peak, 0.0, is_dry_run()

    def __repr__(self) -> str:
        return f"<LiveBytes: {self.now:,} bytes, {self.peak:,} at the peak>"

    def restart(self) -> None:
        """Forget the peak, and look for a new one from now on."""
        self.peak, self._told = self.now, 0.0
        if self._at_peak is not None:
            self._at_peak()

    def own(self, tensors: Iterable[Tensor], label: str) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._count(tensor, label)

    def scale(self, tensors: Iterable[Tensor], times: float) -> None:
        """Count each tensor ``times`` times; leave out tensors that are not counted."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self.sizes:
                self._times[key] = times
                self._count(tensor)

    def reserve(self, label: str, size: int) -> None:
        """Count ``size`` more bytes from now on."""
        key = -1 - len(self.labels)
        self.labels[key], self.sizes[key] = (label, ""), size
        self.now += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.device):  # asked of tensors without data at each turn
            return out
        known = {storage_key(tensor) for tensor in strided(tensors_of_call(args, kwargs or {}))}
        repeats = bool(self.repeated.keys) and not self.repeated.keys.isdisjoint(known)
        is_of_batch = not (self.of_batch.isdisjoint(known) or _takes_shape_alone(func))
        for tensor in strided((out,) if isinstance(out, Tensor) else tensors_in(out)):
            if tensor.untyped_storage().device.type == "meta" and not self._dry:
                continue  # a dry run inside the counted block takes no memory
            key = storage_key(tensor)
            if is_of_batch:
                self.of_batch.add(key)
            if repeats and key not in self.repeated.keys:
                self.repeated.keys.add(key)
                self._times[key] = self.repeated.times
            if key in self.sizes or key not in known:
                self._count(tensor, self.phase, func)
        if self.settle is not None:
            self.settle()
        self.history.append(self.now)
        if self.now > self.peak:
            self.peak = self.now
            if self._at_peak is not None and self.now > self._told:
                self._told = 1.002 * self.now
                self._at_peak()
        return out

    def _count(self, tensor: Tensor, label: str = "", maker: Any = None) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        size = int(-(-storage.nbytes() * self._times.get(key, 1) // self._block)) * self._block
        if key not in self.sizes:
            detail = str([*tensor.shape])
            self.labels[key] = (label, f"{maker.overloadpacket.__name__} {detail}" if maker else detail)
            weakref.finalize(storage, _uncount, self._itself, key).atexit = False
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def _uncount(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
        del self.labels[key]
        self._times.pop(key, None)
        self.repeated.keys.discard(key)
        self.of_batch.discard(key)
        self.saved.pop(key, None)


def strided(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors with memory of their own: indices and values in place of a sparse gradient."""
    for tensor in tensors:
        if tensor.layout == torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        else:
            yield tensor


@functools.cache
def _takes_shape_alone(func: Any) -> bool:
    """Tell whether an operation uses nothing but the shape of a tensor."""
    name = str(func.overloadpacket.__name__)
    return name.startswith("new_") or name.endswith("_like")


def _uncount(counting: weakref.ref[LiveBytes], key: int) -> None:
    """Take a released storage off the count, if anyone still counts.

    Python holds the callback for a storage as long as the storage lives. The callback must not hold the count,
    which may lead to the storage itself: then Python would never release either of them.
    """
    live = counting()
    if live is not None:
        live._uncount(key)
