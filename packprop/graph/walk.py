"""Find what a backward pass will go through: its uses and losses, from the roots of the graph on.

# NOTE [Stepping over a use]
A function such as ``F.linear`` makes several nodes. The walk steps from a use's node to where its inputs came
from, over whatever lies between; so an edge into a parameter that the walk still meets belongs to no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packprop.errors import PackpropError
from packprop.functions.nodes import WITHOUT_DERIVATIVE
from packprop.functions.operands import options_of
from packprop.graph.checkpoint_uses import uses_inside
from packprop.graph.completeness import (
    adopt_missing,
    find_after_loss,
    find_missing,
    reached_without_loss,
    require_alive,
    require_derivatives,
    require_known_shards,
)
from packprop.graph.graph import Graph, ReachedLoss, ReachedUse, ReentrantCheckpoint
from packprop.graph.hidden_order import hides_order, own_options
from packprop.graph.hooks import hooks_on, is_of_interest
from packprop.graph.open_paths import find_open_places
from packprop.graph.search import nodes_above
from packprop.graph.site import Site
from packprop.graph.terms import settle_terms
from packprop.graph.traversal import depth_first, upstream_of
from packprop.recording.marks import LOSS, MIXES, OUTPUT, REORDERS, TRANSFORMED, USE, RecordedUse, marks_of
from packprop.recording.reentrant import is_reentrant

SAME_AS = {"ReshapeAliasBackward0": "ViewBackward0"}
"""Nodes that have another name while a pass is traced."""


@dataclass
class _Trail:
    """What the walk saw on its way.

    Args:
        uses: Uses in the order in which they were met.
        neighbours: The upstream neighbours of each node, over uses.
        order: Nodes, each after all that lie upstream of it.
        names: Names of nodes.
        places: Their numbers among the names.
        options: What they take beside tensors, and along which axes they put rows in another order.
        consumed: Leaves that are met outside of all uses, and the nodes that consume them.
        of_interest: Nodes that hooks may be on.
        cut: Nodes that have no derivative.
        checkpoint_places: For each reentrant checkpoint, how many uses were met before it.
    """

    uses: dict[RecordedUse, ReachedUse] = field(default_factory=dict)
    neighbours: dict[Node, list[Node]] = field(default_factory=dict)
    order: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    places: dict[Node, int] = field(default_factory=dict)
    options: list[Any] = field(default_factory=list)
    consumed: list[tuple[Tensor, Node]] = field(default_factory=list)
    of_interest: list[Node] = field(default_factory=list)
    cut: list[Node] = field(default_factory=list)
    checkpoint_places: list[int] = field(default_factory=list)


def walk(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[Tensor] | None,
    *,
    unshards: bool = False,
) -> Graph:
    """Find what a backward pass from ``roots`` will go through.

    Args:
        roots: Where it starts.
        gradients: What is fed in at each root; ``None`` for one.
        wanted: Leaves to restrict to; ``None`` for all.
        unshards: Whether the caller has sharded parameters put together where it sweeps.

    Raises:
        PackpropError: If a parameter's uses were not all recorded, samples are mixed by a known layer, or a
            recorded graph was freed.
    """
    graph = Graph(roots, gradients)
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    trail = _follow(graph, starts, wanted)
    _look_inside(graph, trail)
    trail.names += [use.recorded.name for checkpoint in graph.checkpoints for use in checkpoint.uses]
    graph.uses = list(trail.uses.values())
    require_alive(graph)
    _find_sites(graph, wanted, trail)
    require_derivatives(graph, trail.cut)
    find_missing(graph, trail.consumed, wanted)
    find_after_loss(graph, trail.order, trail.neighbours)
    if graph.missing or (trail.consumed and graph.losses):
        settle_terms(graph, starts)
    find_open_places(graph, starts, trail.neighbours)
    without_loss = reached_without_loss(graph, starts, trail.neighbours)
    adopt_missing(graph, without_loss, trail.uses)
    graph.without_loss = [
        graph.label(use) for use in graph.uses if any(node in without_loss for node in use.anchors)
    ]
    _mark_ends(trail)
    empty = [checkpoint for checkpoint in graph.checkpoints if not checkpoint.uses]
    for use in trail.uses.values():
        use.through = empty
    tensors = [*roots, *(loss.call.input for loss in graph.losses), *graph.leaves()]
    graph.hooks = hooks_on(trail.of_interest, trail.uses, graph.forwards, tensors)
    require_known_shards(graph, unshards)
    graph.structure, graph.signature = _structure(graph, trail.names), _signature(graph, trail)
    return graph


def _follow(graph: Graph, starts: list[Node], wanted: Sequence[Tensor] | None) -> _Trail:
    """Go through all nodes once; the graph gets losses, outputs, checkpoints and layers that mix samples."""
    trail = _Trail()
    steps = depth_first(starts, lambda node: _neighbours_over_uses(node, trail.uses), trail.neighbours)
    for node, done in steps:
        if done:
            trail.order.append(node)
            continue
        name, marks = node.name(), marks_of(node)
        trail.places[node] = len(trail.names)
        trail.names.append(SAME_AS.get(name, name))
        trail.options += options_of(node)
        if is_of_interest(name, marks):
            trail.of_interest.append(node)
        if LOSS in marks:
            call, output = marks[LOSS]
            graph.losses.append(ReachedLoss(call, node, output))
        if OUTPUT in marks:
            forward, output, shape = marks[OUTPUT]
            graph.outputs.append((GradientEdge(node, output), forward, shape))
        if TRANSFORMED in marks:
            graph.transformed.append(marks[TRANSFORMED])
        if REORDERS in marks:
            output, shape, axes = marks[REORDERS]
            if axes:
                graph.reorderings.append((GradientEdge(node, output), shape, axes))
            trail.options.append(axes)
        elif USE not in marks and LOSS not in marks and not is_reentrant(node):
            graph.hides_order |= hides_order(node)
            trail.options.append(own_options(node))
        if is_reentrant(node):
            graph.checkpoints.append(
                ReentrantCheckpoint(
                    node, lambda inside: walk(inside, [None] * len(inside), wanted, unshards=True)
                )
            )
            trail.checkpoint_places.append(len(trail.uses))
        if name == WITHOUT_DERIVATIVE:
            trail.cut.append(node)
        if MIXES in marks:
            graph.mixers.append(marks[MIXES].name)
        if USE not in marks:
            for upstream in trail.neighbours[node]:
                leaf = getattr(upstream, "variable", None)
                if leaf is not None:
                    trail.consumed.append((leaf, node))
    return trail


def _neighbours_over_uses(node: Node, uses: dict[RecordedUse, ReachedUse]) -> list[Node]:
    """A node's upstream neighbours; at a use, which is noted, the nodes that its inputs came from."""
    marks = marks_of(node).get(USE)
    if marks is None:
        return upstream_of(node)
    neighbours = []
    for use, index, output in marks:
        uses.setdefault(use, ReachedUse(use)).nodes[index] = (node, output)
        neighbours += [edge.node for edge in use.edges]
    return neighbours


