"""Diagonals of the Hessian at the outputs of uses that need no more of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from packprop.curvature.routes import Routes
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.site import Site
from packprop.tensors.precision import accumulation_dtype


class OutputDiagonals:
    """Diagonals of the Hessian at the outputs of uses that need no more of it.

    Where every entry of the leaves enters one entry of a sample's output, ``H_pp = (dy/dp)^2 H_yy``: whatever
    is swept there is summed over columns first, and meets the inputs once.

    Args:
        graph: With its samples located.
        ways: Which leaves are swept.
        found: Their uses.
    """

    def __init__(self, graph: Graph, routes: Routes, found: Sequence[ReachedUse]) -> None:
        self._bits = routes.bits
        times = Counter(id(site.leaf) for f in graph.uses for site in f.sites)
        self._squared = {routes.bits[f] for f in found if _has_squares(f)}
        self._enough = {
            routes.bits[f]
            for f in found
            if routes.bits[f] in self._squared
            and all(times[id(site.leaf)] == 1 and _enters_once(f, site, graph.samples) for site in f.sites)
        }
        self._totals: dict[int, tuple[ReachedUse, Tensor]] = {}

    def starts_at(self, found: ReachedUse, node: Node, output: int) -> bool:
        """Whether a use has this output, and can do without a sweep to it."""
        return found.nodes == {0: (node, output)} and self._bits[found] in self._squared

    def takes(self, found: ReachedUse) -> bool:
        """Whether the diagonal is all that is needed at a use."""
        return self._bits[found] in self._enough

    def add(self, found: ReachedUse, diagonal: Tensor) -> None:
        """A diagonal at its output, of the output's shape."""
        self._merge(found, flat(found.layouts[0].to_front(diagonal), 1))

    def add_columns(self, found: ReachedUse, cotangents: Sequence[Tensor | None], weights: Tensor) -> None:
        """Columns at its output, whose squares are weighted for each column and sample ``[v, n]``."""
        (cotangent,) = cotangents
        if cotangent is None:
            return
        front = flat(found.layouts[0].to_front(cotangent, 1), 2)
        squares = front.to(accumulation_dtype(front.dtype)).square()
        each = weights[..., None]
        self._merge(found, (squares * each if squares.requires_grad else squares.mul_(each)).sum(0))

    def take(self) -> Iterator[tuple[ReachedUse, list[Tensor | None]]]:
        """Uses with their diagonals, as cotangents of one column ``[1, *y]``."""
        for found, total in self._totals.values():
            layout, shape = found.layouts[0], found.recorded.shapes[0]
            yield found, [layout.from_front(total.view(layout.front_shape(shape)))[None]]

    def _merge(self, found: ReachedUse, diagonal: Tensor) -> None:
        bit = self._bits[found]
        before = self._totals.get(bit)
        self._totals[bit] = found, diagonal if before is None else before[1] + diagonal


def flat(front: Tensor, kept: int) -> Tensor:
    """All axes behind the first ``kept`` as one, also where there are none."""
    return front.reshape(*front.shape[:kept], -1)


def _has_squares(found: ReachedUse) -> bool:
    """Whether all leaves of a use can be given a diagonal at its output."""
    alone = list(found.nodes) == [0] and len(found.recorded.shapes) == 1
    return alone and all(site.has_squares for site in found.sites)


def _enters_once(found: ReachedUse, site: Site, samples: int) -> bool:
    """Whether each entry of a leaf is known to enter one entry of each sample's output."""
    own, fans = found.recorded.shapes[0].numel() // samples, site.entry.fans
    if not site.direct or not site.entry.linear:
        return False
    return own == (site.leaf.numel() if fans is None else fans.groups * fans.fan_out) and (
        fans is not None or site.entry.structure == "Scale"
    )
