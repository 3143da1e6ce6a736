"""Curvature averaged over samples layer by layer: the recursion of KFRA and of Hessian backpropagation.

# NOTE [Averaged recursion]
One matrix goes down a chain: at the loss ``M = sum_n H_n``, below a function f ``1/N sum_n J_n^T M J_n`` with
J_n the Jacobian of f for sample n, and, for Hessians, the curvature ``r = f'' dL/df`` of elementwise functions,
summed over samples, on its diagonal. Where Jacobians are the same for all samples the average is exact;
elsewhere it is an approximation, made once for each function. It is defined on chains alone: where paths meet,
products of what came down each would be needed, and they are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.algebra.statistics import flat_rows
from packprop.algebra.structures import Dense, rows
from packprop.curvature.columns import unit_columns
from packprop.curvature.dependence import dependence
from packprop.curvature.nonlinearities import residual
from packprop.curvature.output_diagonals import flat
from packprop.curvature.routes import Nonlinearity
from packprop.curvature.second_order import gradients_at
from packprop.curvature.seeds import columns
from packprop.curvature.shared_rows import SharedRows, is_shared
from packprop.errors import PackpropError
from packprop.functions.nodes import ENTRYWISE, RESHAPES, kind_of, name_of_node
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.pull import pull_columns
from packprop.graph.separation import layouts_at
from packprop.graph.traversal import made_by
from packprop.tensors.dry import has_fault
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype
from packprop.types import Seed

ASKED = "Curvature averaged over samples (KFRA, HBP) was asked for."


Curvature = Literal["ggn", "hessian", "pch-abs", "pch-clip"]


@dataclass(frozen=True)
class _Place:
    """A tensor of the chain: where it came from, its shape, and where it holds the samples."""

    edge: GradientEdge
    shape: torch.Size
    layout: Layout


def averaged_factors(
    graph: Graph, seed: Seed, curvature: Curvature, average_jacobians: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each leaf with the factor B of its block, ``[o, o]`` or ``[p, p]``.

    Args:
        graph: With its samples located.
        seed: How the Hessian of the loss is taken, exact or sampled.
        curvature: Whether elementwise functions add their curvature, and what is done with its sign.
        average_jacobians: Whether Jacobians of elementwise functions are averaged, not their products.

    Raises:
        PackpropError: If the loss is not at the end of one chain.
    """
    places = _chain(graph)
    (group,) = columns(graph, seed, torch.is_grad_enabled())
    fed = flat(places[0].layout.to_front(group.chunk(0, group.count)[0], 1), 2)
    fed = fed.to(accumulation_dtype(fed.dtype))
    matrix = torch.einsum("vni,vnj->ij", fed, fed)
    here = {(node, output): f for f in graph.uses for node, output in f.nodes.values()}
    for place, below in zip(places, [*places[1:], None], strict=True):
        found = here.get((place.edge.node, place.edge.output_nr))
        if found is not None:
            for site in found.sites:
                yield site.leaf, _factor(found, site, place, matrix)
        if below is not None:
            matrix = _averaged(graph, place, below, matrix, curvature, average_jacobians)


