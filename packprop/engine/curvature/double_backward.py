"""Columns and diagonals of the Hessian by double backward, also of terms that no sample enters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.algebra.joining import join
from packprop.engine.algebra.structures import rows
from packprop.engine.curvature.columns import unit_columns
from packprop.engine.curvature.linear import vjps, with_zeros
from packprop.engine.curvature.routes import require_third_derivatives, upstream_first
from packprop.engine.curvature.second_order import (
    differentiating_twice,
    gradients_at,
    named,
    require_second_derivatives,
)
from packprop.engine.functions.nodes import ENTRYWISE, made_by, name_of_node
from packprop.engine.functions.operands import ENTRY_BY_ENTRY, REARRANGING, SUMS, is_linear
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.pull import derivatives, pull_columns
from packprop.engine.graph.search import leaves_above
from packprop.engine.graph.sweep import SweepOptions, sweep
from packprop.engine.tensors.dry import chunk_starts
from packprop.engine.tensors.long_work import doing, expect
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.random import device_of_draws
from packprop.types import Seed

BATCHED_ENTRIES = 2**23
"""Largest number of entries, over all outputs of uses, in the columns of one double backward."""


LARGEST_COLUMNS = 2**26
"""Largest number of entries, over all outputs of uses, in one chunk of columns of a parameter's entries."""


BY_DOUBLE_BACKWARD = "columns by double backward"
"""Name of this kind of work in estimates of time."""


