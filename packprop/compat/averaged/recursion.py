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
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.algebra import Dense, rows
from packprop.engine.curvature import columns, kind_of_map, residuals, shared_rows, unit_columns, vjps
from packprop.engine.graph import Graph, ReachedUse, Site
from packprop.engine.samples import Place, places_at
from packprop.engine.tensors import Layout, accumulation_dtype, at_least, has_fault, is_traced
from packprop.errors import PackpropError
from packprop.types import Seed

Curvature = Literal["ggn", "hessian", "pch-abs", "pch-clip"]

REFUSED = {
    "complex": "it takes complex numbers: their averages are not those of real entries",
    "nonlinear": "it is neither linear (by parts) nor elementwise",
}
"""Kinds of functions that the recursion cannot pass, and the reasons."""


def averaged_factors(
    graph: Graph, seed: Seed, curvature: Curvature, average_jacobians: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each leaf with the factor B of its block, ``[o, o]`` or ``[p, p]``.

    Args:
        graph: The graph, with its samples located.
        seed: The seed of the loss's Hessian, exact or sampled.
        curvature: ``"ggn"`` adds no curvature of elementwise functions; others add it, and differ in its sign.
        average_jacobians: Average Jacobians of elementwise functions instead of products of Jacobians.

    Raises:
        PackpropError: If the graph is not one chain of functions that the recursion can pass.
    """
    places, kinds = _chain(graph)
    (group,) = columns(graph, seed, torch.is_grad_enabled())
    root = _flat(places[0].layout.to_front(group.chunk(0, group.count)[0], 1), 2)
    root = root.to(accumulation_dtype(root.dtype))
    matrix = torch.einsum("vni,vnj->ij", root, root)
    use_at = {(node, output): use for use in graph.uses for node, output in use.nodes.values()}
    for place, below, kind in zip(places, [*places[1:], None], [*kinds, None], strict=True):
        use = use_at.get((place.edge.node, place.edge.output_nr))
        if use is not None:
            for site in use.sites:
                yield site.leaf, _factor(use, site, place, matrix)
        if below is not None:
            if kind in ("piecewise", "elementwise"):
                matrix = _below_entrywise_function(place, below, matrix, average_jacobians)
            elif kind != "reshape" or not (_samples_lead(place.layout) and _samples_lead(below.layout)):
                matrix = _below_any_function(place, below, matrix)
            if curvature != "ggn" and kind == "elementwise":
                matrix = matrix + _own_curvature(graph, place, below, curvature).to(matrix.dtype).diag()


def _chain(graph: Graph) -> tuple[list[Place], list[str]]:
    """Return the tensors from the loss's input to the last use's output, and the kinds of functions between.

    Raises:
        PackpropError: If there are several losses or paths, a function that the recursion cannot pass, or a
            parameter with several uses or one that is not affine.
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
    dependent = {node for use in graph.uses for node, _ in use.nodes.values()}
    for node in graph.order:  # each node comes after the nodes upstream of it
        if any(above in dependent for above, _ in node.next_functions):
            dependent.add(node)
    edges: list[GradientEdge] = [graph.losses[0].entrance.edge]
    kinds: list[str] = []
    while True:
        node = edges[-1].node
        inputs = [
            (number, GradientEdge(above, output))
            for number, (above, output) in enumerate(node.next_functions)
            if above is not None and above in dependent
        ]
        if not inputs:
            break
        if len(inputs) > 1:
            raise _refused(node.name(), "paths meet there: the model is no chain of layers")
        ((number, edge),) = inputs
        kinds.append(kind_of_map(node, number))
        if kinds[-1] in REFUSED:
            raise _refused(node.name(), REFUSED[kinds[-1]])
        edges.append(edge)
    places = places_at(graph, edges)
    if isinstance(places, int):
        raise _refused(edges[places].node.name(), "packprop cannot tell where its output holds the samples")
    return places, kinds


def _refused(where: str, why: str) -> PackpropError:
    return PackpropError(
        "Curvature averaged over samples (KFRA, HBP) was asked for.",
        where,
        why,
        "ask for KFLR() or KFAC(), which are defined on every graph, or set requires_grad=False upstream",
    )


def _below_any_function(place: Place, below: Place, matrix: Tensor) -> Tensor:
    """Return ``1/N sum_n J_n^T M J_n`` from the Jacobian that samples share, or by sweeping unit columns."""
    shared = shared_rows(place, below, torch.is_grad_enabled())
    if shared is not None:
        jacobian = shared.rows().flatten(1).to(matrix.dtype)
        result: Tensor = jacobian.mT @ matrix @ jacobian
        return result
    units = unit_columns(place.shape, place.layout, matrix, 0, len(matrix))
    (pulled,) = vjps([place.edge], [below.edge], [units], create_graph=torch.is_grad_enabled())
    if pulled is None:
        entries = below.layout.entries_of_sample(below.shape)
        return matrix.new_zeros(entries, entries)
    return _mean_of_products(_flat(below.layout.to_front(pulled, 1), 2).to(matrix.dtype), matrix)


def _below_entrywise_function(place: Place, below: Place, matrix: Tensor, average_jacobians: bool) -> Tensor:
    """Return ``1/N sum_n J_n^T M J_n`` for a function of single entries, whose node gives its derivatives."""
    node: Any = place.edge.node  # nodes are callable, but torch's annotations do not say so
    derivative: Any = node(torch.ones(place.shape, dtype=place.dtype, device=place.device))
    derivative = derivative[0] if isinstance(derivative, tuple) else derivative
    by_sample = _flat(below.layout.to_front(derivative), 1).to(matrix.dtype)
    if average_jacobians:
        return matrix * torch.outer(by_sample.mean(0), by_sample.mean(0))
    return matrix * (by_sample.mT @ by_sample) / below.layout.samples


def _own_curvature(graph: Graph, place: Place, below: Place, curvature: Curvature) -> Tensor:
    """Return ``r = f'' dL/df`` of an elementwise function, summed over samples; ``curvature`` sets its sign."""
    (own,) = residuals(graph, [place.edge.node], torch.is_grad_enabled())
    diagonal = below.layout.to_front(own).sum(0).flatten()
    if curvature != "hessian":
        diagonal = at_least(diagonal, 0.0) if curvature == "pch-clip" else diagonal.abs()
    return diagonal


def _samples_lead(layout: Layout) -> bool:
    """Tell whether samples are on the leading axis, and nothing else is folded into it."""
    return layout.axis is None or (layout.axis == 0 and not layout.folded)


def _factor(use: ReachedUse, site: Site, place: Place, matrix: Tensor) -> Tensor:
    """Turn the matrix at a use's output into ``B``: the factor beside the inputs, or the leaf's whole block."""
    entry, fans, layout = site.entry, site.entry.fans, place.layout
    if fans is not None and fans.groups == 1 and fans.fan_out == len(matrix) and _samples_lead(layout):
        return matrix  # the cotangent of the output multiplies the inputs as it is

    def structure_of(cotangent: Tensor, samples: slice) -> Any:
        return site.structure_of([cotangent], use.layouts, samples)

    first = slice(0, 1)
    scales = entry.structure == "Scale" and entry.constant and site.leaf.shape == place.shape[1:]
    if scales and layout.axis == 0 and not layout.folded:
        ones = matrix.new_ones(()).expand(1, *place.shape)
        factors = rows(structure_of(ones, first)).flatten().to(matrix.dtype)
        return matrix * torch.outer(factors, factors)
    units = unit_columns(place.shape, place.layout, matrix, 0, len(matrix))
    structure = structure_of(units, first)
    if not isinstance(structure, Dense) and structure.cotangent is not None:
        to_cotangent = structure.cotangent[:, 0].sum(1).flatten(1).to(matrix.dtype)  # the same for all samples
        factor: Tensor = to_cotangent.mT @ matrix @ to_cotangent
        return factor
    last = structure_of(units, slice(layout.samples - 1, None))
    differ = is_traced() or not entry.constant  # a traced graph must serve samples that differ
    if differ or has_fault((rows(structure) != rows(last)).any()):
        structure = structure_of(units, slice(None))
    return _mean_of_products(_flat(rows(structure), 2).to(matrix.dtype), matrix)


def _mean_of_products(jacobian: Tensor, matrix: Tensor) -> Tensor:
    """Return ``1/N sum_n J_n^T M J_n`` with Jacobians ``[a, n, i]``."""
    samples = jacobian.shape[1]
    product = (matrix @ jacobian.flatten(1)).unflatten(1, jacobian.shape[1:])
    total: Tensor = jacobian.flatten(0, 1).mT @ product.flatten(0, 1)
    return total if samples == 1 else total / samples


def _flat(front: Tensor, kept: int) -> Tensor:
    """Flatten all axes after the first ``kept`` to one axis, of extent 1 if there are none."""
    return front.reshape(*front.shape[:kept], front.shape[kept:].numel())
