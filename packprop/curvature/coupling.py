"""Whether the Hessian has entries between samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.curvature.second_order import (
    differentiating_twice,
    gradients_at,
    named,
    require_second_derivatives,
)
from packprop.graph.graph import Graph
from packprop.graph.pull import pull_columns
from packprop.tensors.layout import Layout


def couples_samples(graph: Graph) -> bool:
    """Whether the Hessian in the outputs of all uses has entries between samples: tried on one column.

    The column is random at every second sample and zero at the others, where nothing may come back.
    """
    if graph.samples == 1:
        return False
    require_second_derivatives(graph.roots, graph.leaves(), named(graph), linear=True)
    places = [(use, index) for use in graph.uses for index in use.nodes]
    edges = [GradientEdge(*use.nodes[index]) for use, index in places]
    label = graph.label(graph.uses[0])
    with differentiating_twice(label), torch.enable_grad():
        gradients = gradients_at(graph, edges, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    fed: list[tuple[Tensor, Tensor]] = []
    for (use, index), gradient in zip(places, gradients, strict=True):
        if gradient is not None and gradient.requires_grad:
            noise = torch.randn(gradient.shape, generator=generator).to(gradient.device, gradient.dtype)
            fed.append((gradient, noise * _even_samples(use.layouts[index], gradient)))
    if not fed:
        return False
    with differentiating_twice(label):
        columns = pull_columns(
            [gradient for gradient, _ in fed], edges, [noise for _, noise in fed], batched=False
        )
    inside, leaked = [0.0], [0.0]
    for (use, index), column in zip(places, columns, strict=True):
        if column is not None and column.numel():
            even = _even_samples(use.layouts[index], column)
            inside.append((column * even).abs().max().item())
            leaked.append((column * (1 - even)).abs().max().item())
    return max(leaked) > 1e-5 * max(inside) or max(leaked) != max(leaked)


def _even_samples(layout: Layout, like: Tensor) -> Tensor:
    """One in the rows of every second sample, zero elsewhere, to be broadcast against a tensor."""
    if layout.axis is None:
        return torch.ones((), dtype=like.dtype, device=like.device)
    rows = (layout.sample_of(like.device) % 2 == 0).to(like.dtype)
    return rows.view([-1 if axis == layout.axis else 1 for axis in range(like.dim())])
