"""The device that the command line names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from packprop.errors import BadInput


def device_named(asked: str, name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        BadInput: If there is none that this torch can use.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(
            asked, f"--device {name}", reason, "name a device that this torch can use, such as cpu"
        ) from error
    return device


def moved(device: torch.device | None, *parts: Any) -> list[Any]:
    """Return modules on a device, if one was named, and everything else as it is."""
    return [part.to(device) if device is not None and isinstance(part, nn.Module) else part for part in parts]
