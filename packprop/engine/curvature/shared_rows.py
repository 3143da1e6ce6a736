"""Rows of a Jacobian that all samples share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.linearity import Nonlinearity
from packprop.engine.functions.nodes import CONVOLUTIONS, made_by, name_of_node
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.pull import pull_columns
from packprop.engine.samples.separation import layouts_at
from packprop.engine.tensors.layout import Layout

WORTH_A_BATCH = 4
"""From this number of passes through one function on, a vectorised pass is faster."""


@dataclass
class SharedRows:
    """Rows of the Jacobian of one function, which all samples share.

    One pass through the function gives as many rows as there are samples.

    Args:
        above: The edge of the function's output.
        shape: Shape of the output.
        layout: The places of samples in the output.
        below: The edge of its input.
        layout_below: The places of samples in the input.
        like: A tensor with the precision and device of the output.
        create_graph: Whether rows are differentiable.
    """

    above: GradientEdge
    shape: torch.Size
    layout: Layout
    below: GradientEdge
    layout_below: Layout
    like: Tensor
    create_graph: bool
    _first: int = 0
    _rows: Tensor | None = None

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return rows as columns at the input ``[v, *x]``, which samples share."""
        known = 0 if self._rows is None else len(self._rows)
        if not self._first <= start <= stop <= self._first + known:
            self._first, self._rows = start, None
            self._rows = self.rows(start, max(stop, start + self.layout.samples))
        assert self._rows is not None
        rows = self._rows[start - self._first : stop - self._first]
        return self.layout_below.from_front(rows[:, None].expand(-1, self.layout.samples, *rows.shape[1:]), 1)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows from ``start`` to ``stop``, or to the last one: ``[v, *rest]``."""
        samples = self.layout.samples
        rest = self.layout.front_shape(self.shape)[1:]
        stop = min(rest.numel(), rest.numel() if stop is None else stop)
        count = -(-(stop - start) // samples)
        units = self.like.new_zeros(count * samples, rest.numel())
        units.diagonal(start).fill_(1.0)
        fed = self.layout.from_front(units.reshape(count, samples, *rest), 1)
        pull = functools.partial(pull_columns, [self.above], [self.below], create_graph=self.create_graph)
        parts = [fed] if count >= WORTH_A_BATCH else fed.split(1)
        pieces = [pull([part])[0] for part in parts]
        pulled = torch.cat([piece for piece in pieces if piece is not None])
        return self.layout_below.to_front(pulled, 1).flatten(0, 1)[: stop - start]


def is_shared(node: Node, layout: Layout, below: GradientEdge, layout_below: Layout) -> bool:
    """Tell whether all samples have the same Jacobian: in matrix products of rows, and convolutions of a batch.

    The function must keep the axis of samples. If a product sums over it, each sample is multiplied with other
    rows of the matrix. If samples are on the channels, a convolution may have a kernel for each. Samples with
    different numbers of rows have different Jacobians.
    """
    places = [place for place, (above, _) in enumerate(node.next_functions) if above is below.node]
    if len(places) != 1 or layout != layout_below or layout.rows is not None:
        return False
    name, dims = name_of_node(node), len(made_by(node)[0].shape)
    kept: Sequence[int] = ()
    if places == [0] and name in CONVOLUTIONS:
        kept = (0,)
    elif places == [0] and name == "Linear":
        kept = range(dims - 1)
    elif name in ("Mm", "Addmm"):  # operands of Addmm come after the summand
        kept = (places[0] - (name == "Addmm"),)
    return len(kept) > 0 and layout.axis in (None, *kept)


def shared_rows_below(
    graph: Graph,
    nonlinearity: Nonlinearity,
    layout: Layout,
    reached: Sequence[ReachedUse],
    masks: dict[Node, int],
    create_graph: bool,
) -> SharedRows | None:
    """Return unit columns at a nonlinearity's input, pulled back through the function that made this input.

    Return ``None`` if samples do not share the function's Jacobian, or if it is one of the reached uses.
    """
    above = nonlinearity.input
    edges = above.node.next_functions
    inputs = [(node, output) for node, output in edges if node is not None and masks.get(node)]
    if len(inputs) != 1 or layout.axis is None or any(above.node in use.anchors for use in reached):
        return None
    below = GradientEdge(*inputs[0])
    layouts = layouts_at(graph, [(below, torch.Size(made_by(below.node)[below.output_nr].shape))])
    if not isinstance(layouts, list) or not is_shared(above.node, layout, below, layouts[0]):
        return None
    made = made_by(above.node)[above.output_nr]
    like = torch.empty(0, dtype=made.dtype, device=made.device)
    return SharedRows(above, nonlinearity.shape, layout, below, layouts[0], like, create_graph)