def _chain(graph: Graph) -> list[_Place]:
    """Tensors from the loss's input to the output of the last use.

    Raises:
        PackpropError: Where there is more than one way.
    """
    if len(graph.losses) != 1:
        raise _refused(f"{len(graph.losses)} losses", "the recursion starts from one loss")
    for leaf in graph.leaves():
        sites = [site for f in graph.uses for site in f.sites if site.leaf is leaf]
        if len(sites) > 1 or not sites[0].direct or not sites[0].entry.linear:
            raise _refused(
                f"parameter {graph.name(leaf)!r}",
                "it is used more than once, or not by an affine function: its block is not that of one layer",
            )
    masks = dependence(graph)
    edge = graph.losses[0].call.edge
    edges = [edge]
    while True:
        node = edge.node
        inputs = [(up, output) for up, output in node.next_functions if up is not None and masks[up]]
        if not inputs:
            break
        if len(inputs) > 1:
            raise _refused(node.name(), "paths meet there: the model is no chain of layers")
        places = [place for place, (up, _) in enumerate(node.next_functions) if up is not None and masks[up]]
        if kind_of(node, places) == "nonlinear":
            raise _refused(node.name(), "it is neither linear (by parts) nor elementwise")
        source, output = inputs[0]
        edge = GradientEdge(source, output)
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
    graph: Graph, place: _Place, below: _Place, matrix: Tensor, curvature: Curvature, average_jacobians: bool
) -> Tensor:
    """``1/N sum_n J_n^T M J_n``, and curvature of its own."""
    node, samples = place.edge.node, graph.samples
    name = name_of_node(node)
    if name in RESHAPES and _in_order(place.layout) and _in_order(below.layout):
        return matrix
    if is_shared(node, place.layout, below.edge, below.layout):
        ends = place.edge, place.shape, place.layout, below.edge, below.layout
        jacobian = SharedRows(*ends, matrix, torch.is_grad_enabled()).rows().flatten(1).to(matrix.dtype)
        result: Tensor = jacobian.mT @ matrix @ jacobian
        return result
    if name not in ENTRYWISE:
        units = unit_columns(place.shape, place.layout, matrix)
        (pulled,) = pull_columns([place.edge], [below.edge], [units], create_graph=torch.is_grad_enabled())
        if pulled is None:
            return matrix.new_zeros(1, 1).expand(below.shape.numel() // samples, -1)
        jacobian = flat(below.layout.to_front(pulled, 1), 2).to(matrix.dtype)
        return _mean_of_products(jacobian, matrix)
    call: Any = node
    made = made_by(node)[0]
    slope: Any = call(torch.ones(place.shape, dtype=made.dtype, device=made.device))
    slope = slope[0] if isinstance(slope, tuple) else slope
    each = flat(below.layout.to_front(slope), 1).to(matrix.dtype)
    if average_jacobians:
        result = matrix * torch.outer(each.mean(0), each.mean(0))
    else:
        result = matrix * (each.mT @ each) / samples
    if curvature == "ggn" or kind_of(node, [0]) != "elementwise":
        return result
    (arriving,) = gradients_at(graph, [place.edge])
    nonlinearity = Nonlinearity(node, below.edge, below.shape, 0)
    own = residual(nonlinearity, arriving, torch.is_grad_enabled())
    diagonal = below.layout.to_front(own).sum(0).flatten().to(matrix.dtype)
    if curvature != "hessian":
        diagonal = diagonal.clamp(min=0) if curvature == "pch-clip" else diagonal.abs()
    return result + diagonal.diag()


def _in_order(layout: Layout) -> bool:
    return layout.axis is None or (layout.axis == 0 and layout.parts == 1)


def _factor(found: ReachedUse, site: Any, place: _Place, matrix: Tensor) -> Tensor:
    """The matrix at the output of a use, in what multiplies its inputs, or in the leaf."""
    fans = site.entry.fans
    entries = len(matrix)
    if fans is not None and fans.groups == 1 and fans.fan_out == entries and _in_order(place.layout):
        return matrix  # what multiplies the inputs is the output itself
    alone = site.entry.structure == "Scale" and site.entry.constant
    if alone and place.layout.axis == 0 and place.layout.parts == 1 and site.leaf.shape == place.shape[1:]:
        ones = matrix.new_ones(()).expand(1, *place.shape)
        slope = rows(site.structure_of([ones], found.layouts, slice(0, 1))).flatten().to(matrix.dtype)
        return matrix * torch.outer(slope, slope)
    units = unit_columns(place.shape, place.layout, matrix)
    one = site.structure_of([units], found.layouts, slice(0, 1))
    if not isinstance(one, Dense) and one.cotangent is not None:
        to_cotangent = one.cotangent[:, 0].sum(1).flatten(1).to(matrix.dtype)  # the same for all samples
        factor: Tensor = to_cotangent.mT @ matrix @ to_cotangent
        return factor
    known = one
    last = site.structure_of([units], found.layouts, slice(place.layout.samples - 1, None))
    same = site.entry.constant and not has_fault((rows(one) != rows(last)).any())
    if not same:  # entries of one sample alone
        known = site.structure_of([units], found.layouts, slice(None))
    jacobian = flat_rows(known).to(matrix.dtype)
    return _mean_of_products(jacobian, matrix)


def _mean_of_products(jacobian: Tensor, matrix: Tensor) -> Tensor:
    """``1/N sum_n J_n^T M J_n`` with Jacobians ``[a, n, i]``."""
    samples = jacobian.shape[1]
    product = (matrix @ jacobian.flatten(1)).unflatten(1, jacobian.shape[1:])
    total: Tensor = jacobian.flatten(0, 1).mT @ product.flatten(0, 1)
    return total if samples == 1 else total / samples
