"""Terms of the Hessian from elementwise nonlinearities, and ways to sweep less for them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.columns import Columns, unit_columns
from packprop.engine.curvature.routes import Routes, with_own_ends
from packprop.engine.curvature.second_order import differentiating_twice, gradients_at
from packprop.engine.functions.nodes import CONVOLUTIONS, made_by, name_of_node
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.pull import derivatives, pull_columns
from packprop.engine.graph.site import Site
from packprop.engine.samples.separation import Place, places_at
from packprop.engine.tensors.long_work import expect
from packprop.engine.tensors.precision import accumulation_dtype


class OutputDiagonals:
    """Diagonals of the Hessian at the outputs of uses that need only this diagonal.

    If every entry of the leaves enters one entry of a sample's output, ``H_pp = (dy/dp)^2 H_yy``. packprop then
    first sums the squares of all columns at the output, and multiplies them with the squared inputs once.

    Args:
        graph: The graph, with its samples located.
        uses: The uses of the swept leaves.
    """

    def __init__(self, graph: Graph, uses: Sequence[ReachedUse]) -> None:
        times = Counter(id(site.leaf) for use in graph.uses for site in use.sites)
        with_squares = [use for use in uses if _has_squares(use)]
        self._with_squares = {use.anchors[0] for use in with_squares}
        self._sufficient = {
            use.anchors[0]
            for use in with_squares
            if all(times[id(site.leaf)] == 1 and _enters_once(use, site, graph.samples) for site in use.sites)
        }
        self._totals: dict[Node, tuple[ReachedUse, Tensor]] = {}

    def needs_no_sweep(self, use: ReachedUse, node: Node, output: int) -> bool:
        """Tell whether a node's output is the output of the use, and a diagonal there needs no sweep."""
        return use.nodes == {0: (node, output)} and node in self._with_squares

    def are_sufficient(self, use: ReachedUse) -> bool:
        """Tell whether a use needs only the diagonal."""
        return use.anchors[0] in self._sufficient

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
        node = use.anchors[0]
        before = self._totals.get(node)
        self._totals[node] = use, diagonal if before is None else before[1] + diagonal


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


WORTH_A_BATCH = 4
"""The number of passes through one function from which on a vectorised pass is faster."""


