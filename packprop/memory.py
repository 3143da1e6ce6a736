"""Numbers of bytes, tensors without their data, and whether a pass is only pretended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

_DRY: ContextVar[bool] = ContextVar("packprop_dry", default=False)


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
def pretending() -> Iterator[None]:
    """Inside, tensors have no data: what must be looked at is taken to be in order."""
    token = _DRY.set(True)
    try:
        yield
    finally:
        _DRY.reset(token)


def is_dry() -> bool:
    """Whether tensors have no data."""
    return _DRY.get()


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
