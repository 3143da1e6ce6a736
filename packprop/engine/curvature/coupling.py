"""A check for entries of the Hessian between samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.curvature.second_order import (
    differentiating_twice,
    gradients_at,
    named,
    require_second_derivatives,
)
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.pull import pull_columns
from packprop.engine.samples.feeding import sizes_of
from packprop.engine.samples.rows import differ
from packprop.engine.samples.separation import random_powers
from packprop.engine.tensors.layout import Layout


def couples_samples(graph: Graph) -> bool:
    """Tell whether the Hessian in the outputs of all uses has entries between samples.

    The check is that of NOTE [Separation]. It multiplies the Hessian with a column of random numbers, in which
    those of each sample are scaled by a power of two of their own, and with another column with the inverse
    powers. The rows of a sample in the product are scaled by the sample's own power, unless a part of them
    comes from another sample.
    """
    if graph.samples == 1:
        return False
    require_second_derivatives(graph.roots, graph.leaves(), named(graph), linear=True)
    places = [(use, index) for use in graph.uses for index in use.nodes]
    edges = [GradientEdge(*use.nodes[index]) for use, index in places]
    label = graph.label(graph.uses[0])
    with differentiating_twice(label), torch.enable_grad():
        gradients = gradients_at(graph, edges, create_graph=True)
    fed = [
        (place, gradient)
        for place, gradient in enumerate(gradients)
        if gradient is not None and gradient.requires_grad
    ]
    if not fed:
        return False
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(gradient.shape, generator=generator) for _, gradient in fed]
    info = [torch.finfo(gradient.dtype) for _, gradient in fed]
    powers = random_powers(graph.samples, min(each.max for each in info))
    layouts = [use.layouts[index] for use, index in places]

    def sizes_by(exponents: Tensor) -> dict[int, Tensor]:
        """Return the sizes of the rows of each sample ``[n]``, without the sample's power, by place."""
        seeds = [
            (random * _of_samples(layouts[place], torch.exp2(exponents), random)).to(gradient)
            for (place, gradient), random in zip(fed, noise, strict=True)
        ]
        with differentiating_twice(label):
            columns = pull_columns([gradient for _, gradient in fed], edges, seeds, batched=False)
        found = {}
        for place, column in enumerate(columns):
            if column is not None and column.numel():
                found[place] = sizes_of(layouts[place].to_front(column)) * torch.exp2(-exponents)
        return found

    up, down = sizes_by(powers), sizes_by(-powers)
    tolerance = max(each.eps for each in info) ** 0.5
    smallest = max(each.tiny for each in info)
    return any(
        not bool((sizes + down[place]).isfinite().all())
        or differ(sizes, down[place], powers, tolerance, smallest)
        for place, sizes in up.items()
    )


def _of_samples(layout: Layout, factors: Tensor, like: Tensor) -> Tensor:
    """Reshape factors of samples ``[n]`` to broadcast against a tensor."""
    return layout.broadcast(factors, like.dim())
