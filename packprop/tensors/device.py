"""What is known of the device that a tensor is on."""

from __future__ import annotations

import torch
from torch import Tensor

from packprop.tensors.dry import dry_run_device


def device_kind(tensor: Tensor) -> str:
    """The type of a tensor's device, or of the one that a dry run is made for."""
    return dry_run_device() or tensor.device.type


def free_bytes(device: torch.device) -> int | None:
    """What is free on an accelerator, with what PyTorch keeps there for itself; ``None`` if it is not known."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    if not module.is_available() or not hasattr(module, "mem_get_info"):
        return None
    kept: int = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0]) + kept
