"""Columns and diagonals of the Hessian by double backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.algebra.structures import join, rows
from packprop.curvature.columns import unit_columns
from packprop.curvature.routes import named, require_third_derivatives
from packprop.curvature.second_order import differentiating_twice, gradients_at, require_second_derivatives
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.pull import pull_columns
from packprop.graph.sweep import SweepOptions, sweep
from packprop.tensors.precision import accumulation_dtype
from packprop.types import Seed

BATCHED_ENTRIES = 2**23
"""Entries of all outputs of uses that columns by double backward may take at once."""


def output_columns(
    graph: Graph, uses: Sequence[ReachedUse], create_graph: bool, at_once: int | None = None
) -> Iterator[tuple[list[list[Tensor | None]], list[list[Tensor | None]]]]:
    """Unit columns u at the outputs of some uses, and ``H u`` with the Hessian of the roots in them.

    Args:
        graph: With its samples located.
        uses: Their outputs are taken together.
        create_graph: Whether columns shall be differentiable.
        at_once: Number of columns; by default as many as ``BATCHED_ENTRIES`` says.

    Yields:
        For each use and output, ``[v, *y]`` of both.
    """
    require_second_derivatives(graph.roots, [site.leaf for f in uses for site in f.sites], named(graph))
    places = [(f, index) for f in uses for index in f.nodes]
    edges = [GradientEdge(*f.nodes[index]) for f, index in places]
    with differentiating_twice(graph.label(uses[0])), torch.enable_grad():
        slopes = gradients_at(graph, edges, create_graph=True)
    slopes = [
        torch.zeros(f.recorded.shapes[index], device=_device(f), dtype=_dtype(f)) if slope is None else slope
        for (f, index), slope in zip(places, slopes, strict=True)
    ]
    total = sum(slope.numel() for slope in slopes if slope is not None)
    step = at_once or max(1, BATCHED_ENTRIES // max(1, total))
    for active, (f, index) in enumerate(places):
        slope = slopes[active]
        assert slope is not None
        layout = f.layouts[index]
        entries = slope.numel() // layout.samples
        for start in range(0, entries, step):
            stop = min(entries, start + step)
            unit = unit_columns(slope.shape, layout, slope, start, stop)
            columns = _hessian_columns(graph.label(f), slope, edges, unit, create_graph)
            vectors: list[list[Tensor | None]] = [[None] * len(other.recorded.shapes) for other in uses]
            products: list[list[Tensor | None]] = [[None] * len(other.recorded.shapes) for other in uses]
            for place, (other, output) in enumerate(places):
                found = columns[place]
                zeros = unit.new_zeros(stop - start, *other.recorded.shapes[output])
                vectors[uses.index(other)][output] = unit if place == active else zeros
                products[uses.index(other)][output] = zeros if found is None else found
            yield vectors, products


def _device(found: ReachedUse) -> torch.device:
    return found.sites[0].leaf.device


def _dtype(found: ReachedUse) -> torch.dtype:
    return found.sites[0].leaf.dtype


def _hessian_columns(
    where: str, slope: Tensor, ends: Sequence[Any], vectors: Tensor, create_graph: bool
) -> list[Tensor | None]:
    """Derivatives of ``slope`` along each of ``vectors [v, *y]``, at every end ``[v, *end]``."""
    if not slope.requires_grad:
        return [None] * len(ends)
    with differentiating_twice(where):
        return pull_columns([slope], ends, [vectors], create_graph=create_graph)


def parameter_diagonals(
    graph: Graph, leaves: Sequence[Tensor], per_sample: bool, create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each leaf with the diagonals of its Hessian: of each sample ``[n, *p]``, or summed ``[1, *p]``."""
    if not leaves:
        return
    require_second_derivatives(graph.roots, leaves, named(graph))
    with differentiating_twice(f"parameter {graph.name(leaves[0])!r}"), torch.enable_grad():
        slopes = _sample_gradients(graph, leaves) if per_sample else _whole_gradients(graph, leaves)
    for leaf, slope in zip(leaves, slopes, strict=True):
        yield leaf, _diagonals(f"parameter {graph.name(leaf)!r}", leaf, slope, create_graph)