@dataclass
class SharedRows:
    """Rows of the Jacobian of one function, which all samples share.

    One pass through the function gives as many rows as there are samples.

    Args:
        above: The function's output.
        below: Its input.
        create_graph: Whether rows are differentiable.
    """

    above: Place
    below: Place
    create_graph: bool
    _first: int = 0
    _rows: Tensor | None = None

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return rows as columns at the input ``[v, *x]``, which samples share."""
        known = 0 if self._rows is None else len(self._rows)
        if not self._first <= start <= stop <= self._first + known:
            self._first, self._rows = start, None
            self._rows = self.rows(start, max(stop, start + self.above.layout.samples))
        assert self._rows is not None
        rows = self._rows[start - self._first : stop - self._first]
        layout = self.below.layout
        return layout.from_front(rows[:, None].expand(-1, layout.samples, *rows.shape[1:]), 1)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows from ``start`` to ``stop``, or to the last one: ``[v, *rest]``."""
        above, samples = self.above, self.above.layout.samples
        rest = above.layout.front_shape(above.shape)[1:]
        stop = min(rest.numel(), rest.numel() if stop is None else stop)
        count = -(-(stop - start) // samples)
        units = torch.zeros(count * samples, rest.numel(), dtype=above.dtype, device=above.device)
        units.diagonal(start).fill_(1.0)
        fed = above.layout.from_front(units.reshape(count, samples, *rest), 1)
        ends = [above.edge], [self.below.edge]
        pull = functools.partial(pull_columns, *ends, create_graph=self.create_graph)
        parts = [fed] if count >= WORTH_A_BATCH else fed.split(1)
        pieces = [pull([part])[0] for part in parts]
        pulled = torch.cat([piece for piece in pieces if piece is not None])
        return self.below.layout.to_front(pulled, 1).flatten(0, 1)[: stop - start]


def shared_rows(above: Place, below: Place, create_graph: bool) -> SharedRows | None:
    """Return the rows of a function's Jacobian, from its output to its input; ``None`` if samples differ.

    Samples share them in matrix products of rows, and in convolutions of a batch. The function must keep the
    axis of samples. If a product sums over it, each sample is multiplied with different rows of the matrix. If
    samples are on the channels, a convolution may have a kernel for each sample. Samples with different numbers
    of rows have different Jacobians.
    """
    node, layout = above.edge.node, above.layout
    places = [place for place, (source, _) in enumerate(node.next_functions) if source is below.edge.node]
    if len(places) != 1 or layout != below.layout or layout.rows is not None:
        return None
    name, dims = name_of_node(node), len(above.shape)
    kept: Sequence[int] = ()
    if places == [0] and name in CONVOLUTIONS:
        kept = (0,)
    elif places == [0] and name == "Linear":
        kept = range(dims - 1)
    elif name in ("Mm", "Addmm"):  # operands of Addmm come after the summand
        kept = (places[0] - (name == "Addmm"),)
    is_shared = len(kept) > 0 and layout.axis in (None, *kept)
    return SharedRows(above, below, create_graph) if is_shared else None


def shared_rows_below(
    graph: Graph,
    above: Place,
    reached: Sequence[ReachedUse],
    masks: dict[Node, int],
    create_graph: bool,
) -> SharedRows | None:
    """Return unit columns at a nonlinearity's input, pulled back through the function that made this input.

    Return ``None`` if samples do not share the function's Jacobian, or if it is one of the reached uses.
    """
    made_by = above.edge.node
    inputs = [
        GradientEdge(node, output)
        for node, output in made_by.next_functions
        if node is not None and masks.get(node)
    ]
    if len(inputs) != 1 or above.layout.axis is None or any(made_by in use.anchors for use in reached):
        return None
    places = places_at(graph, inputs)
    return shared_rows(above, places[0], create_graph) if isinstance(places, list) else None


def nonlinearity_terms(
    graph: Graph, routes: Routes, uses: Sequence[ReachedUse], diagonals: OutputDiagonals, create_graph: bool
) -> Iterator[tuple[Columns, list[ReachedUse]]]:
    """Yield the terms of elementwise nonlinearities, input by input; add to ``diagonals`` if that is enough.

    A term is a group of weighted unit columns, at the input or below the function that made it, and the uses to
    which they are swept.
    """
    if not routes.nonlinearities:
        return
    weights = residuals(graph, list(routes.nonlinearities), create_graph)
    by_input: dict[tuple[Node, int], tuple[Tensor, Place]] = {}
    for place, weight in zip(routes.nonlinearities.values(), weights, strict=True):
        key = (place.edge.node, place.edge.output_nr)
        before = by_input.get(key)
        by_input[key] = (weight if before is None else weight + before[0], place)
    swept = []
    for (node, output), (weight, place) in by_input.items():
        at_input = [use for use in uses if diagonals.needs_no_sweep(use, node, output)]
        for use in at_input:
            diagonals.add(use, weight.to(accumulation_dtype(weight.dtype)))
        upstream = [use for use in uses if routes.bits_of([use]) & routes.masks[node] and use not in at_input]
        reached = with_own_ends(upstream, routes)
        if reached:
            swept.append((weight, place, reached))
    del weight, weights
    expect("columns", sum(weight.numel() // place.layout.samples for weight, place, _ in swept))
    by_input.clear()
    while swept:
        weight, place, reached = swept.pop(0)
        shared = shared_rows_below(graph, place, reached, routes.masks, create_graph)
        yield _weighted_columns(weight, place, shared), reached


def residuals(graph: Graph, nodes: Sequence[Node], create_graph: bool = False) -> list[Tensor]:
    """Return ``phi''(z) dL/dphi(z)`` at the input z of each of some elementwise nodes, of its shape."""
    if not nodes:
        return []
    gradients = gradients_at(graph, [GradientEdge(node, 0) for node in nodes], create_graph)
    return [_residual(*pair, create_graph) for pair in zip(nodes, gradients, strict=True)]


def _residual(node: Any, gradient: Tensor | None, create_graph: bool) -> Tensor:
    """Return ``phi''(z) dL/dphi(z)`` of the shape of z, from the gradient ``dL/dphi(z)``.

    A call of the node with ones gives ``phi'(z)``, and autograd differentiates this in z. Nodes are callable,
    but torch's annotations do not say so.
    """
    if gradient is None:
        made = made_by(node)[0]
        return torch.zeros(made.shape, dtype=made.dtype, device=made.device)
    (z,) = (GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None)
    with differentiating_twice(node.name()), torch.enable_grad():
        first: Any = node(torch.ones_like(gradient))
        first = first[0] if isinstance(first, tuple) else first
        second = None
        if first.requires_grad:
            (second,) = derivatives([first.sum()], [z], create_graph=create_graph)
    with torch.set_grad_enabled(create_graph):
        return torch.zeros_like(gradient) if second is None else second * gradient


def _weighted_columns(weight: Tensor, place: Place, shared: SharedRows | None) -> Columns:
    """Return weighted unit columns at the input of a nonlinearity, or below the function that made it."""
    front = place.layout.to_front(weight)
    samples, entries = front.shape[0], front.shape[1:].numel()
    weights = front.reshape(samples, entries).mT
    weights = weights.to(accumulation_dtype(weights.dtype))
    if shared is not None:
        return Columns([shared.below.edge], entries, lambda start, stop: [shared(start, stop)], weights)

    def chunk(start: int, stop: int) -> list[Tensor]:
        return [unit_columns(place.shape, place.layout, weight, start, stop)]

    return Columns([place.edge], entries, chunk, weights)
