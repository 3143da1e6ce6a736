"""What elementwise nonlinearities add to the Hessian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.curvature.columns import Columns, unit_columns
from packprop.curvature.output_diagonals import OutputDiagonals
from packprop.curvature.routes import Nonlinearity, Routes, subset_of
from packprop.curvature.second_order import differentiating_twice, gradients_at
from packprop.curvature.shared_rows import SharedRows, shared_rows_below
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.traversal import made_by
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype


@dataclass(frozen=True)
class CurvatureTerm:
    """What one input of elementwise nonlinearities adds to the Hessian.

    Args:
        columns: Unit columns at it, or where these come from, with weights.
        found: Uses that these are swept to.
    """

    columns: Columns
    uses: list[ReachedUse]


def nonlinearity_terms(
    graph: Graph, routes: Routes, found: Sequence[ReachedUse], diagonals: OutputDiagonals, create_graph: bool
) -> Iterator[CurvatureTerm]:
    """What elementwise nonlinearities add, input by input; ``diagonals`` gets what needs no sweep."""
    if not routes.nonlinearities:
        return
    weights = residuals(graph, routes, create_graph)
    merged: dict[tuple[Node, int], tuple[Tensor, Layout, Nonlinearity]] = {}
    for (nonlinearity, layout), weight in zip(routes.nonlinearities, weights, strict=True):
        key = (nonlinearity.input.node, nonlinearity.input.output_nr)
        before = merged.get(key)
        merged[key] = (weight if before is None else weight + before[0], layout, nonlinearity)
    for (node, output), (weight, layout, nonlinearity) in merged.items():
        here = [f for f in found if diagonals.starts_at(f, node, output)]
        for f in here:
            diagonals.add(f, weight.to(accumulation_dtype(weight.dtype)))
        reached = subset_of(
            [f for f in found if routes.bits[f] & nonlinearity.upstream and f not in here], routes
        )
        if reached:
            start = shared_rows_below(graph, nonlinearity, layout, reached, routes.masks, create_graph)
            yield CurvatureTerm(_unit_columns(weight, layout, start or nonlinearity.input), reached)


def residuals(graph: Graph, routes: Routes, create_graph: bool = False) -> list[Tensor]:
    """``phi''(z) dL/dphi(z)`` at the input z of each elementwise nonlinearity, of its shape."""
    if not routes.nonlinearities:
        return []
    slopes = gradients_at(
        graph, [GradientEdge(nonlinearity.node, 0) for nonlinearity, _ in routes.nonlinearities], create_graph
    )
    pairs = zip(routes.nonlinearities, slopes, strict=True)
    return [residual(nonlinearity, slope, create_graph) for (nonlinearity, _), slope in pairs]


def residual(nonlinearity: Nonlinearity, slope: Tensor | None, create_graph: bool) -> Tensor:
    """``phi''(z) dL/dphi(z)`` of the shape of z.

    A node called by itself gives phi' of what it saved, whose derivative in z is found as any other.
    """
    made = made_by(nonlinearity.node)[0]
    if slope is None:
        return torch.zeros(nonlinearity.shape, dtype=made.dtype, device=made.device)
    node: Any = nonlinearity.node  # nodes can be called, which torch's annotations leave out
    with differentiating_twice(nonlinearity.node.name()), torch.enable_grad():
        first: Any = node(torch.ones_like(slope))
        first = first[0] if isinstance(first, tuple) else first
        second = None
        if first.requires_grad:
            (second,) = torch.autograd.grad(
                first.sum(), nonlinearity.input, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
    with torch.set_grad_enabled(create_graph):
        return torch.zeros_like(slope) if second is None else second * slope


def _unit_columns(weight: Tensor, layout: Layout, start: GradientEdge | SharedRows) -> Columns:
    front = layout.to_front(weight)
    samples, entries = front.shape[0], front.shape[1:].numel()
    weights = front.reshape(samples, entries).mT
    weights = weights.to(accumulation_dtype(weights.dtype))
    if isinstance(start, SharedRows):
        return Columns([start.below], entries, lambda first, last: [start(first, last)], weights)

    def chunk(start: int, stop: int) -> list[Tensor]:
        return [unit_columns(weight.shape, layout, weight, start, stop)]

    return Columns([start], entries, chunk, weights)
