"""What one backward pass will go through: uses and losses found again from the root, completeness, names.

# NOTE [Stepping over a use]
A function such as ``F.linear`` makes several nodes. The walk steps from a use's node to where its inputs came
from, over whatever lies between; so an edge into a parameter that the walk still meets belongs to no use.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from packprop.errors import PackpropError
from packprop.graph.completeness import (
    above_losses,
    adopt_missing,
    find_after_loss,
    find_missing,
    require_alive,
)
from packprop.graph.graph import Graph, ReachedLoss, ReachedUse, ReentrantCheckpoint
from packprop.graph.site import Site
from packprop.graph.traversal import depth_first, upstream_of
from packprop.recording.marks import LOSS, MIXES, OUTPUT, USE, RecordedUse, marks_of
from packprop.recording.reentrant import is_reentrant


def walk(roots: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: Sequence[Tensor] | None) -> Graph:
    """Find what a backward pass from ``roots`` will go through.

    Args:
        roots: Where it starts.
        gradients: What is fed in at each root; ``None`` for one.
        wanted: Leaves to restrict to; ``None`` for all.

    Raises:
        PackpropError: If a parameter's uses were not all recorded, samples are mixed by a known layer, or a
            recorded graph was freed.
    """
    graph = Graph(roots, gradients)
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    names: list[str] = []
    places: list[int] = []
    found: dict[RecordedUse, ReachedUse] = {}
    stepped: dict[Node, list[Node]] = {}
    order: list[Node] = []
    consumed: list[tuple[Tensor, Node]] = []

    for node, done in depth_first(starts, lambda node: _over_uses(node, found), stepped):
        if done:
            order.append(node)
            continue
        name = node.name()
        names.append(name)
        marks = marks_of(node)
        if LOSS in marks:
            call, output = marks[LOSS]
            graph.losses.append(ReachedLoss(call, node, output))
        if OUTPUT in marks:
            forward, output, shape = marks[OUTPUT]
            graph.outputs.append((GradientEdge(node, output), forward, shape))
        if is_reentrant(node):
            graph.checkpoints.append(
                ReentrantCheckpoint(node, lambda inside: walk(inside, [None] * len(inside), wanted))
            )
            places.append(len(found))
        if MIXES in marks:
            graph.mixers.append(marks[MIXES])
        if USE not in marks:
            for upstream in stepped[node]:
                leaf = getattr(upstream, "variable", None)
                if leaf is not None:
                    consumed.append((leaf, node))
    found = _look_inside(graph, found, places, stepped)
    names += [f.recorded.name for checkpoint in graph.checkpoints for f in checkpoint.uses]
    graph.uses = list(found.values())
    require_alive(graph)
    _find_sites(graph, wanted)
    find_missing(graph, consumed, wanted)
    above = above_losses(graph, starts, stepped)
    adopt_missing(graph, above, found)
    graph.without_loss = [graph.label(f) for f in graph.uses if any(node in above for node in f.anchors)]
    _find_first(order, stepped, found)
    find_after_loss(graph, order, stepped)
    shapes = tuple((f.recorded.name, tuple(f.recorded.shapes)) for f in graph.uses)
    kinds = tuple((loss.call.function, loss.call.shape) for loss in graph.losses)
    sizes = tuple(size for forward in graph.forwards for size in forward.sizes)
    graph.signature = hash((tuple(names), shapes, kinds, sizes, bool(graph.without_loss)))
    return graph


def _look_inside(
    graph: Graph, found: dict[RecordedUse, ReachedUse], places: list[int], stepped: dict[Node, list[Node]]
) -> dict[RecordedUse, ReachedUse]:
    """The same uses, with those of reentrant checkpoints in their places among them."""
    if not graph.checkpoints:
        return found
    reached: dict[Node, set[int]] = {checkpoint.node: set() for checkpoint in graph.checkpoints}
    edges = [get_gradient_edge(root) for root in graph.roots if root.grad_fn is not None]
    for node in stepped:
        marks = marks_of(node).get(USE)
        if marks is None:
            edges += [GradientEdge(up, output) for up, output in node.next_functions if up is not None]
        else:
            edges += [edge for use, _, _ in marks for edge in use.edges]
    for node, output, *_ in edges:
        if node in reached:
            reached[node].add(output)
    items = list(found.items())
    for checkpoint, place in reversed(list(zip(graph.checkpoints, places, strict=True))):
        items[place:place] = [(inside.recorded, inside) for inside in checkpoint.look(reached[checkpoint.node])]
    return dict(items)


def _over_uses(node: Node, found: dict[RecordedUse, ReachedUse]) -> list[Node]:
    """A node's upstream neighbours, stepping over uses, which are noted."""
    marks = marks_of(node).get(USE)
    if marks is None:
        return upstream_of(node)
    neighbours = []
    for use, index, output in marks:
        found.setdefault(use, ReachedUse(use)).nodes[index] = (node, output)
        neighbours += [edge.node for edge in use.edges]
    return neighbours


def _find_first(
    order: list[Node], stepped: dict[Node, list[Node]], found: dict[RecordedUse, ReachedUse]
) -> None:
    """A use is first if no other one lies upstream; upstream nodes come earlier in ``order``."""
    below: dict[Node, bool] = {}
    uses: dict[Node, bool] = {node: True for f in found.values() for node in f.anchors}
    for node in order:
        below[node] = any(below.get(up, False) or up in uses for up in stepped[node])
    for f in found.values():
        f.first = f.checkpoint is None and not any(below[node] for node in f.anchors)


def _find_sites(graph: Graph, wanted: Sequence[Tensor] | None) -> None:
    """Trace the parameters of every use to the leaves that they are made of."""
    chosen = None if wanted is None else {id(leaf) for leaf in wanted}
    leaves: dict[int, list[Tensor]] = {}
    for found in graph.uses:
        for entry in found.recorded.entries or ():
            parameter = entry.parameter
            if id(parameter) not in leaves:
                leaves[id(parameter)] = _leaves_of(graph, parameter)
            for leaf in leaves[id(parameter)]:
                if chosen is None or id(leaf) in chosen:
                    found.sites.append(Site(entry, leaf))
    for found in graph.uses:
        for site in found.sites:
            if site.entry.refusal is not None:
                raise PackpropError(
                    "A quantity beyond the gradient was asked for.",
                    f"parameter {graph.name(site.leaf)!r} in {found.recorded.name}",
                    *site.entry.refusal,
                )


def _leaves_of(graph: Graph, parameter: Tensor) -> list[Tensor]:
    if parameter.grad_fn is None:
        return [parameter]
    found: dict[int, Tensor] = {}
    stack, seen = [parameter.grad_fn], {parameter.grad_fn}
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        if USE in marks_of(node):
            raise PackpropError(
                "A quantity beyond the gradient was asked for.",
                f"a tensor of shape {list(parameter.shape)} that is used like a parameter",
                "it depends on the samples through a function that was not seen",
                "register the function with packprop.register_use, or call it through torch functions",
            )
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen:
                seen.add(upstream)
                stack.append(upstream)
    return list(found.values())
