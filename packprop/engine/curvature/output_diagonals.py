"""Diagonals of the Hessian at the outputs of uses that need only this diagonal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.curvature.routes import Routes
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.site import Site
from packprop.engine.tensors.precision import accumulation_dtype


class OutputDiagonals:
    """Diagonals of the Hessian at the outputs of uses that need only this diagonal.

    If every entry of the leaves enters one entry of a sample's output, ``H_pp = (dy/dp)^2 H_yy``. packprop then
    first sums the squares of all columns at the output, and multiplies them with the squared inputs once.

    Args:
        graph: The graph, with its samples located.
        routes: The routes, with the swept leaves.
        uses: The uses of these leaves.
    """

    def __init__(self, graph: Graph, routes: Routes, uses: Sequence[ReachedUse]) -> None:
        self._bits = routes.bits
        times = Counter(id(site.leaf) for use in graph.uses for site in use.sites)
        self._with_squares = {routes.bits[use] for use in uses if _has_squares(use)}
        self._sufficient = {
            routes.bits[use]
            for use in uses
            if routes.bits[use] in self._with_squares
            and all(times[id(site.leaf)] == 1 and _enters_once(use, site, graph.samples) for site in use.sites)
        }
        self._totals: dict[int, tuple[ReachedUse, Tensor]] = {}

    def needs_no_sweep(self, use: ReachedUse, node: Node, output: int) -> bool:
        """Tell whether this is the output of a use, and a diagonal there needs no sweep."""
        return use.nodes == {0: (node, output)} and self._bits[use] in self._with_squares

    def are_sufficient(self, use: ReachedUse) -> bool:
        """Tell whether a use needs only the diagonal."""
        return self._bits[use] in self._sufficient

    def add(self, use: ReachedUse, diagonal: Tensor) -> None:
        """Add a diagonal at the output of a use, of the output's shape."""
        self._add(use, flat(use.layouts[0].to_front(diagonal), 1))

    def add_columns(self, use: ReachedUse, cotangents: Sequence[Tensor | None], weights: Tensor) -> None:
        """Add the squares of columns at the output of a use, weighted for each column and sample ``[v, n]``."""
        (cotangent,) = cotangents
        if cotangent is None:
            return
        front = flat(use.layouts[0].to_front(cotangent, 1), 2)
        squares = front.to(accumulation_dtype(front.dtype)).square()
        factors = weights[..., None]
        self._add(use, (squares * factors if squares.requires_grad else squares.mul_(factors)).sum(0))

    def take(self) -> Iterator[tuple[ReachedUse, list[Tensor | None]]]:
        """Yield uses with their diagonals, as cotangents of one column ``[1, *y]``."""
        for use, total in self._totals.values():
            layout, shape = use.layouts[0], use.shapes[0]
            yield use, [layout.from_front(total.view(layout.front_shape(shape)))[None]]

    def _add(self, use: ReachedUse, diagonal: Tensor) -> None:
        bit = self._bits[use]
        before = self._totals.get(bit)
        self._totals[bit] = use, diagonal if before is None else before[1] + diagonal


def flat(front: Tensor, kept: int) -> Tensor:
    """Flatten all axes after the first ``kept`` to one axis, of extent 1 if there are none."""
    return front.reshape(*front.shape[:kept], -1)


def _has_squares(use: ReachedUse) -> bool:
    """Tell whether a diagonal at the output of a use gives the diagonals of all its leaves."""
    single = list(use.nodes) == [0] and len(use.shapes) == 1
    return single and all(site.has_squares for site in use.sites)


def _enters_once(use: ReachedUse, site: Site, samples: int) -> bool:
    """Tell whether each entry of a leaf enters one entry of each sample's output, as far as is known."""
    if not site.direct or not site.entry.linear:
        return False
    entries, fans = use.shapes[0].numel() // samples, site.entry.fans
    if fans is not None:
        return entries == fans.groups * fans.fan_out
    return entries == site.leaf.numel() and site.entry.structure == "Scale"
