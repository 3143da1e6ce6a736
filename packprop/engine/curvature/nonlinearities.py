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
from packprop.engine.tensors.layout import Layout
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
    weights = residuals(graph, routes, create_graph)
    by_input: dict[tuple[Node, int], tuple[Tensor, Layout, Nonlinearity]] = {}
    for (nonlinearity, layout), weight in zip(routes.nonlinearities, weights, strict=True):
        key = (nonlinearity.input.node, nonlinearity.input.output_nr)
        before = by_input.get(key)
        by_input[key] = (weight if before is None else weight + before[0], layout, nonlinearity)
    swept = []
    for (node, output), (weight, layout, nonlinearity) in by_input.items():
        at_input = [use for use in uses if diagonals.needs_no_sweep(use, node, output)]
        for use in at_input:
            diagonals.add(use, weight.to(accumulation_dtype(weight.dtype)))
        upstream = [use for use in uses if routes.bits[use] & nonlinearity.upstream and use not in at_input]
        reached = with_own_ends(upstream, routes)
        if reached:
            swept.append((weight, layout, nonlinearity, reached))
    del weight, weights
    expect("columns", sum(weight.numel() // layout.samples for weight, layout, _, _ in swept))
    by_input.clear()
    while swept:
        weight, layout, nonlinearity, reached = swept.pop(0)
        shared = shared_rows_below(graph, nonlinearity, layout, reached, routes.masks, create_graph)
        yield CurvatureTerm(_weighted_columns(weight, layout, shared or nonlinearity.input), reached)


def residuals(graph: Graph, routes: Routes, create_graph: bool = False) -> list[Tensor]:
    """Return ``phi''(z) dL/dphi(z)`` at the input z of each elementwise nonlinearity, of its shape."""
    if not routes.nonlinearities:
        return []
    outputs = [GradientEdge(nonlinearity.node, 0) for nonlinearity, _ in routes.nonlinearities]
    gradients = gradients_at(graph, outputs, create_graph)
    pairs = zip(routes.nonlinearities, gradients, strict=True)
    return [residual(nonlinearity, gradient, create_graph) for (nonlinearity, _), gradient in pairs]


def residual(nonlinearity: Nonlinearity, gradient: Tensor | None, create_graph: bool) -> Tensor:
    """Return ``phi''(z) dL/dphi(z)`` of the shape of z, from the gradient ``dL/dphi(z)``.

    A call of the node with ones gives ``phi'(z)``, and autograd differentiates this in z.
    """
    made = made_by(nonlinearity.node)[0]
    if gradient is None:
        return torch.zeros(nonlinearity.shape, dtype=made.dtype, device=made.device)
    node: Any = nonlinearity.node  # nodes are callable, but torch's annotations do not say so
    with differentiating_twice(nonlinearity.node.name()), torch.enable_grad():
        first: Any = node(torch.ones_like(gradient))
        first = first[0] if isinstance(first, tuple) else first
        second = None
        if first.requires_grad:
            (second,) = torch.autograd.grad(
                first.sum(), nonlinearity.input, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
    with torch.set_grad_enabled(create_graph):
        return torch.zeros_like(gradient) if second is None else second * gradient


def _weighted_columns(weight: Tensor, layout: Layout, at: GradientEdge | SharedRows) -> Columns:
    """Return weighted unit columns at the input of a nonlinearity, or below the function that made it."""
    front = layout.to_front(weight)
    samples, entries = front.shape[0], front.shape[1:].numel()
    weights = front.reshape(samples, entries).mT
    weights = weights.to(accumulation_dtype(weights.dtype))
    if isinstance(at, SharedRows):
        return Columns([at.below], entries, lambda start, stop: [at(start, stop)], weights)

    def chunk(start: int, stop: int) -> list[Tensor]:
        return [unit_columns(weight.shape, layout, weight, start, stop)]

    return Columns([at], entries, chunk, weights)