def _whole_gradients(graph: Graph, leaves: Sequence[Tensor]) -> list[Tensor]:
    found = gradients_at(graph, leaves, create_graph=True)
    found = [t.to_dense() if t is not None and t.is_sparse else t for t in found]
    pairs = zip(leaves, found, strict=True)
    return [torch.zeros_like(leaf)[None] if slope is None else slope[None] for leaf, slope in pairs]


def _sample_gradients(graph: Graph, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Differentiable gradients of single samples ``[n, *p]`` of some leaves."""
    wanted = {id(leaf) for leaf in leaves}
    parts: dict[int, list[Any]] = {}

    def visit(found: ReachedUse, cotangents: list[Tensor | None]) -> None:
        for site in found.sites:
            if id(site.leaf) in wanted:
                parts.setdefault(id(site.leaf), []).append(
                    site.structure_of(cotangents, found.layouts, slice(None))
                )

    edges = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
    sweep(edges, graph.root_gradients(), graph.uses, visit, SweepOptions(create_graph=True))
    return [
        rows(join(parts[id(leaf)]))[0] if id(leaf) in parts else leaf.new_zeros(graph.samples, *leaf.shape)
        for leaf in leaves
    ]


def _diagonals(where: str, leaf: Tensor, slope: Tensor, create_graph: bool) -> Tensor:
    """Diagonal of the derivative of each of ``slope [n, *p]`` in the leaf."""
    entries, samples = leaf.numel(), slope.shape[0]
    if not slope.requires_grad:
        return torch.zeros_like(slope)
    with torch.enable_grad():
        flat = slope.reshape(samples * entries)
    step = max(1, min(flat.numel(), BATCHED_ENTRIES // max(1, 16 * entries)))
    found = []
    for start in range(0, flat.numel(), step):
        stop = min(flat.numel(), start + step)
        places = torch.arange(start, stop, device=flat.device)
        unit = torch.zeros(stop - start, flat.numel(), dtype=flat.dtype, device=flat.device)
        unit[torch.arange(stop - start), places] = 1.0
        (columns,) = _hessian_columns(where, flat, [leaf], unit, create_graph)
        if columns is None:
            found.append(flat.new_zeros(stop - start))
        else:
            own = places % entries
            found.append(columns.reshape(stop - start, entries).gather(1, own[:, None])[:, 0])
    return torch.cat(found).reshape(slope.shape).to(accumulation_dtype(slope.dtype))


def estimated_diagonals(
    graph: Graph, leaves: Sequence[Tensor], seed: Seed, create_graph: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Unbiased estimates ``u * (H u)`` with random signs u (Bekas et al. 2007), the mean over draws ``[*p]``.

    One Hessian-vector product for each draw, whatever the number of parameters.
    """
    if create_graph:
        require_third_derivatives(graph, leaves)
    require_second_derivatives(graph.roots, leaves, named(graph))
    draws, where = seed.mc_samples or 1, f"parameter {graph.name(leaves[0])!r}"
    with differentiating_twice(where):
        with torch.enable_grad():
            slopes = _whole_gradients(graph, leaves)
        totals: list[Tensor | float] = [0.0] * len(leaves)
        for _ in range(draws):
            signs = [_signs(leaf, seed.generator) for leaf in leaves]
            pairs = [(g, u[None]) for g, u in zip(slopes, signs, strict=True) if g.requires_grad]
            found: Any = [None] * len(leaves)
            if pairs:
                found = torch.autograd.grad(
                    [g for g, _ in pairs],
                    list(leaves),
                    [u for _, u in pairs],
                    retain_graph=True,
                    create_graph=create_graph,
                    allow_unused=True,
                )
            for place, (u, product) in enumerate(zip(signs, found, strict=True)):
                if product is not None:
                    product = product.to_dense() if product.is_sparse else product
                    totals[place] = totals[place] + (u * product).to(accumulation_dtype(u.dtype))
    for leaf, total in zip(leaves, totals, strict=True):
        yield leaf, total / draws if isinstance(total, Tensor) else torch.zeros_like(leaf, requires_grad=False)


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    coins = torch.randint(0, 2, like.shape, generator=generator, device=device)
    return (2 * coins - 1).to(like.device, like.dtype)
