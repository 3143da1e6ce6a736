"""The device of a tensor: its type, and its free memory."""

from __future__ import annotations

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
