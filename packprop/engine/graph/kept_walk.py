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
import operator
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
from packprop.engine.functions.nodes import is_from_outside, name_of_node, outputs_of, short_name
from packprop.engine.functions.operands import EXPONENTS, MATRIX_PRODUCTS, numbers_of_type, takes_sparse
from packprop.engine.functions.registry import rules_named
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.graph.constants import Constants
from packprop.engine.graph.graph import Graph, ReachedLoss, ReachedUse
from packprop.engine.graph.search import upstream_of
from packprop.engine.graph.site import Site
from packprop.engine.recording.marks import (
    HOOKS,
    LOSS,
    OUTPUT,
    RETAINS,
    ForwardCall,
    RecordedLoss,
    called_modules,
    marks_of,
    unmarked_loss,
)
from packprop.engine.tensors.hooks import NO_HOOKS, Hooks, hooked, meet_users_hooks

MANY = 8
"""The number of requests for which a kept walk holds notes."""

PLAIN = frozenset({int, bool, str, type(None)})
"""Types of values that the key holds unchanged, also in tuples, as ``plain_options`` would return them."""


Outputs = dict[tuple[Node, int], tuple[ForwardCall, torch.Size]]
"""Marked outputs of models: their node, and number among its outputs -> their call and shape."""


class Outline(NamedTuple):
    """The nodes of a graph, and a key that tells its structure.

    Args:
        nodes: Its nodes, in an order that is the same for graphs of equal structure.
        places: The number of each node in this order.
        numbers: The numbers that each node has saved, as they are.
        leaves: Its leaves, which are parameters.
        losses: The marked losses of nodes.
        outputs: Its marked outputs of models.
        key: A value that is equal for graphs of the same nodes, edges, options and leaves, with tensors of the
            same shapes and precisions, and with losses and models marked at the same places.
    """

    nodes: list[Node]
    places: dict[Node, int]
    numbers: list[list[Any]]
    leaves: list[Tensor]
    losses: dict[Node, RecordedLoss]
    outputs: Outputs
    key: tuple[Any, ...]

    @property
    def module(self) -> nn.Module | None:
        """The module that made its first marked output; ``None`` without one."""
        first = next(iter(self.outputs.values()), None)
        return None if first is None else first[0].module()


def outline(roots: Sequence[Tensor]) -> Outline | None:
    """Return the outline of a graph; ``None`` if the key would not tell what a pass through it computes.

    There is no outline of graphs with the user's hooks on tensors other than leaves, with functions that
    PyTorch does not define, with losses without a rule, with declared documents, with nested tensors, or with
    leaves that are no parameters.
    """
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    if len(starts) < len(roots):
        return None
    nodes = [*dict.fromkeys(starts)]
    places = {node: number for number, node in enumerate(nodes)}
    key: list[Any] = [(places[node], root.output_nr) for node, root in zip(starts, roots, strict=True)]
    numbers: list[list[Any]] = []
    leaves: list[Tensor] = []
    losses: dict[Node, RecordedLoss] = {}
    outputs: Outputs = {}
    kinds: dict[type, tuple[str, ...]] = {}
    for node in nodes:  # the list grows; this loop calls no Python function for a usual node
        own: list[Any] = []
        numbers.append(own)
        kind = type(node)
        if kind not in kinds:
            if is_from_outside(node):  # which may have a ``variable`` of its own
                return None
            kinds[kind] = numbers_of_type(kind)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if type(leaf) is not nn.Parameter:
                return None
            leaves.append(leaf)
            key.append(id(leaf))
            key += leaf.shape
            key += (leaf.dtype, leaf.device)
            continue
        marks = marks_of(node)
        if marks and not _add_marks(node, marks, losses, outputs, key):
            return None
        edges = node.next_functions
        key += (node.name(), len(edges))
        for above, number in edges:
            if above is None:
                key.append(None)
                continue
            if above not in places:
                places[above] = len(nodes)
                nodes.append(above)
            key += (places[above], number)
        try:
            for made in outputs_of(node):
                key += made.shape
                key.append(made.dtype)
        except RuntimeError:  # of nested tensors
            return None
        for name in kinds[kind]:
            value = getattr(node, name)
            own.append(value)
            is_plain = type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))
            key.append(value if is_plain else plain_options(value, name in EXPONENTS))
    return Outline(nodes, places, numbers, leaves, losses, outputs, tuple(key))


def _add_marks(
    node: Node, marks: dict[str, Any], losses: dict[Node, RecordedLoss], outputs: Outputs, key: list[Any]
) -> bool:
    """Note the marks of a node; return whether the key can hold them."""
    if HOOKS in marks or RETAINS in marks:
        return False
    if LOSS in marks:
        loss, output = marks[LOSS]
        if loss.documents is not None or loss.function not in LOSSES or loss.released:
            return False
        losses[node] = loss
        key += (loss.function, *loss.shape, loss.declared, output)
        key += told_axes(loss.function, loss.args, loss.kwargs)
    for output, (forward, shape) in marks.get(OUTPUT, {}).items():
        outputs[node, output] = forward, shape
        key += (id(forward.module()), forward.declared, output, *shape)
    return True


