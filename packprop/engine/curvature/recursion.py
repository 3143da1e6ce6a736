"""Curvature averaged over samples layer by layer: the recursion of KFRA and of Hessian backpropagation.

# NOTE [Averaged recursion]
The recursion passes one matrix down a chain of functions. At the loss it is ``M = sum_n H_n``. Below a function
f it is ``1/N sum_n J_n^T M J_n``, with J_n the Jacobian of f for sample n. For Hessians, the curvature
``r = f'' dL/df`` of elementwise functions, summed over samples, is added to its diagonal. If the Jacobians are
the same for all samples, the average is exact. Otherwise it is an approximation, made once for each function.
The recursion is defined on chains only: where paths meet, it would need products between different paths, which
it does not compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.algebra.statistics import flat_rows
from packprop.engine.algebra.structures import Dense, rows
from packprop.engine.curvature.columns import unit_columns
from packprop.engine.curvature.dependence import dependence
from packprop.engine.curvature.linearity import Nonlinearity
from packprop.engine.curvature.nonlinearities import residual
from packprop.engine.curvature.output_diagonals import flat
from packprop.engine.curvature.second_order import gradients_at
from packprop.engine.curvature.seeds import columns
from packprop.engine.curvature.shared_rows import SharedRows, is_shared
from packprop.engine.functions.node_calls import has_complex_numbers
from packprop.engine.functions.nodes import ENTRYWISE, RESHAPES, kind_of, made_by, name_of_node
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.pull import pull_columns
from packprop.engine.graph.site import Site
from packprop.engine.samples.separation import layouts_at
from packprop.engine.tensors.dry import has_fault
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import accumulation_dtype, at_least
from packprop.engine.tensors.traced import is_traced
from packprop.errors import PackpropError
from packprop.types import Seed

ASKED = "Curvature averaged over samples (KFRA, HBP) was asked for."


Curvature = Literal["ggn", "hessian", "pch-abs", "pch-clip"]


@dataclass(frozen=True)
class _Place:
    """A tensor of the chain: its edge, its shape, and the places of samples in it."""

    edge: GradientEdge
    shape: torch.Size
    layout: Layout


@dataclass(frozen=True)
class _Step:
    """One function of the chain, from its output to its input, with the number of samples."""

    place: _Place
    below: _Place
    samples: int


def averaged_factors(
    graph: Graph, seed: Seed, curvature: Curvature, average_jacobians: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each leaf with the factor B of its block, ``[o, o]`` or ``[p, p]``.

    Args:
        graph: The graph, with its samples located.
        seed: The seed of the loss's Hessian, exact or sampled.
        curvature: Whether elementwise functions add their curvature, and the treatment of its sign.
        average_jacobians: Whether to average Jacobians of elementwise functions instead of their products.

    Raises:
        PackpropError: If the loss is not at the end of one chain.
    """
    places = _chain(graph)
    (group,) = columns(graph, seed, torch.is_grad_enabled())
    root = flat(places[0].layout.to_front(group.chunk(0, group.count)[0], 1), 2)
    root = root.to(accumulation_dtype(root.dtype))
    matrix = torch.einsum("vni,vnj->ij", root, root)
    use_at = {(node, output): use for use in graph.uses for node, output in use.nodes.values()}
    for place, below in zip(places, [*places[1:], None], strict=True):
        use = use_at.get((place.edge.node, place.edge.output_nr))
        if use is not None:
            for site in use.sites:
                yield site.leaf, _factor(use, site, place, matrix)
        if below is not None:
            step = _Step(place, below, graph.samples)
            matrix = _averaged(graph, step, matrix, curvature, average_jacobians)


def _chain(graph: Graph) -> list[_Place]:
    """Return the tensors from the loss's input to the output of the last use.

    Raises:
        PackpropError: If there are several paths, or a function on the path has no place in the recursion.
    """
    if len(graph.losses) != 1:
        raise _refused(f"{len(graph.losses)} losses", "the recursion starts from one loss")
    for leaf in graph.leaves():
        sites = [site for use in graph.uses for site in use.sites if site.leaf is leaf]
        if len(sites) > 1 or not sites[0].direct or not sites[0].entry.linear:
            raise _refused(
                f"parameter {graph.name(leaf)!r}",
                "it is used more than once, or not by an affine function: its block is not that of one layer",
            )
    masks = dependence(graph)
    edge = graph.losses[0].entrance.edge
    edges = [edge]
    while True:
        node = edge.node
        inputs = [
            (place, GradientEdge(above, output))
            for place, (above, output) in enumerate(node.next_functions)
            if above is not None and masks[above]
        ]
        if not inputs:
            break
        if len(inputs) > 1:
            raise _refused(node.name(), "paths meet there: the model is no chain of layers")
        ((number, edge),) = inputs
        if has_complex_numbers(node):
            raise _refused(
                node.name(), "it takes complex numbers: their averages are not those of real entries"
            )
        if kind_of(node, [number]) == "nonlinear":
            raise _refused(node.name(), "it is neither linear (by parts) nor elementwise")
        edges.append(edge)
    shapes = [torch.Size(made_by(edge.node)[edge.output_nr].shape) for edge in edges]
    layouts = layouts_at(graph, list(zip(edges, shapes, strict=True)))
    if not isinstance(layouts, list):
        raise _refused(edges[layouts].node.name(), "it is not seen where its output holds the samples")
    return [_Place(*each) for each in zip(edges, shapes, layouts, strict=True)]


def _refused(where: str, why: str) -> PackpropError:
    return PackpropError(
        ASKED,
        where,
        why,
        "ask for KFLR() or KFAC(), which are defined on every graph, or set requires_grad=False upstream",
    )


