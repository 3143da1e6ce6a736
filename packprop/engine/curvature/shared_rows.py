"""Rows of a Jacobian that all samples share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.nodes import CONVOLUTIONS, name_of_node
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.pull import pull_columns
from packprop.engine.samples.separation import Place, places_at

WORTH_A_BATCH = 4
"""From this number of passes through one function on, a vectorised pass is faster."""


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
    axis of samples. If a product sums over it, each sample is multiplied with other rows of the matrix. If
    samples are on the channels, a convolution may have a kernel for each. Samples with different numbers of
    rows have different Jacobians.
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
