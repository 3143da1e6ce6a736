"""Whether cotangents at leaves are finite: noted without waiting for the device, looked at once at the end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from packprop.errors import PackpropWarning
from packprop.graph.graph import Graph
from packprop.tensors.dry import is_dry_run


class FiniteCheck:
    """Smallest and largest entries of the tensors seen for each leaf: NaN and infinity show in them."""

    def __init__(self) -> None:
        self._seen: dict[int, list[Tensor]] = {}

    def note(self, leaf: Tensor, tensors: Iterable[Tensor | None]) -> None:
        """Remember the extreme entries of some tensors."""
        extremes = self._seen.setdefault(id(leaf), [])
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                values = tensor.detach()
                extremes += (torch.view_as_real(values) if values.is_complex() else values).aminmax()
        if len(extremes) > 32:  # after many sweeps, two of them will do: they keep NaN, too
            extremes[:] = torch.stack(extremes).aminmax()

    def warn(self, graph: Graph) -> None:
        """Warn of the first leaf with an entry that is not finite."""
        if _all_finite([extreme for own in self._seen.values() for extreme in own]):
            return
        for leaf in graph.leaves():
            if not _all_finite(self._seen.get(id(leaf), [])):
                warnings.warn(
                    f"The cotangent at parameter {graph.name(leaf)!r} holds NaN or infinite values; so do "
                    "the quantities computed from it.",
                    PackpropWarning,
                    stacklevel=2,
                )
                return


def _all_finite(scalars: Sequence[Tensor]) -> bool:
    """Whether all of some scalars are finite; waits for each device once."""
    if is_dry_run():
        return True
    by_device: dict[torch.device, list[Tensor]] = {}
    for scalar in scalars:
        by_device.setdefault(scalar.device, []).append(scalar)
    return all(math.isfinite(value) for same in by_device.values() for value in torch.stack(same).tolist())
