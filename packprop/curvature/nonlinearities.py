"""What elementwise nonlinearities add to the Hessian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.curvature.columns import Columns, unit_columns
from packprop.curvature.output_diagonals import Curvatures
from packprop.curvature.routes import Curve, Ways, subset_of
from packprop.curvature.second_order import slopes_at, twice
from packprop.curvature.shared_rows import SharedRows, _shared_rows
from packprop.graph.graph import Found, Graph
from packprop.graph.traversal import made_by
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype


@dataclass(frozen=True)
class Bend:
    """What one input of elementwise nonlinearities adds to the Hessian.

    Args:
        columns: Unit columns at it, or where these come from, with weights.
        found: Uses that these are swept to.
    """

    columns: Columns
    found: list[Found]


def bends(
    graph: Graph, ways: Ways, found: Sequence[Found], curvatures: Curvatures, create_graph: bool
) -> Iterator[Bend]:
    """What elementwise nonlinearities add, input by input; ``curvatures`` gets what needs no sweep."""
    if not ways.curves:
        return
    weights = residuals(graph, ways, create_graph)
    merged: dict[tuple[Node, int], tuple[Tensor, Layout, Curve]] = {}
    for (curve, layout), weight in zip(ways.curves, weights, strict=True):
        key = (curve.input.node, curve.input.output_nr)
        before = merged.get(key)
        merged[key] = (weight if before is None else weight + before[0], layout, curve)
    for (node, output), (weight, layout, curve) in merged.items():
        here = [f for f in found if curvatures.starts_at(f, node, output)]
        for f in here:
            curvatures.add(f, weight.to(accumulation_dtype(weight.dtype)))
        reached = subset_of([f for f in found if ways.bits[f] & curve.upstream and f not in here], ways)
        if reached:
            start = _shared_rows(graph, curve, layout, reached, ways.masks, create_graph)
            yield Bend(_unit_columns(weight, layout, start or curve.input), reached)


def residuals(graph: Graph, ways: Ways, create_graph: bool = False) -> list[Tensor]:
    """``phi''(z) dL/dphi(z)`` at the input z of each elementwise nonlinearity, of its shape."""
    if not ways.curves:
        return []
    slopes = slopes_at(graph, [GradientEdge(curve.node, 0) for curve, _ in ways.curves], create_graph)
    pairs = zip(ways.curves, slopes, strict=True)
    return [residual(curve, slope, create_graph) for (curve, _), slope in pairs]


def residual(curve: Curve, slope: Tensor | None, create_graph: bool) -> Tensor:
    """``phi''(z) dL/dphi(z)`` of the shape of z.

    A node called by itself gives phi' of what it saved, whose derivative in z is found as any other.
    """
    made = made_by(curve.node)[0]
    if slope is None:
        return torch.zeros(curve.shape, dtype=made.dtype, device=made.device)
    node: Any = curve.node  # nodes can be called, which torch's annotations leave out
    with twice(curve.node.name()), torch.enable_grad():
        first: Any = node(torch.ones_like(slope))
        first = first[0] if isinstance(first, tuple) else first
        second = None
        if first.requires_grad:
            (second,) = torch.autograd.grad(
                first.sum(), curve.input, retain_graph=True, create_graph=create_graph, allow_unused=True
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
