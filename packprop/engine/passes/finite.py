"""A check for finite cotangents at leaves, which waits for the device only once, at the end of a pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from packprop.engine.graph.graph import Graph
from packprop.engine.tensors.dry import all_finite, extremes, joined
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import PackpropWarning

FEW = 256
"""The check keeps results of up to this number of entries as they are, and looks at them all at the end."""


def smallest_tensor(results: Iterable[Any]) -> Tensor | None:
    """Return the tensor with the fewest entries among some results; ``None`` if no tensor has entries."""
    smallest: Tensor | None = None
    for result in results:
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if tensor.numel() and (smallest is None or tensor.numel() < smallest.numel()):
                smallest = tensor
    return smallest


class FiniteCheck:
    """Keeps the smallest and largest entries of the tensors of each leaf: NaN and infinity show in them."""

    def __init__(self) -> None:
        self._seen: dict[int, list[Tensor]] = {}
        self.cause = ""
        """The text of the warning, if packprop knows which function's derivative is not finite."""

    def note(self, leaves: Iterable[Tensor], tensors: Iterable[Tensor | None]) -> None:
        """Remember the extreme entries of some tensors, for some leaves."""
        found: list[Tensor] = []
        for tensor in tensors:
            if tensor is not None:
                found += extremes(tensor)
        if not found:
            return
        for leaf in leaves:
            seen = self._seen.setdefault(id(leaf), [])
            seen += found
            if len(seen) > 32:  # two are enough, because they keep NaN
                seen[:] = joined(seen).aminmax()

    def note_smallest(self, leaf: Tensor, results: Iterable[Any]) -> None:
        """Remember the smallest of the results of a leaf, each of which shows NaN in its cotangents."""
        smallest = smallest_tensor(results)
        if smallest is None:
            return
        if smallest.numel() > FEW or smallest.is_complex():
            self.note([leaf], [smallest])
        else:
            self._seen.setdefault(id(leaf), []).append(
                smallest.detach() if smallest.requires_grad else smallest
            )

    def first(self, graph: Graph) -> Tensor | None:
        """Return the first leaf with an entry that is not finite; wait for each device."""
        if all_finite(list({id(extreme): extreme for own in self._seen.values() for extreme in own}.values())):
            return None
        return next((leaf for leaf in graph.leaves() if not all_finite(self._seen.get(id(leaf), []))), None)

    def warn(self, graph: Graph) -> None:
        """Warn of the first leaf with an entry that is not finite."""
        leaf = None if self.cause else self.first(graph)
        if leaf is not None:
            self.cause = (
                f"The cotangent at parameter {graph.name(leaf)!r}, or a quantity computed from it, holds NaN "
                "or infinite values."
            )
        if self.cause:
            warnings.warn(self.cause, PackpropWarning, stacklevel=2)
