"""Checks that many tensors are finite, which wait for a device only once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.traced import is_traced, note_fault


def extremes(tensor: Tensor) -> list[Tensor]:
    """Return the smallest and the largest entry of a tensor: NaN and infinity show in them. Traced, its sum."""
    if not tensor.numel():
        return []
    values = tensor.detach()
    if is_traced() and values.dtype in (torch.float32, torch.float64):  # one operation in place of three
        return [values.sum()]
    return [*(torch.view_as_real(values) if values.is_complex() else values).aminmax()]


def all_finite(scalars: Sequence[Tensor]) -> bool:
    """Tell whether all of some scalars are finite; waits for each device once. Without data, they are.

    They also are in a traced pass, which notes a condition that shows after a replay.
    """
    if is_dry_run():
        return True
    by_device: dict[torch.device, list[Tensor]] = {}
    for scalar in scalars:
        by_device.setdefault(scalar.device, []).append(scalar)
    if is_traced():
        for same in by_device.values():
            joined = torch.stack(same)
            note_fault((joined - joined).any())  # the difference is NaN, which counts as true
        return True
    return all(math.isfinite(value) for same in by_device.values() for value in torch.stack(same).tolist())


def are_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether all entries of some tensors are finite; waits for each device once."""
    return all_finite([each for tensor in tensors if tensor is not None for each in extremes(tensor)])
