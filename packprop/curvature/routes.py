"""By which route each parameter's diagonal of the Hessian is computed: see NOTE [Hessian diagonal]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.curvature.dependence import dependence, upstream_bits, upstream_first
from packprop.curvature.second_order import differentiating_twice, gradients_at, require_second_derivatives
from packprop.errors import PackpropError
from packprop.functions.nodes import is_wrong_in_third_order, kind_of
from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.pull import pull_columns
from packprop.graph.separation import layouts_at
from packprop.graph.traversal import made_by
from packprop.tensors.layout import Layout

Route = Literal["swept", "output", "parameter"]


@dataclass(frozen=True)
class Nonlinearity:
    """An elementwise nonlinearity between a loss and some uses.

    Args:
        node: Its node.
        input: Where its input came from.
        shape: Shape of its input.
        upstream: Bits of the uses that its input depends on.
    """

    node: Node
    input: GradientEdge
    shape: torch.Size
    upstream: int


@dataclass
class Routes:
    """Which route the diagonal of each leaf is taken.

    Args:
        swept: Leaves that columns of the losses and of elementwise nonlinearities are swept to.
        curves: These nonlinearities, and where their inputs hold the samples.
        output: Uses whose outputs get Hessian columns, and the leaves that these give the diagonals of.
        parameter: Leaves that are differentiated twice.
        bits: The place of each use among bits.
        masks: As ``dependence`` says.
    """

    swept: list[Tensor] = field(default_factory=list)
    nonlinearities: list[tuple[Nonlinearity, Layout]] = field(default_factory=list)
    output: list[tuple[list[ReachedUse], list[Tensor]]] = field(default_factory=list)
    parameter: list[Tensor] = field(default_factory=list)
    bits: dict[ReachedUse, int] = field(default_factory=dict)
    masks: dict[Node, int] = field(default_factory=dict)

    @property
    def is_gauss_newton(self) -> bool:
        """Whether nothing curves but the losses: the Hessian is the generalized Gauss-Newton matrix."""
        return not (self.nonlinearities or self.output or self.parameter)

    def route(self, leaf: Tensor) -> Route:
        """How one leaf goes."""
        if any(leaf is other for other in self.swept):
            return "swept"
        return "parameter" if any(leaf is other for other in self.parameter) else "output"


def require_third_derivatives(graph: Graph, leaves: Sequence[Tensor]) -> None:
    """Under ``create_graph``, double backward is differentiated once more: that must be right in torch.

    Raises:
        PackpropError: If a node between the roots and one of the leaves gets it wrong.
    """
    wanted = {id(leaf) for leaf in leaves}
    bits = {f: 1 << place for place, f in enumerate(graph.uses)}
    own = sum(bit for f, bit in bits.items() if any(id(site.leaf) in wanted for site in f.sites))
    for node, mask in dependence(graph).items():
        if mask & own and is_wrong_in_third_order(node):
            raise PackpropError(
                "A diagonal of the Hessian was asked for with create_graph=True.",
                f"parameter {graph.name(leaves[0])!r}, behind {node.name()}",
                "it takes two derivatives of that node, and PyTorch's third one of it is wrong",
                "leave out create_graph=True, write the normalisation out in basic operations, or ask for GGN "
                "quantities, which take one",
            )


def choose_routes(graph: Graph, known_losses: bool, per_sample: bool, create_graph: bool = False) -> Routes:
    """Choose a route for every leaf.

    Args:
        graph: With its samples located.
        known_losses: Whether the losses have roots of their Hessians, and enter linearly.
        per_sample: Whether diagonals of single samples are asked for.
        create_graph: Whether they shall be differentiable.

    Raises:
        PackpropError: If a branch of the graph has been summed already, or third derivatives are wrong.
    """
    found = {f: 1 << place for place, f in enumerate(graph.uses)}
    masks = dependence(graph)
    bad, nonlinearities, products = -1, list[Nonlinearity](), set[tuple[int, ...]]()
    layouts: list[Layout] = []
    if known_losses and not graph.without_loss:
        bad, nonlinearities, products = _nonlinearities([loss.call.edge.node for loss in graph.losses], masks)
        layouts, without = _layouts(graph, nonlinearities)
        bad |= without
    coupled = (not known_losses or bool(graph.without_loss)) and _couples_samples(graph)
    if coupled and per_sample:
        raise PackpropError(
            "A diagonal of the Hessian of each sample was asked for.",
            "what was made of the samples' losses",
            "it is not linear in them: the Hessian has entries between samples, and none has one of its own",
            "ask for DiagHessian() without subsampling, or reduce linearly (sum, mean, weights)",
        )
    chosen = Routes(bits=found, masks=masks)
    outputs: dict[tuple[ReachedUse, ...], list[Tensor]] = {}
    for leaf in graph.leaves():
        own = [f for f in graph.uses if any(site.leaf is leaf for site in f.sites)]
        bits = functools.reduce(int.__or__, (found[f] for f in own))
        if coupled or not _is_affine(leaf, own, bits, masks):
            chosen.parameter.append(leaf)
        elif bits & bad or any(sum(bool(bits & mask) for mask in factors) > 1 for factors in products):
            outputs.setdefault(tuple(own), []).append(leaf)
        else:
            chosen.swept.append(leaf)
    for uses, leaves in outputs.items():
        columns = sum(shape.numel() for f in uses for shape in f.recorded.shapes) // max(graph.samples, 1)
        if not per_sample and sum(leaf.numel() for leaf in leaves) < columns:
            chosen.parameter += leaves
        else:
            chosen.output.append((list(uses), leaves))
    if create_graph:
        twice = [*chosen.parameter, *(leaf for _, leaves in chosen.output for leaf in leaves)]
        require_third_derivatives(graph, twice)
    kept = {id(leaf) for leaf in chosen.swept}
    reached = sum(bit for f, bit in found.items() if any(id(site.leaf) in kept for site in f.sites))
    pairs = zip(nonlinearities, layouts, strict=True)
    chosen.nonlinearities = [
        (nonlinearity, layout) for nonlinearity, layout in pairs if nonlinearity.upstream & reached
    ]
    return chosen


def named(graph: Graph) -> Callable[[Tensor], str]:
    """What a leaf is called in messages."""
    return lambda leaf: f"parameter {graph.name(leaf)!r}"


def _couples_samples(graph: Graph) -> bool:
    """Whether the Hessian in the outputs of all uses has entries between samples: tried on one column."""
    if graph.samples == 1:
        return False
    require_second_derivatives(graph.roots, graph.leaves(), named(graph), linear=True)
    places = [(f, index) for f in graph.uses for index in f.nodes]
    edges = [GradientEdge(*f.nodes[index]) for f, index in places]
    label = graph.label(graph.uses[0])
    with differentiating_twice(label), torch.enable_grad():
        slopes = gradients_at(graph, edges, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    fed: list[tuple[Tensor, Tensor]] = []
    for (f, index), slope in zip(places, slopes, strict=True):
        if slope is not None and slope.requires_grad:
            noise = torch.randn(slope.shape, generator=generator).to(slope.device, slope.dtype)
            fed.append((slope, noise * _even(f.layouts[index], slope)))
    if not fed:
        return False
    with differentiating_twice(label):
        found = pull_columns([slope for slope, _ in fed], edges, [noise for _, noise in fed], batched=False)
    inside, leaked = [0.0], [0.0]
    for (f, index), column in zip(places, found, strict=True):
        if column is not None and column.numel():
            even = _even(f.layouts[index], column)
            inside.append((column * even).abs().max().item())
            leaked.append((column * (1 - even)).abs().max().item())
    return max(leaked) > 1e-5 * max(inside) or max(leaked) != max(leaked)


def _even(layout: Layout, like: Tensor) -> Tensor:
    """One in the rows of every second sample, zero elsewhere, to be broadcast against a tensor."""
    if layout.axis is None:
        return torch.ones((), dtype=like.dtype, device=like.device)
    rows = (layout.sample_of(like.device) % 2 == 0).to(like.dtype)
    return rows.view([-1 if axis == layout.axis else 1 for axis in range(like.dim())])


def _is_affine(leaf: Tensor, uses: Sequence[ReachedUse], bits: int, masks: dict[Node, int]) -> bool:
    """Whether the outputs of its uses are affine in a leaf, and their inputs do not depend on it."""
    sites = [site for f in uses for site in f.sites if site.leaf is leaf]
    if not all(site.direct and site.entry.linear for site in sites):
        return False
    return not any(masks.get(edge.node, -1) & bits for f in uses for edge in f.recorded.edges)


def _nonlinearities(
    starts: Sequence[Node], masks: dict[Node, int]
) -> tuple[int, list[Nonlinearity], set[tuple[int, ...]]]:
    """What is not linear: bits of uses behind nodes of no known kind, elementwise nodes, and products.

    A product, given by the bits of its factors, is linear for a leaf whose uses one of them alone depends on.
    """
    bad = 0
    nonlinearities: list[Nonlinearity] = []
    products: set[tuple[int, ...]] = set()
    for node in upstream_first(starts):
        edges = node.next_functions
        factors = [(place, masks[up]) for place, (up, _) in enumerate(edges) if up is not None and masks[up]]
        if not factors:
            continue
        places = [place for place, _ in factors]
        union = functools.reduce(int.__or__, (mask for _, mask in factors))
        kind = kind_of(node, places)
        if kind == "elementwise":
            source, output = edges[places[0]]
            assert source is not None
            shape = torch.Size(made_by(source)[output].shape)
            if shape == torch.Size(made_by(node)[0].shape):
                nonlinearities.append(Nonlinearity(node, GradientEdge(source, output), shape, union))
                continue
        if kind == "linear":
            continue
        if len(places) > 1 and all(kind_of(node, [place]) == "linear" for place in places):
            products.add(tuple(mask for _, mask in factors))
        else:
            bad |= union
    return bad, nonlinearities, products


def _layouts(graph: Graph, nonlinearities: list[Nonlinearity]) -> tuple[list[Layout], int]:
    """Where their inputs hold the samples; drops curves where that is not seen, and says what is upstream."""
    bad = 0
    while nonlinearities:
        found = layouts_at(graph, [(nonlinearity.input, nonlinearity.shape) for nonlinearity in nonlinearities])
        if isinstance(found, list):
            return found, bad
        bad |= nonlinearities.pop(found).upstream
    return [], bad


def subset(graph: Graph, routes: Routes) -> list[ReachedUse]:
    """The uses of swept leaves, with these leaves alone."""
    kept = {id(leaf) for leaf in routes.swept}
    found = []
    for f in graph.uses:
        sites = [site for site in f.sites if id(site.leaf) in kept]
        if sites:
            own = replace(f, sites=sites)
            routes.bits[own] = routes.bits[f]
            found.append(own)
    return subset_of(found, routes)


def subset_of(found: Sequence[ReachedUse], routes: Routes) -> list[ReachedUse]:
    """Copies of uses for a sweep that ends at those that have none of them upstream."""
    chosen = []
    for f in found:
        own = replace(f, is_end=False)
        routes.bits[own] = routes.bits[f]
        chosen.append(own)
    ends = _ends(chosen, routes)
    for f in chosen:
        f.is_end = f in ends
    return chosen


def _ends(found: Sequence[ReachedUse], routes: Routes) -> set[ReachedUse]:
    masks = upstream_bits(
        [node for f in found for node, _ in f.nodes.values()], {f: routes.bits[f] for f in found}
    )
    ends = set()
    for f in found:
        above = 0
        for node, _ in f.nodes.values():
            for upstream, _ in node.next_functions:
                if upstream is not None:
                    above |= masks[upstream]
        if not above:
            ends.add(f)
    return ends
