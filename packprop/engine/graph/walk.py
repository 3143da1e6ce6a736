"""The walk through the graph of a backward pass, from its roots, which finds its uses and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.losses import told_axes
from packprop.engine.functions.losses.read import LOSS_NODES
from packprop.engine.functions.nodes import (
    NORMALISATIONS,
    WITHOUT_DERIVATIVE,
    made_by,
    name_of_node,
    short_name,
)
from packprop.engine.functions.operands import extents_of, options_of, own_options
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.graph.completeness import (
    find_missing,
    freed,
    require_alive,
    require_derivatives,
    require_known_shards,
)
from packprop.engine.graph.graph import Graph, ReachedLoss, ReachedUse
from packprop.engine.graph.hooks import hooks_on
from packprop.engine.graph.reading import Reading
from packprop.engine.graph.reorderings import (
    BY_ROWS,
    axes_reordered,
    is_opaque,
    may_change_unseen,
)
from packprop.engine.graph.search import SAME_AS, Trail, depth_first, leaves_above, nodes_above
from packprop.engine.graph.site import Site
from packprop.engine.graph.terms import find_open_places, settle_terms
from packprop.engine.recording.marks import EXTENDED, LOSS, OUTPUT, marks_of, unmarked_loss
from packprop.engine.recording.unrecorded import NOT_REENTRANT, REENTRANT
from packprop.errors import PackpropError


def walk(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[Tensor] | None,
    *,
    unshards: bool = False,
    with_sums: bool = True,
) -> Graph:
    """Return the graph of a backward pass from ``roots``, with its uses and losses.

    Args:
        roots: The tensors that the pass starts from.
        gradients: The gradient of each root; ``None`` for ones.
        wanted: Leaves to restrict the pass to; ``None`` for all.
        unshards: Whether the caller puts sharded parameters together for its sweeps.
        with_sums: Whether sums of numbers, behind the outputs of models, may add terms to the loss.

    Raises:
        PackpropError: For a parameter without gradients of samples, a reentrant checkpoint, or parameters
            sharded in a way that packprop cannot follow; ``FreedGraph`` if an earlier pass has freed the graph.
    """
    graph = Graph(roots, gradients)
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    trail = _follow(graph, starts)
    require_alive(graph)
    _read_losses(graph, trail)
    _drop_inner_outputs(graph, trail)
    _read_uses(graph, trail, wanted, with_sums)
    _note_order(graph, trail)
    require_derivatives(graph, [node for node, name in trail.names.items() if name == WITHOUT_DERIVATIVE])
    find_missing(graph, trail.consumed, wanted)
    graph.consumed = bool(trail.consumed)
    reading = graph.reading
    has_terms = reading is not None and (graph.missing or reading.sums or (trail.consumed and graph.losses))
    if has_terms and not settle_terms(graph):
        return walk(roots, gradients, wanted, unshards=unshards, with_sums=False)
    find_open_places(graph, trail.inputs)
    losses = {loss.node for loss in graph.losses}
    without_loss = set(nodes_above((start for start in starts if start not in losses), losses))
    graph.without_loss = [graph.label(use) for use in graph.uses if not without_loss.isdisjoint(use.anchors)]
    below = trail.below(node for use in graph.uses for node in use.anchors)
    times = Counter(id(site.leaf) for use in graph.uses for site in use.sites)
    for use in graph.uses:
        use.is_end = below.isdisjoint(use.anchors)
        tied = any(times[id(site.leaf)] > 1 for site in use.sites)
        use.recomputed = any(map(keeps_elsewhere, use.anchors))
        use.waits = tied or use.recomputed
    tensors = [*roots, *(loss.call.input for loss in graph.losses), *graph.leaves()]
    graph.hooks = hooks_on(trail.order, tensors)
    require_known_shards(graph, unshards)
    graph.again = lambda: walk(roots, gradients, wanted, unshards=unshards)
    graph.structure, graph.signature = _structure_and_signature(graph, trail)
    return graph


def _follow(graph: Graph, starts: list[Node]) -> Trail:
    """Visit each node once; note marked losses and outputs, and layers that mix samples."""
    trail = Trail()

    def upstream(node: Node) -> list[Node]:
        trail.inputs[node] = node.next_functions
        return [above for above, _ in trail.inputs[node] if above is not None]

    for node, done in depth_first(starts, upstream, trail.neighbours):
        if done:
            trail.order.append(node)
            continue
        name, marks = node.name(), marks_of(node)
        trail.places[node] = len(trail.places)
        trail.names[node] = SAME_AS.get(name, name)
        trail.options += (*options_of(node), own_options(node))
        trail.extents += extents_of(node)
        if LOSS in marks:
            call, output = marks[LOSS]
            graph.losses.append(ReachedLoss(call, node, output))
        for output, (forward, shape) in marks.get(OUTPUT, {}).items():
            graph.outputs.append((GradientEdge(node, output), forward, shape))
        if name == REENTRANT:
            raise PackpropError(
                "A quantity beyond the gradient was asked for.",
                "a part of the model inside torch.utils.checkpoint",
                "a reentrant checkpoint hides its layers from autograd's graph",
                NOT_REENTRANT,
            )
        if short_name(name) in NORMALISATIONS and _takes_statistics(node):
            graph.mixers.append(_layer_of(graph, node))
        if not trail.neighbours[node] and (leaf := getattr(node, "variable", None)) is not None:
            trail.leaves[node] = leaf
    reached = {(root.grad_fn, root.output_nr) for root in graph.roots}
    reached.update(*trail.inputs.values())
    graph.outputs = [each for each in graph.outputs if each[0][:2] in reached]
    taken = [(each, node) for node in trail.places for each in trail.neighbours[node] if each in trail.leaves]
    trail.consumed = [(trail.leaves[each], node) for each, node in taken]
    graph.order = trail.order
    return trail


def _note_order(graph: Graph, trail: Trail) -> None:
    """Note where data decide on the order of rows, except for rows of parameters such as tables."""
    parameters = graph.reading.made_of_parameters if graph.reading else ()
    reordered: set[Node] = set()
    losses = {loss.node for loss in graph.losses}
    for node in trail.order:
        first, *others = [above for above, _ in trail.inputs[node]] or [None]
        is_table = first in parameters and all(each is None or each in parameters for each in others)
        if node in trail.leaves or is_table or node in losses:
            axes: frozenset[int] | None = frozenset()
        else:
            axes = axes_reordered(node)
            graph.orders_by_values |= name_of_node(node) in BY_ROWS
            graph.hides_order |= may_change_unseen(node) and not any(
                each in parameters for each in trail.neighbours[node]
            )
        if axes is None:
            graph.hides_order = True
        elif axes:
            graph.reorderings.append((GradientEdge(node, 0), axes))
        trail.orders.append(axes)
        graph.is_opaque |= is_opaque(node)
        if axes is None or axes or (reordered and not reordered.isdisjoint(trail.neighbours[node])):
            reordered.add(node)
    trail.orders.append(graph.is_opaque)
    for use in graph.uses:
        use.reordered = not reordered.isdisjoint(use.anchors)


def _read_losses(graph: Graph, trail: Trail) -> None:
    """Find the losses without marks, from their nodes."""
    inside: set[Node] = set()
    for loss in graph.losses:
        inside.update(nodes_above([loss.node], [loss.call.edge.node]))
    try:
        for node, name in trail.names.items():
            if short_name(name) in LOSS_NODES and node not in inside:
                call = unmarked_loss(node)
                if call is not None:
                    graph.losses.append(ReachedLoss(call, node, 0))
    except RuntimeError as error:
        if "inplace operation" in str(error):  # PyTorch's own error says which tensor was changed
            raise
        raise freed("the first pass freed the graph, and what the loss was given") from error
    if len(graph.losses) > 1:  # what only another loss takes is a function of the model, such as a distance
        nodes = {loss.node for loss in graph.losses}
        starts = {root.grad_fn for root in graph.roots}
        after = nodes_above(starts - nodes, nodes)
        outer = starts.union(*(trail.neighbours[node] for node in after))
        graph.losses = [loss for loss in graph.losses if loss.node in outer or LOSS in marks_of(loss.node)]


def _drop_inner_outputs(graph: Graph, trail: Trail) -> None:
    """Drop outputs of models that are parts of other called models.

    If such a model calls the loss, and declares no axis of samples, the axis that the part declared counts.
    """
    modules = graph.modules
    if len(modules) > 1:
        parts = {id(child) for module in modules for child in module.modules() if child is not module}
        inner = [forward for _, forward, _ in graph.outputs if id(forward.module()) in parts]
        graph.outputs = [each for each in graph.outputs if id(each[1].module()) not in parts]
        declared = {forward.declared for forward in inner} - {None}
        if len(declared) == 1:
            losses = {loss.node for loss in graph.losses}
            after = losses | trail.below(losses)
            for edge, forward, _ in graph.outputs:
                if forward.declared is None and edge.node in after:
                    (forward.declared,) = declared


def _read_uses(graph: Graph, trail: Trail, wanted: Sequence[Tensor] | None, with_sums: bool) -> None:
    """Read the uses off the graph; see NOTE [Uses in the graph]."""
    leaves = _parameters(graph, trail)
    if not leaves:
        return
    alone: Collection[Node] = ()
    reading = _sorted(graph, trail, leaves, alone, with_sums)
    given = {edge.node for loss in graph.losses for edge in loss.given}
    given |= {edge.node for edge, _, _ in graph.outputs}
    while not given.isdisjoint(reading.made_of_parameters.keys() - alone):
        alone = reading.made_of_parameters.keys()  # losses and outputs that only these enter are terms
        reading = _sorted(graph, trail, leaves, alone, with_sums)
    graph.reading = reading
    settled = reading.settled
    trail.consumed = [(leaf, node) for leaf, node in trail.consumed if node not in settled]
    computed = settled.difference(reading.uses, trail.leaves)
    for node in trail.order:
        if node not in settled:  # tensors that uses take may also enter terms
            for above in trail.neighbours[node]:
                if above in computed:
                    trail.consumed += [(leaf, node) for leaf in leaves_above([above])]
    chosen = None if wanted is None else {id(leaf) for leaf in wanted}
    for node in reversed(trail.order):
        use = reading.uses.get(node)
        if use is not None:
            graph.uses.append(use)
            trail.neighbours[node] = [edge.node for edge in use.edges]
            _find_sites(graph, use, chosen)
    for loss in graph.losses:
        for edge in loss.given[1:]:
            if edge.node not in alone and not reading.uses.keys().isdisjoint(nodes_above([edge.node])):
                loss.others.append(edge)


def _sorted(
    graph: Graph, trail: Trail, leaves: dict[int, Tensor], alone: Collection[Node], with_sums: bool
) -> Reading:
    """Return the sorted nodes; losses and outputs of only nodes ``alone``, made of parameters, do not count."""
    given = {loss.node: [edge.node for edge in loss.given if edge.node not in alone] for loss in graph.losses}
    losses = {node for node, taken in given.items() if taken}
    terms = given.keys() - losses
    ends = [node for taken in given.values() for node in taken]
    outputs = [edge.node for edge, forward, _ in graph.outputs if forward.has_parameters]
    ends += [node for node in outputs if node not in alone]
    below_losses = set(nodes_above((node for node in ends if node not in terms), terms))
    reading = Reading(graph, trail, leaves, below_losses, with_sums)
    reading.sort(losses | trail.below(losses))
    return reading


def _parameters(graph: Graph, trail: Trail) -> dict[int, Tensor]:
    """Return the leaves that count as parameters, by identity.

    Other tensors that require gradients are data, unless they replace all parameters, as in
    ``torch.func.functional_call``.
    """
    leaves = {id(leaf): leaf for leaf, _ in trail.consumed}
    own = {key: leaf for key, leaf in leaves.items() if _is_parameter(leaf)}
    if own:
        return own
    given = {id(ref()) for forward in graph.forwards for ref in forward.leaves}
    return {key: leaf for key, leaf in leaves.items() if key not in given}


def _is_parameter(leaf: Tensor) -> bool:
    """Tell whether a leaf is a parameter, by its class or because it belongs to an extended module."""
    if isinstance(leaf, nn.Parameter):
        return True
    return any(leaf is parameter for module in EXTENDED for parameter in module.parameters())


def _takes_statistics(node: Any) -> bool:
    """Tell whether a batch normalisation took its statistics from several rows of its input."""
    return bool(getattr(node, "_saved_training", False)) and made_by(node)[0].shape[0] > 1


def _layer_of(graph: Graph, node: Node) -> str:
    """Return the words for a layer in messages, from the parameters that enter its node."""
    leaves = set(map(id, leaves_above(above for above, _ in node.next_functions[1:])))
    for module in graph.known_modules:
        for path, child in module.named_modules():
            if any(id(parameter) in leaves for parameter in child.parameters(recurse=False)):
                return f"{path!r} ({type(child).__name__})" if path else type(child).__name__
    return "batch_norm"


def _find_sites(graph: Graph, use: ReachedUse, chosen: set[int] | None) -> None:
    """Trace the parameters of a use to the leaves that they are computed from."""
    for entry in use.entries:
        parameter = entry.parameter
        own = [parameter] if isinstance(parameter, Tensor) else leaves_above([parameter.grad_fn])
        use.sites += [Site(entry, leaf) for leaf in own if chosen is None or id(leaf) in chosen]
    for site in use.sites:
        if site.entry.refusal is not None:
            raise PackpropError(
                "A quantity beyond the gradient was asked for.",
                f"parameter {graph.name(site.leaf)!r} in {use.name}",
                *site.entry.refusal,
            )


def _structure_and_signature(graph: Graph, trail: Trail) -> tuple[int, int]:
    """Return two numbers: equal for passes of equal structure, and for passes of equal structure and shapes.

    Options enter as a text; see ``Trail.wiring``.
    """
    calls = [loss.call for loss in graph.losses]
    declared = [each.declared for each in calls] + [forward.declared for forward in graph.forwards]
    told = [told_axes(each.function, each.args, each.kwargs) for each in calls]
    functions = tuple((each.function, each.documents is None) for each in calls)
    uses = tuple(use.name for use in graph.uses)
    structure = hash((trail.wiring, repr((trail.orders, declared, told)), uses, functions))
    places = [*graph.open, *(edge for loss in graph.losses for edge in loss.others)]
    shapes: list[tuple[Any, ...]] = [tuple(use.shapes) for use in graph.uses]
    shapes += [each.shape for each in calls]
    shapes += [tuple(made_by(edge.node)[edge.output_nr].shape) for edge in places]
    open_paths = tuple(loss.is_open for loss in graph.losses), bool(graph.without_loss)
    return structure, hash((structure, tuple(trail.extents), tuple(shapes), len(places), open_paths))
