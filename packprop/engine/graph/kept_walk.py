"""Walks that are kept for later passes through graphs of the same structure.

# NOTE [Kept walks]
A training loop goes through graphs of one structure, step after step. packprop walks through the first ones,
reads their uses, and looks for the samples. If all findings hold for every pass of this structure, packprop
keeps the walk under the key of the graph's outline. In later passes it only follows the nodes, compares the
key, and puts the new nodes in the place of the old ones. Whatever the key does not tell is either compared in
every pass (numbers that nodes of uses have saved, rules, checkpoints, the constants that decided whether a node
is a use), or the walk is not kept at all: see ``may_be_kept``. A walk serves one pass at a time.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.entry import plain_options
from packprop.engine.functions.losses import LOSSES, told_axes
from packprop.engine.functions.node_calls import NodeSlot
from packprop.engine.functions.node_rules import entries_of_node
from packprop.engine.functions.nodes import is_from_outside, made_by, name_of_node
from packprop.engine.functions.operands import EXPONENTS, MATRIX_PRODUCTS, numbers_of_type, takes_sparse
from packprop.engine.functions.registry import rule_for
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.graph.graph import Graph, ReachedLoss, ReachedUse
from packprop.engine.graph.reading import Constants
from packprop.engine.graph.search import upstream_of
from packprop.engine.graph.site import Site
from packprop.engine.recording.marks import (
    HOOKS,
    LOSS,
    OUTPUT,
    RETAINS,
    ForwardCall,
    RecordedLoss,
    marks_of,
    unmarked_loss,
)
from packprop.engine.tensors.hooks import Hooks, is_hooked, meet_users_hooks

MANY = 8
"""The number of requests of which passes of one structure keep notes."""


class Outline(NamedTuple):
    """The nodes of a graph, and what tells its structure.

    Args:
        nodes: Its nodes, in an order that is the same for graphs of equal structure.
        places: The number of each node in this order.
        losses: The marked losses of nodes.
        outputs: Marked outputs of models: their node, and number among its outputs -> their call and shape.
        key: A value that is equal for graphs of the same nodes, edges, options and leaves, with tensors of the
            same shapes and precisions, and with losses and models marked at the same places.
    """

    nodes: list[Node]
    places: dict[Node, int]
    leaves: list[Tensor]
    losses: dict[Node, RecordedLoss]
    outputs: dict[tuple[Node, int], tuple[ForwardCall, torch.Size]]
    key: tuple[Any, ...]

    @property
    def module(self) -> nn.Module | None:
        """The module that made its first marked output; ``None`` without one."""
        return next((forward.module() for forward, _ in self.outputs.values()), None)

    def place(self, node: Node) -> int:
        """Return the number of a node; a new one if it was not met before."""
        number = self.places.get(node)
        if number is None:
            number = self.places[node] = len(self.nodes)
            self.nodes.append(node)
        return number


def outline(roots: Sequence[Tensor]) -> Outline | None:
    """Return the outline of a graph; ``None`` if the key would not tell what a pass through it computes.

    These are graphs with hooks of the user on tensors that are no leaves, with functions that PyTorch does not
    define, with losses of the user's own, with declared documents, with nested tensors, and with leaves that
    are no parameters.
    """
    key: list[Any] = []
    nodes: list[Node] = []
    found = Outline(nodes, {}, [], {}, {}, ())
    for root in roots:
        if root.grad_fn is None:
            return None
        key += (found.place(root.grad_fn), root.output_nr)
    for node in nodes:  # grows on the way
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if type(leaf) is not nn.Parameter:
                return None
            found.leaves.append(leaf)
            key += (id(leaf), *leaf.shape, leaf.dtype, leaf.device)
            continue
        marks = marks_of(node)
        if is_from_outside(node) or (marks and not _add_marks(found, node, marks, key)):
            return None
        edges = node.next_functions
        key += (node.name(), len(edges))
        for above, number in edges:
            key += (None,) if above is None else (found.place(above), number)
        try:
            for made in made_by(node):
                key += (*made.shape, made.dtype)
        except RuntimeError:  # of nested tensors
            return None
        for name in numbers_of_type(type(node)):
            value = getattr(node, name)
            key.append(value if type(value) is int else plain_options(value, name in EXPONENTS))
    return found._replace(key=tuple(key))


def _add_marks(found: Outline, node: Node, marks: dict[str, Any], key: list[Any]) -> bool:
    """Note the marks of a node; tell whether the key can tell them."""
    if HOOKS in marks or RETAINS in marks:
        return False
    if LOSS in marks:
        loss, output = marks[LOSS]
        if loss.documents is not None or loss.function not in LOSSES or loss.released:
            return False
        found.losses[node] = loss
        key += (loss.function, *loss.shape, loss.declared, output)
        key += told_axes(loss.function, loss.args, loss.kwargs)
    for output, (forward, shape) in marks.get(OUTPUT, {}).items():
        found.outputs[node, output] = forward, shape
        key += (id(forward.module()), forward.declared, output, *shape)
    return True


def may_be_kept(graph: Graph, outlined: Outline) -> bool:
    """Tell whether a walk found nothing that another pass of the same structure might find otherwise.

    All parameters enter uses as they are, and nothing else; no term lies beside the losses; no data decide on
    the order of rows; and no parameter is sharded between processes.
    """
    if graph.reading is None or not graph.losses:
        return False
    beside = graph.missing or graph.terms or graph.open or graph.without_loss or graph.mixers or graph.consumed
    if beside or graph.is_opaque or graph.units or graph.orders_by_values:
        return False
    if any(loss.others or loss.is_open for loss in graph.losses):
        return False
    sites = [site for use in graph.uses for site in use.sites]
    return (
        all(site.direct for site in sites)
        and {id(site.leaf) for site in sites} == set(map(id, outlined.leaves))
        and not any(use.recomputed or use.suspect for use in graph.uses)
    )


@dataclass(frozen=True)
class _KeptUse:
    """A use without its node, of which ``place`` is the number in the outline.

    Args:
        outputs: The outputs that the pass reaches.
        rule: The rule that made its entries.
        numbers: The numbers that the node has saved.
        waits: Whether a visit reads what the node has saved at once, unless a pass changes that.
        slots: The slots of nodes that its entries read, each with the number of the node in the outline.
    """

    use: ReachedUse
    place: int
    outputs: Sequence[int]
    rule: Any
    numbers: list[Any]
    waits: bool
    slots: list[tuple[NodeSlot, int]]


class KeptWalk:
    """A walk without the nodes that it went through, made of a graph with its samples located.

    See NOTE [Kept walks]. ``faults`` counts the passes that walks with this key did not hold for.
    """

    def __init__(self, graph: Graph, outlined: Outline, faults: int = 0) -> None:
        places = outlined.places
        self._served: dict[None, Outline] = {}  # the one pass that has it: only dictionaries set at once
        self._uses = [_kept(use, places) for use in graph.uses]
        self._constants = [(places[node], known) for node, known in graph.reading.answers.items()]
        self._own = [weakref.ref(tensor) for tensor in Constants(graph.forwards).tensors()]
        self._products = [  # that may take something without an edge
            place
            for place, node in enumerate(outlined.nodes)
            if name_of_node(node) in MATRIX_PRODUCTS and len(upstream_of(node)) < len(node.next_functions)
        ]
        self._losses = [
            (places[loss.node], loss.output, places[loss.call.edge.node], loss.layout) for loss in graph.losses
        ]
        self._outputs = [(places[edge.node], edge.output_nr) for edge, _, _ in graph.outputs]
        self._modules = [weakref.ref(module) for module in graph.modules]
        self._order = [places[node] for node in graph.order]
        self._found = graph.samples, graph.source_layouts, graph.structure, graph.signature
        summing = (*graph.reading.uses, *graph.reading.made_of_parameters)
        self._summing = [places[node] for node in summing if not hasattr(node, "variable")]
        self._nodes: Sequence[Node] = []
        self._notes: deque[Any] = deque(maxlen=MANY)
        self.leaves = outlined.leaves
        """The parameters that enter the uses."""
        self.faults, self.is_stale = faults, False
        """``is_stale``: whether this walk did not hold for a pass."""

    def bind(
        self, outlined: Outline, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Graph | None:
        """Return the graph of a pass, located and checked; ``None`` if the walk does not hold for it.

        Until ``release``, which every call of ``bind`` needs, no other pass can have it.
        """
        if self._served.setdefault(None, outlined) is not outlined:
            return None
        graph = None
        try:
            graph = self._bound(outlined, roots, gradients)
            return graph
        finally:
            if graph is None:
                self.faults, self.is_stale = self.faults + 1, True

    def release(self, outlined: Outline) -> None:
        """Forget the nodes of a pass, unless this walk serves another one."""
        if self._served.get(None) is not outlined:
            return
        for kept in self._uses:
            kept.use.nodes = {}
            for slot, _ in kept.slots:
                slot.node = None
        self._nodes = []
        self._served.clear()

    def meets_hooks(self, everywhere: bool) -> bool:
        """Tell whether the user has put hooks on nodes of the graph that this walk is bound to.

        A look at a node costs time twice: it leaves a dictionary of hooks that autograd reads in the pass.

        Args:
            everywhere: Whether packprop sweeps through the graph by itself, without any hook. Otherwise only
                hooks on gradients of parameters matter, which are sums over samples.
        """
        if everywhere:
            return meet_users_hooks([node for node in self._nodes if not hasattr(node, "variable")])
        return meet_users_hooks([self._nodes[place] for place in self._summing])

    def _bound(
        self, outlined: Outline, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Graph | None:
        nodes = outlined.nodes
        graph = Graph(roots, gradients)
        graph.losses = self._read_losses(outlined)
        if len(graph.losses) != len(self._losses):
            return None
        graph.outputs = [
            (GradientEdge(nodes[place], number), *outlined.outputs[nodes[place], number])
            for place, number in self._outputs
        ]
        constants = Constants(graph.forwards, self._own)
        if (
            [reference() for reference in self._modules] != graph.modules
            or any(constants.are_known(nodes[place]) is not known for place, known in self._constants)
            or any(takes_sparse(nodes[place]) for place in self._products)
        ):
            return None
        for kept in self._uses:
            node = nodes[kept.place]
            if _numbers(node) != kept.numbers or rule_for(node) is not kept.rule or keeps_elsewhere(node):
                return None
            for slot, place in kept.slots:
                slot.node = nodes[place]
            kept.use.nodes = {number: (node, number) for number in kept.outputs}
            kept.use.waits = kept.waits
        graph.uses = [kept.use for kept in self._uses]
        self._nodes = nodes
        graph.order = [nodes[place] for place in self._order]
        graph.hooks = Hooks(leaf for leaf in self.leaves if is_hooked(leaf))
        graph.samples, graph.source_layouts, graph.structure, graph.signature = self._found
        graph.notes, graph.is_settled = self._notes, True
        graph.units, graph.shards = [], {}
        return graph

    def _read_losses(self, outlined: Outline) -> list[ReachedLoss]:
        """Return the losses, fewer if one of them takes something else than before."""
        found: list[ReachedLoss] = []
        for place, output, given, layout in self._losses:
            node = outlined.nodes[place]
            call = outlined.losses.get(node)
            if call is None:
                try:
                    call = unmarked_loss(node)
                except RuntimeError:  # an earlier pass has freed the graph
                    return []
                assert call is not None  # the key tells that its input has an edge
            if outlined.places.get(call.edge.node) == given and not call.released and not call.others:
                found.append(ReachedLoss(call, node, output, layout))
        return found


def _numbers(node: Any) -> list[Any]:
    """Return the numbers that a node has saved, as they are."""
    return [getattr(node, name) for name in numbers_of_type(type(node))]


def _kept(use: ReachedUse, places: dict[Any, int]) -> _KeptUse:
    """Return a use without its node, with entries that read the node of each pass."""
    ((node, _), *_) = use.nodes.values()
    slots: list[NodeSlot] = []
    entries = entries_of_node(node, use.places, use.shapes, False, slots)
    kept = copy.copy(use)
    kept.entries = entries
    own = {id(before): entry for before, entry in zip(use.entries, entries, strict=True)}
    kept.sites = [Site(own[id(site.entry)], site.leaf) for site in use.sites]
    kept.nodes, kept.undecided = {}, False
    found = _KeptUse(
        kept,
        places[node],
        list(use.nodes),
        rule_for(node),
        _numbers(node),
        use.waits,
        [(slot, places[slot.node]) for slot in slots],
    )
    for slot in slots:
        slot.node = None
    return found