def _averaged(
    graph: Graph, step: _Step, matrix: Tensor, curvature: Curvature, average_jacobians: bool
) -> Tensor:
    """Return the matrix below a function: ``1/N sum_n J_n^T M J_n``, plus the function's own curvature."""
    place, below = step.place, step.below
    node = place.edge.node
    name = name_of_node(node)
    if name in RESHAPES and _samples_lead(place.layout) and _samples_lead(below.layout):
        return matrix
    if is_shared(node, place.layout, below.edge, below.layout):
        ends = place.edge, place.shape, place.layout, below.edge, below.layout
        jacobian = SharedRows(*ends, matrix, torch.is_grad_enabled()).rows().flatten(1).to(matrix.dtype)
        result: Tensor = jacobian.mT @ matrix @ jacobian
        return result
    if name not in ENTRYWISE:
        return _below_any_function(step, matrix)
    result = _below_entrywise_function(step, matrix, average_jacobians)
    if curvature == "ggn" or kind_of(node, [0]) != "elementwise":
        return result
    return result + _own_curvature(graph, step, curvature).to(matrix.dtype).diag()


def _below_any_function(step: _Step, matrix: Tensor) -> Tensor:
    """Return ``1/N sum_n J_n^T M J_n`` with full Jacobians, from unit columns."""
    place, below = step.place, step.below
    units = unit_columns(place.shape, place.layout, matrix)
    (rows_below,) = pull_columns([place.edge], [below.edge], [units], create_graph=torch.is_grad_enabled())
    if rows_below is None:
        return matrix.new_zeros(1, 1).expand(below.shape.numel() // step.samples, -1)
    jacobian = flat(below.layout.to_front(rows_below, 1), 2).to(matrix.dtype)
    return _mean_of_products(jacobian, matrix)


def _below_entrywise_function(step: _Step, matrix: Tensor, average_jacobians: bool) -> Tensor:
    """Return ``1/N sum_n J_n^T M J_n`` for a function of single entries, whose node gives its derivatives."""
    node: Any = step.place.edge.node  # nodes are callable, but torch's annotations do not say so
    made = made_by(node)[0]
    derivative: Any = node(torch.ones(step.place.shape, dtype=made.dtype, device=made.device))
    derivative = derivative[0] if isinstance(derivative, tuple) else derivative
    by_sample = flat(step.below.layout.to_front(derivative), 1).to(matrix.dtype)
    if average_jacobians:
        return matrix * torch.outer(by_sample.mean(0), by_sample.mean(0))
    return matrix * (by_sample.mT @ by_sample) / step.samples


def _own_curvature(graph: Graph, step: _Step, curvature: Curvature) -> Tensor:
    """Return ``r = f'' dL/df`` of an elementwise function, summed over samples; ``curvature`` sets its sign."""
    place, below = step.place, step.below
    (gradient,) = gradients_at(graph, [place.edge])
    nonlinearity = Nonlinearity(place.edge.node, below.edge, below.shape, 0)
    own = residual(nonlinearity, gradient, torch.is_grad_enabled())
    diagonal = below.layout.to_front(own).sum(0).flatten()
    if curvature != "hessian":
        diagonal = at_least(diagonal, 0.0) if curvature == "pch-clip" else diagonal.abs()
    return diagonal


def _samples_lead(layout: Layout) -> bool:
    """Tell whether samples are on the leading axis, and nothing else is folded into it."""
    return layout.axis is None or (layout.axis == 0 and not layout.folded)


def _factor(use: ReachedUse, site: Site, place: _Place, matrix: Tensor) -> Tensor:
    """Turn the matrix at the output of a use into that of the factor on its inputs, or that in the leaf."""
    fans = site.entry.fans
    entries = len(matrix)
    if fans is not None and fans.groups == 1 and fans.fan_out == entries and _samples_lead(place.layout):
        return matrix  # the cotangent of the output multiplies the inputs as it is
    scales = site.entry.structure == "Scale" and site.entry.constant
    if scales and place.layout.axis == 0 and not place.layout.folded and site.leaf.shape == place.shape[1:]:
        ones = matrix.new_ones(()).expand(1, *place.shape)
        factors = rows(site.structure_of([ones], use.layouts, slice(0, 1))).flatten().to(matrix.dtype)
        return matrix * torch.outer(factors, factors)
    units = unit_columns(place.shape, place.layout, matrix)
    structure = site.structure_of([units], use.layouts, slice(0, 1))  # of the first sample
    if not isinstance(structure, Dense) and structure.cotangent is not None:
        to_cotangent = structure.cotangent[:, 0].sum(1).flatten(1).to(matrix.dtype)  # the same for all samples
        factor: Tensor = to_cotangent.mT @ matrix @ to_cotangent
        return factor
    last = site.structure_of([units], use.layouts, slice(place.layout.samples - 1, None))
    differ = is_traced() or not site.entry.constant  # a traced graph must serve samples that differ
    if differ or has_fault((rows(structure) != rows(last)).any()):
        structure = site.structure_of([units], use.layouts, slice(None))
    jacobian = flat_rows(structure).to(matrix.dtype)
    return _mean_of_products(jacobian, matrix)


def _mean_of_products(jacobian: Tensor, matrix: Tensor) -> Tensor:
    """Return ``1/N sum_n J_n^T M J_n`` with Jacobians ``[a, n, i]``."""
    samples = jacobian.shape[1]
    product = (matrix @ jacobian.flatten(1)).unflatten(1, jacobian.shape[1:])
    total: Tensor = jacobian.flatten(0, 1).mT @ product.flatten(0, 1)
    return total if samples == 1 else total / samples