def _look_inside(graph: Graph, trail: _Trail) -> None:
    """Put the uses of reentrant checkpoints in their places among the others."""
    if not graph.checkpoints:
        return
    reached: dict[Node, set[int]] = {checkpoint.node: set() for checkpoint in graph.checkpoints}
    edges = [get_gradient_edge(root) for root in graph.roots if root.grad_fn is not None]
    for node in trail.neighbours:
        marks = marks_of(node).get(USE)
        if marks is None:
            edges += [GradientEdge(above, output) for above, output in node.next_functions if above is not None]
        else:
            edges += [edge for use, _, _ in marks for edge in use.edges]
    for node, output, *_ in edges:
        if node in reached:
            reached[node].add(output)
    uses = list(trail.uses.items())
    places = zip(graph.checkpoints, trail.checkpoint_places, strict=True)
    for checkpoint, place in reversed(list(places)):
        inside = uses_inside(checkpoint, reached[checkpoint.node])
        uses[place:place] = [(use.recorded, use) for use in inside]
    trail.uses = dict(uses)


def _mark_ends(trail: _Trail) -> None:
    """Mark the uses that have no other use upstream; those in checkpoints have no nodes, and are left out."""
    use_upstream: dict[Node, bool] = {}
    anchors = {node for use in trail.uses.values() for node in use.anchors}
    for node in trail.order:
        use_upstream[node] = any(
            use_upstream.get(above, False) or above in anchors for above in trail.neighbours[node]
        )
    for use in trail.uses.values():
        use.is_end = use.checkpoint is None and not any(use_upstream[node] for node in use.anchors)


def _find_sites(graph: Graph, wanted: Sequence[Tensor] | None, trail: _Trail) -> None:
    """Trace the parameters of every use to the leaves that they are computed from."""
    chosen = None if wanted is None else {id(leaf) for leaf in wanted}
    leaves: dict[int, list[Tensor]] = {}
    for use in graph.uses:
        for entry in use.recorded.entries or ():
            parameter = entry.parameter
            if id(parameter) not in leaves:
                leaves[id(parameter)] = _leaves_of(parameter, trail)
            for leaf in leaves[id(parameter)]:
                if chosen is None or id(leaf) in chosen:
                    use.sites.append(Site(entry, leaf))
    for use in graph.uses:
        for site in use.sites:
            if site.entry.refusal is not None:
                raise PackpropError(
                    "A quantity beyond the gradient was asked for.",
                    f"parameter {graph.name(site.leaf)!r} in {use.recorded.name}",
                    *site.entry.refusal,
                )


def _leaves_of(parameter: Tensor, trail: _Trail) -> list[Tensor]:
    if parameter.grad_fn is None:
        return [parameter]
    leaves: dict[int, Tensor] = {}
    for node in nodes_above([parameter.grad_fn]):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        marks = marks_of(node)
        if is_of_interest(node.name(), marks):
            trail.of_interest.append(node)
        if USE in marks:
            raise PackpropError(
                "A quantity beyond the gradient was asked for.",
                f"a tensor of shape {list(parameter.shape)} that is used like a parameter",
                "it depends on the samples through a function that was not seen",
                "register the function with packprop.register_use, or call it through torch functions",
            )
    return list(leaves.values())


def _structure(graph: Graph, names: list[str]) -> int:
    """A number that is equal for passes of equal structure."""
    functions = tuple((loss.call.function, loss.call.documents is None) for loss in graph.losses)
    return hash((tuple(names), tuple(use.recorded.name for use in graph.uses), functions))


def _signature(graph: Graph, trail: _Trail) -> int:
    """A number that is equal for passes of equal structure, shapes and options."""
    uses = tuple((use.recorded.name, tuple(use.recorded.shapes), use.recorded.options) for use in graph.uses)
    losses = tuple((loss.call.function, loss.call.shape, loss.call.documents is None) for loss in graph.losses)
    input_shapes = tuple((*forward.sizes, forward.declared) for forward in graph.forwards)
    open_paths = tuple(place.shape for place in graph.open), tuple(loss.is_open for loss in graph.losses)
    edges = tuple(
        (-1 if above is None else trail.places.get(above, -1), output)
        for node in trail.places
        for above, output in node.next_functions
    )
    named = tuple(trail.names), tuple(trail.options), edges
    return hash((named, uses, losses, input_shapes, open_paths, bool(graph.without_loss)))
