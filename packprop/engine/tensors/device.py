"""The device of a tensor: its type, its free memory, and the memory that programs have freed."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packprop.engine.tensors.dry import dry_run_device


def device_kind(tensor: Tensor) -> str:
    """Return the type of a tensor's device; in a dry run, that of the device the run stands in for."""
    return dry_run_device() or tensor.device.type


SHORT = (torch.bfloat16, torch.float16)
"""The precisions of sixteen bits."""


def multiplies_wide(tensor: Tensor) -> bool:
    """Tell whether a device multiplies matrices of sixteen bits to sums of single precision, without copies."""
    return tensor.dtype in SHORT and device_kind(tensor) == "cuda" and "dtype" in torch.ops.aten.bmm.overloads()


def tensor_of(value: Any) -> Tensor:
    """Return a tensor as it is, and anything else as a tensor on the CPU, whatever the default device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes on an accelerator, PyTorch's caches included; ``None`` if they are not known."""
    module = _module_with("mem_get_info", device)
    if module is None:
        return None
    cached: int = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + cached


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes of tensors on an accelerator now; ``None`` if nothing counts them there."""
    module = _module_with("memory_allocated", device)
    return None if module is None else int(module.memory_allocated(device))


def _module_with(name: str, device: torch.device) -> Any:
    """Return PyTorch's module for an accelerator if it has a function of this name; otherwise ``None``."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if module.is_available() and hasattr(module, name) else None


LARGEST_BLOCK = 2**25 - 2**16
"""The largest block that glibc learns from, less room for glibc's own data around it."""


@functools.cache
def keep_freed_pages() -> None:
    """Make the C library keep freed memory, once in a process.

    # NOTE [Freed pages]
    Sweeps make and drop hundreds of tensors of some MiB. glibc maps such blocks one by one, and returns them
    and the end of its heap to the system, so the process pays for each page again; this may double the time of
    a sweep. glibc stops doing so once a block of their size, up to 32 MiB, has been freed. From then on it
    keeps 64 MiB at most, as in any program that frees a tensor of that size. The storage made here is such a
    block. Nobody touches it, so it takes no memory. packprop does not make it under a budget.

    Freed blocks within the heap stay as well, whatever their total size. The checks of a first pass would leave
    100 MiB of them in a language model whose pass needs 320 MiB. ``return_freed_pages`` returns them.
    """
    torch.UntypedStorage(LARGEST_BLOCK)


def return_freed_pages() -> None:
    """Make the C library return freed memory to the system; see NOTE [Freed pages]."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return ``malloc_trim`` of the C library; ``None`` where there is none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
