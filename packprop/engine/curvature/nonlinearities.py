"""Terms of the Hessian from elementwise nonlinearities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.columns import Columns, unit_columns
from packprop.engine.curvature.linearity import Nonlinearity
from packprop.engine.curvature.output_diagonals import OutputDiagonals
from packprop.engine.curvature.routes import Routes
from packprop.engine.curvature.second_order import differentiating_twice, gradients_at
from packprop.engine.curvature.shared_rows import SharedRows, shared_rows_below
from packprop.engine.curvature.swept_uses import with_own_ends
from packprop.engine.functions.nodes import made_by
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.samples.separation import Place
from packprop.engine.tensors.long_work import expect
from packprop.engine.tensors.precision import accumulation_dtype


@dataclass(frozen=True)
class CurvatureTerm:
    """The term of the Hessian from one input of elementwise nonlinearities.

    Args:
        columns: Weighted unit columns at the input, or their products below the function that made it.
        uses: The uses to which these columns are swept.
    """

    columns: Columns
    uses: list[ReachedUse]


def nonlinearity_terms(
    graph: Graph, routes: Routes, uses: Sequence[ReachedUse], diagonals: OutputDiagonals, create_graph: bool
) -> Iterator[CurvatureTerm]:
    """Yield the terms of elementwise nonlinearities, input by input; add to ``diagonals`` without a sweep."""
    if not routes.nonlinearities:
        return
    weights = residuals(graph, [nonlinearity.node for nonlinearity, _ in routes.nonlinearities], create_graph)
    by_input: dict[tuple[Node, int], tuple[Tensor, Place, Nonlinearity]] = {}
    for (nonlinearity, place), weight in zip(routes.nonlinearities, weights, strict=True):
        key = (place.edge.node, place.edge.output_nr)
        before = by_input.get(key)
        by_input[key] = (weight if before is None else weight + before[0], place, nonlinearity)
    swept = []
    for (node, output), (weight, place, nonlinearity) in by_input.items():
        at_input = [use for use in uses if diagonals.needs_no_sweep(use, node, output)]
        for use in at_input:
            diagonals.add(use, weight.to(accumulation_dtype(weight.dtype)))
        upstream = [use for use in uses if routes.bits[use] & nonlinearity.upstream and use not in at_input]
        reached = with_own_ends(upstream, routes)
        if reached:
            swept.append((weight, place, reached))
    del weight, weights
    expect("columns", sum(weight.numel() // place.layout.samples for weight, place, _ in swept))
    by_input.clear()
    while swept:
        weight, place, reached = swept.pop(0)
        shared = shared_rows_below(graph, place, reached, routes.masks, create_graph)
        yield CurvatureTerm(_weighted_columns(weight, place, shared), reached)


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
            (second,) = torch.autograd.grad(
                first.sum(), z, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
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