def hessian_columns(
    graph: Graph, uses: Sequence[ReachedUse], create_graph: bool
) -> Iterator[tuple[list[list[Tensor | None]], list[list[Tensor | None]]]]:
    """Yield unit columns u at the outputs of some uses, and ``H u`` with H the Hessian in these outputs.

    Args:
        graph: The graph, with its samples located.
        uses: The uses, whose outputs are taken together.
        create_graph: Whether columns are differentiable.

    Yields:
        u, then ``H u``: ``[v, *y]`` for each use and output, ``None`` for outputs that the pass does not reach.
    """
    require_second_derivatives(graph.roots, [site.leaf for use in uses for site in use.sites], named(graph))
    places = [(use, index) for use in uses for index in use.nodes]
    edges = [GradientEdge(*use.nodes[index]) for use, index in places]
    with differentiating_twice(graph.label(uses[0])), torch.enable_grad():
        reached = gradients_at(graph, edges, create_graph=True)
    gradients = [
        _zeros_at(use, index) if gradient is None else gradient
        for (use, index), gradient in zip(places, reached, strict=True)
    ]

    def by_use(columns: Sequence[Tensor | None], count: int) -> list[list[Tensor | None]]:
        known = dict(zip(places, with_zeros(columns, gradients, count), strict=True))
        return [[known.get((use, index)) for index in range(len(use.shapes))] for use in uses]

    total = sum(gradient.numel() for gradient in gradients)
    step = max(1, BATCHED_ENTRIES // max(1, total))
    expect(BY_DOUBLE_BACKWARD, total // max(1, graph.samples))
    for active, ((use, index), gradient) in enumerate(zip(places, gradients, strict=True)):
        layout = use.layouts[index]
        entries = gradient.numel() // layout.samples
        for start in chunk_starts(entries, step):
            stop = min(entries, start + step)
            unit = unit_columns(gradient.shape, layout, gradient, start, stop)
            with doing(BY_DOUBLE_BACKWARD, stop - start):
                columns = _derivatives_along(graph.label(use), gradient, edges, unit, create_graph)
            units = [unit if place == active else None for place in range(len(places))]
            yield by_use(units, stop - start), by_use(columns, stop - start)


def _zeros_at(use: ReachedUse, index: int) -> Tensor:
    leaf = use.sites[0].leaf
    return torch.zeros(use.shapes[index], device=leaf.device, dtype=leaf.dtype)


def _derivatives_along(
    where: str, gradient: Tensor, ends: Sequence[Any], vectors: Tensor, create_graph: bool
) -> list[Tensor | None]:
    """Return derivatives of ``gradient`` along each of ``vectors [v, *y]``, at every end ``[v, *end]``."""
    if not gradient.requires_grad:
        return [None] * len(ends)
    with differentiating_twice(where):
        return pull_columns([gradient], ends, [vectors], create_graph=create_graph)


def parameter_diagonals(
    graph: Graph, leaves: Sequence[Tensor], per_sample: bool, create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each leaf with the diagonals of its Hessian: of each sample ``[n, *p]``, or summed ``[1, *p]``."""
    if not leaves:
        return
    require_second_derivatives(graph.roots, leaves, named(graph))
    with differentiating_twice(f"parameter {graph.name(leaves[0])!r}"), torch.enable_grad():
        if per_sample:
            gradients = _sample_gradients(graph, leaves)
        else:
            whole = with_zeros(gradients_at(graph, leaves, create_graph=True), leaves, None)
            gradients = [gradient[None] for gradient in whole]
    expect(BY_DOUBLE_BACKWARD, sum(gradient.numel() for gradient in gradients))
    held = sum(shape.numel() for use in graph.uses for shape in use.shapes)
    at_once = max(1, LARGEST_COLUMNS // max(1, held))
    for leaf, gradient in zip(leaves, gradients, strict=True):
        yield leaf, diagonals(f"parameter {graph.name(leaf)!r}", leaf, gradient, create_graph, at_once)


def _sample_gradients(graph: Graph, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return differentiable per-sample gradients ``[n, *p]`` of some leaves."""
    wanted = {id(leaf) for leaf in leaves}
    parts: dict[int, list[Any]] = {}

    def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
        for site in use.sites:
            if id(site.leaf) in wanted:
                structure = site.structure_of(cotangents, use.layouts, slice(None))
                parts.setdefault(id(site.leaf), []).append(structure)

    edges = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
    sweep(edges, graph.root_gradients(), graph.uses, visit, SweepOptions(create_graph=True))
    return [
        rows(join(parts[id(leaf)]))[0] if id(leaf) in parts else leaf.new_zeros(graph.samples, *leaf.shape)
        for leaf in leaves
    ]


def diagonals(
    where: str, leaf: Tensor, gradient: Tensor, create_graph: bool, at_once: int | None = None
) -> Tensor:
    """Return the diagonal of the derivative of each gradient ``[n, *p]`` in the leaf.

    ``at_once``: the largest number of columns in a chunk.
    """
    entries, samples = leaf.numel(), gradient.shape[0]
    if not gradient.requires_grad or not gradient.numel():
        return torch.zeros_like(gradient, dtype=accumulation_dtype(gradient.dtype))
    with torch.enable_grad():
        flat = gradient.reshape(samples * entries)
    step = max(1, min(flat.numel(), BATCHED_ENTRIES // max(1, 16 * entries), at_once or flat.numel()))
    pieces, done = [], 0
    for start in chunk_starts(flat.numel(), step):
        stop = min(flat.numel(), start + step)
        if start > done:  # a dry run skips chunks, but counts the memory of all of them
            pieces.append(flat.new_zeros(start - done))
        done = stop
        places = torch.arange(start, stop, device=flat.device)
        unit = torch.zeros(stop - start, flat.numel(), dtype=flat.dtype, device=flat.device)
        unit[torch.arange(stop - start, device="cpu"), places] = 1.0
        with doing(BY_DOUBLE_BACKWARD, stop - start):
            (columns,) = _derivatives_along(where, flat, [leaf], unit, create_graph)
        if columns is None:
            pieces.append(flat.new_zeros(stop - start))
        else:
            own = places % entries
            pieces.append(columns.reshape(stop - start, entries).gather(1, own[:, None])[:, 0])
    return torch.cat(pieces).reshape(gradient.shape).to(accumulation_dtype(gradient.dtype))


def estimated_diagonals(
    graph: Graph, leaves: Sequence[Tensor], seed: Seed, create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each leaf with an unbiased estimate of its Hessian's diagonal, ``[*p]`` (Bekas et al. 2007).

    The estimate is the mean of ``u * (H u)`` over draws of random signs u. Each draw takes one Hessian-vector
    product, for any number of parameters.
    """
    if create_graph:
        require_third_derivatives(graph, leaves)
    require_second_derivatives(graph.roots, leaves, named(graph))
    draws, where = seed.mc_samples or 1, f"parameter {graph.name(leaves[0])!r}"
    with differentiating_twice(where):
        with torch.enable_grad():
            gradients = gradients_at(graph, leaves, create_graph=True)
        totals = [leaf.new_zeros(leaf.shape, dtype=accumulation_dtype(leaf.dtype)) for leaf in leaves]
        for _ in chunk_starts(draws, 1):  # a dry run draws a few: sums take no more memory
            signs = [_signs(leaf, seed.generator) for leaf in leaves]
            found = vjps(gradients, leaves, signs, batched=False, create_graph=create_graph)
            products = with_zeros(found, leaves, None)
            totals = [
                total + (u * product).to(total.dtype)
                for total, u, product in zip(totals, signs, products, strict=True)
            ]
    for leaf, total in zip(leaves, totals, strict=True):
        yield leaf, total / draws


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw random signs of the shape of a tensor."""
    device = device_of_draws(generator, like)
    coins = torch.randint(0, 2, like.shape, generator=generator, device=device)
    return (2 * coins - 1).to(like.device, like.dtype)


def term_gradients(graph: Graph, leaves: Sequence[Tensor], create_graph: bool = False) -> list[Tensor | None]:
    """Return gradients of the terms without samples in some leaves; ``None`` for a leaf in no such term."""
    if not any(id(leaf) in graph.in_terms for leaf in leaves):
        return [None] * len(leaves)
    with torch.set_grad_enabled(create_graph):
        factors = gradients_at(graph, graph.terms)
        pairs = [(edge, at) for edge, at in zip(graph.terms, factors, strict=True) if at is not None]
        edges, seeds = [edge for edge, _ in pairs], [at for _, at in pairs]
        return pull_columns(edges, leaves, seeds, batched=False, create_graph=create_graph)


def term_diagonals(
    graph: Graph, leaves: Sequence[Tensor], create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each leaf in a term without samples, with the diagonal ``[*p]`` of the Hessian of these terms.

    If each entry of a leaf enters functions of its own, as in most penalties, one product with ones gives the
    whole diagonal. Otherwise packprop differentiates the gradient entry by entry.
    """
    chosen = [leaf for leaf in leaves if id(leaf) in graph.in_terms]
    if not chosen:
        return
    require_second_derivatives(graph.roots, chosen, named(graph))
    with differentiating_twice(f"parameter {graph.name(chosen[0])!r}"):
        gradients = term_gradients(graph, chosen, create_graph=True)
    coupled = _coupled_leaves(graph)
    for leaf, gradient in zip(chosen, gradients, strict=True):
        if gradient is None or not gradient.requires_grad:
            continue
        where = f"parameter {graph.name(leaf)!r}"
        if id(leaf) in coupled:
            with torch.enable_grad():
                gradient = gradient.unsqueeze(0)
            yield leaf, diagonals(where, leaf, gradient, create_graph)[0]
            continue
        with differentiating_twice(where):
            ones = torch.ones_like(gradient)
            (diagonal,) = derivatives([gradient], [leaf], [ones], create_graph=create_graph)
        if diagonal is not None:
            yield leaf, diagonal.to(accumulation_dtype(diagonal.dtype))


def _coupled_leaves(graph: Graph) -> set[int]:
    """Return the identities of leaves with several entries in one nonlinear function: H may not be diagonal."""
    # the output that put an output's entries in their order; ``None`` if an entry is made of several
    arranged: dict[tuple[Node | None, int], tuple[Node, int] | None] = {}
    coupled: set[Node] = set()
    for node in upstream_first(graph, [edge.node for edge in graph.terms]):
        given = {place: edge for place, edge in enumerate(node.next_functions) if edge in arranged}
        if getattr(node, "variable", None) is not None:
            arranged[node, 0] = (node, 0)
        if not given:
            continue
        entries, name = [arranged[edge] for edge in given.values()], name_of_node(node)
        alike = None not in entries and len(set(entries)) == 1
        for output, made in enumerate(made_by(node)):
            arranged[node, output] = None
            if name in REARRANGING and None not in entries:
                arranged[node, output] = (node, output)
            elif alike and (name in ENTRYWISE or name in ENTRY_BY_ENTRY - SUMS or name in ("Add", "Sub")):
                above, number = next(iter(given.values()))
                assert above is not None
                same_shape = getattr(above, "variable", None) is not None or (
                    made_by(above)[number].shape == made.shape
                )
                arranged[node, output] = entries[0] if same_shape else None
            elif not is_linear(node, [*given]):
                coupled.add(node)
    return set(map(id, leaves_above(coupled)))
