"""Whether what arrives at leaves is finite: noted without waiting for the device, and looked at once."""

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
    """Smallest and largest entries of what was seen of each leaf: NaN and infinity are found among them."""

    def __init__(self) -> None:
        self._seen: dict[int, list[Tensor]] = {}

    def note(self, leaf: Tensor, tensors: Iterable[Tensor | None]) -> None:
        """Remember what tells whether tensors are finite."""
        finite_check = self._seen.setdefault(id(leaf), [])
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                values = tensor.detach()
                finite_check += (torch.view_as_real(values) if values.is_complex() else values).aminmax()
        if len(finite_check) > 32:  # many sweeps; NaN is neither lost in them
            finite_check[:] = torch.stack(finite_check).aminmax()

    def warn(self, graph: Graph) -> None:
        """Name the first leaf that something arrived at that is not finite."""
        if _all_finite([each for own in self._seen.values() for each in own]):
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
    places: dict[torch.device, list[Tensor]] = {}
    for scalar in scalars:
        places.setdefault(scalar.device, []).append(scalar)
    return all(math.isfinite(value) for same in places.values() for value in torch.stack(same).tolist())