def may_be_kept(graph: Graph, outlined: Outline) -> bool:
    """Tell whether all findings of a walk hold for every pass of the same structure.

    They do if all parameters enter uses directly, and nothing else; no term lies beside the losses; data do not
    decide on the order of rows; and no parameter is sharded between processes.
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
    """A use without its node.

    Args:
        place: The number of the node in the outline.
        outputs: The outputs that the pass reaches.
        numbers: The numbers that the node has saved.
        waits: As in ``ReachedUse``, which a pass may change.
        slots: The slots of nodes that its entries read, each with the number of the node in the outline.
    """

    use: ReachedUse
    place: int
    outputs: Sequence[int]
    numbers: list[Any]
    waits: bool
    slots: list[tuple[NodeSlot, int]]


class KeptWalk:
    """A walk without the nodes that it went through, made of a graph whose samples have been located.

    See NOTE [Kept walks]. ``faults`` counts the passes that walks with this key could not serve.
    """

    def __init__(self, graph: Graph, outlined: Outline, faults: int = 0) -> None:
        places = outlined.places
        self._served: dict[None, Outline] = {}  # the one pass that has it; dict.setdefault is atomic
        self._uses = [_kept(use, outlined) for use in graph.uses]
        self._reached, self._entering = [kept.use for kept in self._uses], graph.leaves()
        self._names = {short_name(outlined.nodes[kept.place].name()): None for kept in self._uses}
        self._rules = rules_named(self._names)  # that made the entries of uses
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
        """``is_stale``: whether this walk could not serve a pass."""

    def bind(
        self, outlined: Outline, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Graph | None:
        """Return the graph of a pass, located and checked; ``None`` if the walk cannot serve the pass.

        No other pass can have the walk until ``release``, which must follow every call of ``bind``.
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

        Reading a node's hooks costs time twice: it creates a dictionary, which autograd then reads in the pass.

        Args:
            everywhere: Whether all hooks matter, because packprop also sweeps through the graph by itself.
                Otherwise only hooks on gradients of parameters matter, which are sums over samples.
        """
        if everywhere:
            return meet_users_hooks([node for node in self._nodes if not hasattr(node, "variable")])
        return meet_users_hooks([self._nodes[place] for place in self._summing])

    def _bound(
        self, outlined: Outline, roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Graph | None:
        nodes = outlined.nodes
        hooks = hooked(self.leaves)
        graph = Graph(roots, gradients, hooks=Hooks(hooks) if hooks else NO_HOOKS)
        graph.losses = self._read_losses(outlined)
        if len(graph.losses) != len(self._losses):
            return None
        graph.outputs = [
            (GradientEdge(nodes[place], number), *outlined.outputs[nodes[place], number])
            for place, number in self._outputs
        ]
        forwards = graph.forwards
        if [reference() for reference in self._modules] != called_modules(forwards):
            return None
        constants = Constants(forwards, self._own)
        for place, known in self._constants:
            if constants.are_known(nodes[place]) is not known:
                return None
        for place in self._products:
            if takes_sparse(nodes[place]):
                return None
        uses = [nodes[kept.place] for kept in self._uses]
        if keeps_elsewhere(*uses) or not all(map(operator.is_, rules_named(self._names), self._rules)):
            return None
        for kept, node in zip(self._uses, uses, strict=True):
            if outlined.numbers[kept.place] != kept.numbers:
                return None
            for slot, place in kept.slots:
                slot.node = nodes[place]
            kept.use.nodes, kept.use.waits = {}, kept.waits
            for number in kept.outputs:
                kept.use.nodes[number] = node, number
        graph.uses, graph.known_leaves = [*self._reached], self._entering
        self._nodes = nodes
        graph.order = [nodes[place] for place in self._order]
        graph.samples, graph.source_layouts, graph.structure, graph.signature = self._found
        graph.notes, graph.is_settled = self._notes, True
        graph.units, graph.shards = [], {}
        return graph

    def _read_losses(self, outlined: Outline) -> list[ReachedLoss]:
        """Return the losses that take the same input as before; none if an earlier pass has freed the graph."""
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


def _kept(use: ReachedUse, outlined: Outline) -> _KeptUse:
    """Return a use without its node, with entries that read the node of each pass."""
    ((node, _), *_) = use.nodes.values()
    places = outlined.places
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
        outlined.numbers[places[node]],
        use.waits,
        [(slot, places[slot.node]) for slot in slots],
    )
    for slot in slots:
        slot.node = None
    return found
